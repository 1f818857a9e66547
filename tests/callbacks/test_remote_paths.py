"""Callbacks and models with paths in an object store, which fsspec's memory stands for."""

import csv
import io
import json

import fsspec
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import event_files
from trainer import callbacks
from trainer.callbacks import loggers

STORE = fsspec.filesystem("memory")
X = np.random.default_rng(0).normal(size=(24, 3)).astype("f4")
Y = X.sum(1, keepdims=True)


@pytest.fixture
def place():
    yield "memory://bucket/here"
    STORE.store.clear()
    STORE.pseudo_dirs[:] = [""]


def compiled():
    model = trainer.Model(nn.Dense(1), seed=0)
    model.compile("adam", "mse")
    return model


def content(path):
    return STORE.cat_file(path).decode()


class Fails(callbacks.Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("on purpose")


@pytest.mark.slow
def test_a_run_resumes_from_a_store_with_its_logs(place, tmp_path):
    def run(folder, fails_at):
        model = compiled()
        history = model.fit(X, Y, batch_size=4, epochs=4, verbose=0, callbacks=[
            callbacks.BackupAndRestore(f"{folder}/run", save_freq=4, delete_checkpoint=False),
            callbacks.CSVLogger(f"{folder}/log.csv"), callbacks.LogTo(loggers.JSONLines(f"{folder}/log.jsonl")),
            callbacks.ModelCheckpoint(f"{folder}/w-{{epoch}}.safetensors", "loss", save_weights_only=True,
                                      max_to_keep=2),
            Fails(fails_at)])
        return model, history

    expected, its_history = run(tmp_path, None)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(place, 3)
    model, history = run(place, None)
    assert history.history == its_history.history
    for weight, same in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)
    for name in ("log.csv", "log.jsonl"):
        here, there = content(f"{place}/{name}"), (tmp_path / name).read_bytes().decode()
        assert here.replace(place, "") == there.replace(str(tmp_path), "") and len(here.splitlines()) == 5
    kept = [f"w-{epoch}.safetensors" for epoch in (3, 4)]
    assert sorted(path.name for path in tmp_path.glob("w-*")) == kept
    assert sorted(path.rsplit("/", 1)[1] for path in STORE.glob(f"{place}/w-*")) == kept
    record = json.loads(content(f"{place}/run/run.json"))
    assert record["status"] == "finished" and len(record["earlier"]) == 1


def test_a_finished_run_deletes_its_checkpoints(place):
    compiled().fit(X, Y, verbose=0, callbacks=[callbacks.BackupAndRestore(f"{place}/run")])
    assert STORE.find("bucket") == []


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["state", "state.safetensors"])
def test_a_model_is_saved_and_loaded(place, name):
    model = compiled()
    model.fit(X, Y, verbose=0)
    for _ in range(2):
        model.save(f"{place}/{name}")
    with pytest.raises(FileExistsError, match="exists already"):
        model.save(f"{place}/{name}", overwrite=False)
    loaded = trainer.load(f"{place}/{name}", compiled())
    assert loaded.optimizer.iterations == 1
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_weights_and_exports_are_files_of_a_store(place):
    model, other = compiled(), compiled()
    model.build(X)
    other.build(X)
    model.save_weights(f"{place}/w.safetensors")
    with pytest.raises(FileNotFoundError, match=r"There is no file 'memory://bucket/here/v.safetensors'. Did you mean"):
        other.load_weights(f"{place}/v.safetensors")
    other.load_weights(f"{place}/w.safetensors")
    other.export(f"{place}/m.export")
    exported = trainer.load_exported(f"{place}/m.export")
    np.testing.assert_allclose(exported.predict(X), model.predict(X, verbose=0), rtol=1e-6)
    with pytest.raises(ValueError, match=r"The format 'stablehlo' is a folder .*Export to a local folder, and copy it"):
        model.export(f"{place}/m", format="stablehlo")


def test_a_log_that_is_appended_to_keeps_what_there_was(place):
    for epoch in range(2):
        logger = callbacks.CSVLogger(f"{place}/log.csv", append=True)
        compiled().fit(X, Y, verbose=0, epochs=epoch + 1, initial_epoch=epoch, callbacks=[logger])
    rows = list(csv.DictReader(io.StringIO(content(f"{place}/log.csv"))))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    lines = loggers.JSONLines(f"{place}/log.jsonl", append=True)
    STORE.pipe_file(f"{place}/log.jsonl", b'{"cut')
    lines.log_metrics({"loss": 0.5}, step=0)
    assert content(f"{place}/log.jsonl") == '{"cut\n{"step": 0, "loss": 0.5}\n'


@pytest.mark.slow
def test_tensorboard_reads_what_is_written_to_a_store(place, tmp_path):
    model = trainer.Model(nn.Sequential([nn.Embed(4, 3), nn.Dense(1)]), seed=0)
    model.compile("sgd", "mse")
    model.fit(np.arange(4), np.zeros((4, 1), "f4"), epochs=2, verbose=0, callbacks=[
        callbacks.TensorBoard(f"{place}/tb", embeddings_freq=1),
        callbacks.LogTo(loggers.TensorBoardFiles(f"{place}/b"))])
    for folder, tag, count in (("tb/train", "epoch_loss", 2), ("b", "loss", 2)):
        STORE.get(f"{place}/{folder}", str(tmp_path / folder), recursive=True)
        assert [row[1] for row in event_files.read_events(tmp_path / folder)].count(tag) == count
    assert "train/embeddings/layers_0.tsv" in content(f"{place}/tb/projector_config.pbtxt")
    with pytest.raises(ValueError, match="`profile_batch` writes the profile of JAX, which goes to the local disk"):
        callbacks.TensorBoard(f"{place}/tb", profile_batch=2)


@pytest.mark.slow
def test_a_report_is_made_in_a_store(place):
    pytest.importorskip("jinja2"), pytest.importorskip("matplotlib")
    compiled().fit(X, Y, verbose=0, callbacks=[callbacks.RunRecord(f"{place}/run")])
    assert trainer.report(f"{place}/run") == f"{place}/run/report.html"
    assert "<html" in content(f"{place}/run/report.html")


@pytest.mark.parametrize("refused", [
    lambda: callbacks.OrbaxCheckpoint("gs://bucket/run"), lambda: callbacks.Profile("s3://bucket/p", (1, 2)),
    lambda: trainer.estimator.RunConfig(model_dir="gs://bucket/run"),
])
def test_others_take_local_paths_alone(refused):
    with pytest.raises(ValueError, match=r"must be a path of the local file system\. Received: '(gs|s3)://bucket"):
        refused()


def test_the_compilation_cache_takes_the_stores_that_jax_opens():
    with pytest.raises(ValueError, match=r"`folder` must be .* that JAX's cache can open: gs:// or s3://. Received: '"):
        trainer.enable_compilation_cache("memory://bucket/cache")
