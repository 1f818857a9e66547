"""Compiling before the data are there, and not compiling again at the next start."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import numpy as np
import pytest

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.networks import LinenMLP, classification, compiled_mlp, logits_loss, mirrored
from trainer.data import Dataset

x, y, _ = classification(21)


class Batches:
    def __iter__(self):
        return ((x[start:start + 8], y[start:start + 8]) for start in (0, 8))


def make_model():
    with mirrored(2).scope():
        model = trainer.Model(LinenMLP(), seed=1)
        model.compile("sgd", logits_loss(), metrics=["accuracy"])
    return model


WAYS = {
    "arrays": (((x, y), 8), lambda model: model.fit(x, y, batch_size=8, epochs=2, verbose=0)),
    "a batch": (((x[:8], y[:8]),), lambda model: model.fit(Batches(), epochs=2, verbose=0)),
    "an iterable": ((Batches(),), lambda model: model.fit(Batches(), epochs=2, verbose=0)),
    "a dataset": ((Dataset.from_arrays((x, y)).batch(8),),
                  lambda model: model.fit(Dataset.from_arrays((x, y)).shuffle(3).batch(8), epochs=2, verbose=0)),
}


class Endless:
    def __iter__(self):
        while True:
            yield x[:8], y[:8]


@pytest.mark.parametrize("sample", [(x[:8], y[:8]), Dataset.from_arrays((x, y)).batch(8).repeat()])
def test_an_epoch_of_few_steps_is_compiled_ahead_too(sample):
    model = make_model()
    model.compile_ahead(sample, epochs=1, steps_per_epoch=3)
    with count_compilations() as compiled:
        model.fit(Endless() if isinstance(sample, tuple) else sample, steps_per_epoch=3, verbose=0)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_fit_after_it_compiles_nothing_and_trains_alike(way):
    arguments, fit = WAYS[way]
    model = make_model()
    assert model.compile_ahead(*arguments) > 0
    assert int(model.current_run.state.step) == 0
    fit(make_model())
    with count_compilations() as compiled:
        fit(model)
    assert not compiled
    fresh = make_model()
    fit(fresh)
    for mine, other in zip(model.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_it_need_not_know_how_many_epochs_there_will_be(epochs):
    model = make_model()
    model.compile_ahead((x, y), batch_size=8)
    make_model().fit(x, y, batch_size=8, epochs=epochs, verbose=0)
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0)
    assert not compiled


@pytest.mark.slow
def test_evaluate_and_predict_compile_ahead_too():
    model = make_model()
    model.compile_ahead((x, y), batch_size=8, epochs=1, phases=("test", "predict"))
    make_model().evaluate(x, y, batch_size=8, verbose=0)
    with count_compilations() as compiled:
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
    assert not compiled


@pytest.mark.slow
def test_the_validation_of_a_later_fit_compiles_ahead_too():
    model = make_model()
    model.compile_ahead((x, y), batch_size=8, phases=("train", "test"))
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("data", [
    lambda: Dataset.from_arrays((x, y)).batch(32),
    lambda: Dataset.from_arrays((x[:16], y[:16])).batch(8).map(lambda x, y: (x, y)),
    lambda: list(Batches()),
], ids=["one batch", "mapped", "list of batches"])
def test_datasets_of_known_length_compile_ahead(data):
    model, dataset = make_model(), data()
    model.compile_ahead(dataset)
    with count_compilations() as compiled:
        model.fit(dataset, epochs=2, verbose=0)
    assert not compiled


@pytest.mark.slow
def test_endless_data_and_data_forced_onto_the_device_compile_ahead():
    endless = Dataset.from_arrays((x, y)).repeat().batch(8)
    model = make_model()
    model.compile_ahead(endless)
    with count_compilations() as compiled:
        model.fit(endless, epochs=2, steps_per_epoch=200, verbose=0)
    assert not compiled
    forced = compiled_mlp(2, data_on_device=True)
    assert forced.compile_ahead((x, y)) > 0


def test_what_cannot_be_compiled_for_is_refused():
    model = make_model()
    with pytest.raises(ValueError, match="`sample` is empty"):
        model.compile_ahead(())
    with pytest.raises(ValueError, match="`epochs` must be a whole number of at least 1"):
        model.compile_ahead((x, y), epochs=0)
    with pytest.raises(TypeError, match="phases"):
        model.compile_ahead((x, y), phases=None)
    with pytest.raises(ValueError, match="Unknown phase 'fit'"):
        model.compile_ahead((x, y), phases=("fit",))
    with pytest.raises(ValueError, match="`sample` must be data that can be read again"):
        model.compile_ahead(iter(Batches()))
    with pytest.raises(RuntimeError, match="Call `compile"):
        trainer.Model(LinenMLP()).compile_ahead((x, y))


SCRIPT = """
import sys
import jax, numpy as np
import trainer
from flax import linen as nn

events = []
jax.monitoring.register_event_listener(lambda event, **details: events.append(event))
folder = trainer.enable_compilation_cache(sys.argv[1])
model = trainer.Sequential([nn.Dense(3), nn.Dense(1)])
model.compile("sgd", "mse")
x = np.linspace(0, 1, 40, dtype=np.float32).reshape(10, 4)
history = model.fit(x, x[:, :1], batch_size=4, verbose=0).history
count = len(list(folder.iterdir()))
other = trainer.enable_compilation_cache(sys.argv[1] + "-other")
model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=4, verbose=0)
assert len(list(folder.iterdir())) == count and any(other.iterdir()), "the folder that was set last is used"
print(events.count("/jax/compilation_cache/cache_hits"), events.count("/jax/compilation_cache/cache_misses"),
      history["loss"][0].hex())
"""


@pytest.mark.slow
def test_the_second_start_takes_every_program_from_the_cache_and_gives_the_same_bits(tmp_path):
    folder = tmp_path / "made" / "for it"
    own = {name: value for name, value in os.environ.items() if "_CACHE_" not in name}  # without the suite's settings
    runs = [subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=True,
                           env=own).stdout.split() for _ in range(2)]
    (hits, misses, loss), (later_hits, later_misses, later_loss) = runs
    assert int(misses) > 0 == int(hits)
    assert int(later_hits) > 0 == int(later_misses)
    assert loss == later_loss
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="`folder` must be writable"):
        trainer.enable_compilation_cache(tmp_path)


def test_a_folder_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`folder` must be a path, or None.*an empty one"):
        trainer.enable_compilation_cache("")
    with pytest.raises(TypeError, match="folder"):
        trainer.enable_compilation_cache(5)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(FileExistsError):
        trainer.enable_compilation_cache(path)
