"""`OrbaxCheckpoint`: when it saves, beside Keras's, and what is there when it has."""

import os
import shutil
import threading
import warnings

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.waiting import GUARD_SECS
from trainer.callbacks import BackupAndRestore, Callback, LambdaCallback, OrbaxCheckpoint

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)).astype(np.float32), RNG.normal(size=(20, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


def compiled(**arguments):
    model = trainer.Model(nn.Dense(1))
    model.compile(**{"optimizer": "adam", "loss": "mse", **arguments})
    return model


def names(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def logged(values, callbacks):
    """Returns a callback that sets the log "watched"; None leaves it out."""
    def on_epoch_end(epoch, logs):
        if values[epoch] is not None:
            logs["watched"] = values[epoch]

    return callbacks.LambdaCallback(on_epoch_end=on_epoch_end)


CASES = {
    "newest": ({}, 3),
    "two": ({"max_to_keep": 2}, 3),
    "all": ({"max_to_keep": None}, 3),
    "foreground": ({"max_to_keep": 2, "save_on_background": False}, 3),
    "best": ({"monitor": "watched", "mode": "max", "save_best_only": True, "max_to_keep": None}, 5),
    "best above": ({"monitor": "watched", "mode": "max", "save_best_only": True, "max_to_keep": None,
                    "initial_value_threshold": 0.35}, 5),
    "min": ({"monitor": "watched", "mode": "min", "save_best_only": True, "max_to_keep": None}, 5),
    "batches": ({"save_freq": 3, "max_to_keep": None}, 3),
    "batches newest": ({"save_freq": 2}, 2),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
@pytest.mark.filterwarnings("ignore:Can save best model only:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_it_saves_and_keeps_what_kerass_does(tmp_path, keras, case):
    arguments, epochs = CASES[case]
    values, fits = [0.3, 0.5, 0.4, 0.6, 0.2], 2 if "save_freq" in arguments else 1
    theirs = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    theirs.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Orbax
        for _ in range(fits):  # each with another, as the end of a `fit` closes Keras's
            try:
                expected = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "theirs"), **arguments)
            except (ImportError, AttributeError) as error:
                pytest.skip(f"Keras needs another version of Orbax: {error}")
            theirs.fit(X, Y, batch_size=4, epochs=epochs, verbose=0,
                       callbacks=[logged(values, keras.callbacks), expected])
    model, checkpoint = compiled(), OrbaxCheckpoint(tmp_path / "ours", **arguments)
    for _ in range(fits):
        model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0,
                  callbacks=[logged(values, trainer.callbacks), checkpoint])
    assert names(tmp_path / "ours") == [name for name in names(tmp_path / "theirs") if name.isdecimal()]
    if arguments.get("save_best_only"):
        assert checkpoint.best == expected.best


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_is_the_state_of_its_epoch(tmp_path, background):
    weights = []
    noting = LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(noting.model.get_weights()))
    model = compiled()
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[noting, OrbaxCheckpoint(
        tmp_path / "run", max_to_keep=None, save_on_background=background)])
    for path, epoch in (("run/0", 0), ("run/1", 1), ("run", 2)):
        loaded = trainer.load(tmp_path / path, compiled())
        assert loaded.optimizer.iterations == epoch + 1
        for weight, same in zip(loaded.get_weights(), weights[epoch], strict=True):
            np.testing.assert_array_equal(weight, same)
    loaded.fit(X, Y, shuffle=False, verbose=0)
    model.fit(X, Y, shuffle=False, verbose=0)
    for weight, same in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.slow
def test_weights_alone_are_files_for_load_weights(tmp_path):
    model = compiled()
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run", save_weights_only=True,
                                                                    max_to_keep=2)])
    assert names(tmp_path / "run") == ["1.safetensors", "2.safetensors"]
    other = compiled()
    other.build(X)
    other.load_weights(tmp_path / "run" / "2.safetensors")
    np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.slow
def test_the_training_goes_on_while_a_thread_writes(tmp_path, monkeypatch):
    from trainer.engine.saving.checkpoint import orbax_arrays

    write, may_write, went_on = orbax_arrays.write, threading.Event(), []

    def waiting(*args):
        assert may_write.wait(GUARD_SECS)
        return write(*args)

    monkeypatch.setattr(orbax_arrays, "write", waiting)

    class GoesOn(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                went_on.append(names(tmp_path / "run"))
                may_write.set()

    compiled().fit(X, Y, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run"), GoesOn()])
    assert not any(name.isdecimal() for name in went_on[0])  # a hidden folder at most
    assert names(tmp_path / "run") == ["1"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("background", [True, False])
def test_what_cannot_be_written_ends_the_training_with_an_error(tmp_path, background):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run"):
        compiled().fit(X, Y, epochs=2, verbose=0, callbacks=[
            OrbaxCheckpoint(tmp_path / "run", save_on_background=background)])


def test_an_exception_leaves_a_whole_checkpoint_and_no_thread(tmp_path):
    class Fails(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        compiled().fit(X, Y, epochs=4, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run"), Fails()])
    assert trainer.load(tmp_path / "run", compiled()).optimizer.iterations == 2


@pytest.mark.slow
def test_without_the_monitor_of_the_best_nothing_is_trained(tmp_path):
    checkpoint = OrbaxCheckpoint(tmp_path / "run", "val_loss", save_best_only=True)
    by_batches = OrbaxCheckpoint(tmp_path / "run", "val_loss", save_best_only=True, save_freq=1)
    for callback, arguments in ((checkpoint, {}), (by_batches, {"validation_data": (X, Y)})):
        model = compiled()
        with pytest.raises(ValueError, match="OrbaxCheckpoint received monitor='val_loss', which no log has"):
            model.fit(X, Y, verbose=0, callbacks=[callback], **arguments)
        assert names(tmp_path) == [] and int(model.state.step) == 0
    # In an epoch without a validation nothing is saved, and nothing is wrong.
    compiled().fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), validation_freq=2, callbacks=[checkpoint])
    assert names(tmp_path / "run") == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_a_run_that_resumes_has_the_checkpoints_of_an_undisturbed_one(tmp_path, save_freq):
    class Fails(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 9 and not done:
                done.append(True)
                raise RuntimeError("on purpose")

    def run(folder):
        backup = BackupAndRestore(tmp_path / f"{folder}-backup", save_freq=1, delete_checkpoint=False)
        checkpoint = OrbaxCheckpoint(tmp_path / folder, "loss", save_freq=save_freq, save_best_only=True, max_to_keep=3)
        compiled().fit(X, Y, batch_size=4, epochs=4, verbose=0, callbacks=[checkpoint, Fails(), backup])
        return checkpoint

    done = [True]
    expected = run("undisturbed")
    done.clear()
    with pytest.raises(RuntimeError, match="on purpose"):
        run("resumed")
    resumed = run("resumed")
    assert names(tmp_path / "resumed") == names(tmp_path / "undisturbed") != []
    assert resumed.state_dict() == expected.state_dict()
    for name in names(tmp_path / "resumed"):
        states = [trainer.load(tmp_path / folder / name, compiled()).get_weights() for folder in
                  ("resumed", "undisturbed")]
        for weight, same in zip(*states, strict=True):
            np.testing.assert_array_equal(weight, same)


@pytest.mark.slow
def test_what_it_did_not_write_stays(tmp_path):
    other = tmp_path / "run" / "7"
    other.mkdir(parents=True)
    (other / "file").write_text("mine")
    compiled().fit(X, Y, epochs=3, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run")])
    assert names(tmp_path / "run") == ["2", "7"] and (other / "file").exists()
    shutil.rmtree(other)
    (tmp_path / "run" / "0").mkdir()
    with pytest.raises(FileExistsError, match="is not a checkpoint"):
        compiled().fit(X, Y, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run")])


def test_a_state_does_not_make_it_delete_elsewhere(tmp_path):
    checkpoint = OrbaxCheckpoint(tmp_path / "run")
    with pytest.raises((TypeError, ValueError), match="_kept"):
        checkpoint.load_state_dict({**checkpoint.state_dict(), "_kept": ["../elsewhere"]})


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"directory": ""}, ValueError, "`directory` must be the path of a folder"),
    ({"directory": 3}, TypeError, "`directory` must be the path of a folder"),
    ({"save_freq": "batch"}, ValueError, "save_freq"),
    ({"max_to_keep": 0}, ValueError, "max_to_keep"),
    ({"save_on_background": 1}, TypeError, "save_on_background"),
    ({"initial_value_threshold": "low"}, TypeError, "initial_value_threshold"),
])
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        OrbaxCheckpoint(**{"directory": "run", **arguments})


def test_a_folder_without_checkpoints_is_not_loaded(tmp_path):
    with pytest.raises(ValueError, match="is a folder, but no checkpoint"):
        trainer.load(tmp_path, compiled())
