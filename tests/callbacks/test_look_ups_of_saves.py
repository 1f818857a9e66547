"""The installed packages and the commit of the script are looked up once a process, and not at each save or epoch."""

import subprocess
from importlib import metadata

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import callbacks as cb
from trainer.callbacks.record import environment, run_record
from trainer.distribute.cluster.description import package_versions


@pytest.mark.slow
def test_a_later_epoch_with_saves_reads_no_package_metadata_and_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "MIN_SECS_BETWEEN_WRITES", 0.0)
    for cached in (environment.versions, environment.git_state, package_versions._version):
        cached.cache_clear()
    looked_up = []
    for module, name in ((metadata, "distribution"), (subprocess, "Popen")):
        whole = getattr(module, name)

        def counted(*args, whole=whole, name=name, **kwargs):
            looked_up.append(name)
            return whole(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    counts = []
    at_epochs = cb.LambdaCallback(on_epoch_begin=lambda epoch, logs: counts.append(len(looked_up)))
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    saves = [cb.BackupAndRestore(tmp_path / "backup", save_freq=1), cb.ModelCheckpoint(tmp_path / "model")]
    model.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), batch_size=4, epochs=3, verbose=0,
              callbacks=[*saves, at_epochs])
    assert counts[1] > 0  # of the first save and of the record of the run
    assert counts[1] == counts[2] == len(looked_up)
