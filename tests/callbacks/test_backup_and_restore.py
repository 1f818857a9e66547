"""`BackupAndRestore` in fit: what resumes, what is refused, when it saves. Real kills are in test_exact_resume.py."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer import callbacks as cb
from trainer import distribute

pytestmark = pytest.mark.slow
X, Y, _ = classification(52)
BATCH_SIZE = 8  # 7 batches, the last one of 4 rows


class Interruption(Exception):
    """Instead of a kill: nothing of the run goes on after it."""


class Interrupt(cb.Callback):
    """Raises after a batch of an epoch."""

    def __init__(self, epoch, batch, phase="train"):
        self.at, self.phase, self.epoch = (epoch, batch), phase, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def next_sync_step(self, phase, batch):
        return batch

    def on_execution_end(self, phase, batch, logs=None):
        if phase == self.phase and (self.epoch, batch) == self.at:
            raise Interruption


def make_model(strategy=None, optimizer=None, **options):
    with (strategy or distribute.OneDeviceStrategy()).scope():
        model = trainer.Model(LinenMLP(batch_norm=True, dropout=0.2), seed=3)
        model.compile(optimizer or trainer.optimizers.Adam(0.02), logits_loss(), metrics=["accuracy"], **options)
    return model


def fit(model, *callbacks, data=(X, Y), epochs=3, **arguments):
    arguments = {"batch_size": BATCH_SIZE, "validation_data": (X[:20], Y[:20]), "verbose": 0} | arguments
    arguments = {name: value for name, value in arguments.items() if value is not None}
    plateau = cb.ReduceLROnPlateau("val_loss", patience=0, min_delta=1.0)
    return model.fit(*data, epochs=epochs, callbacks=[*callbacks, plateau], **arguments)


def interrupted(folder, interrupt, *callbacks, save_freq=2, model=None, **arguments):
    with pytest.raises(Interruption):
        fit(model or make_model(), cb.BackupAndRestore(folder, save_freq), interrupt, *callbacks, **arguments)


def assert_same_run(model, history, expected, expected_history):
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert history.history == expected_history.history
    assert history.epoch == expected_history.epoch
    assert float(model.optimizer.learning_rate) == float(expected.optimizer.learning_rate)


@pytest.fixture(scope="module")
def undisturbed():
    model = make_model()
    return model, fit(model)


@pytest.mark.parametrize("at", [(0, 3), (0, 6), (1, 0), (2, 6)], ids=str)
@pytest.mark.parametrize("save_freq", ["epoch", 2, datetime.timedelta(microseconds=1)], ids=str)
def test_a_run_goes_on_where_it_was_interrupted(tmp_path, undisturbed, at, save_freq):
    interrupted(tmp_path / "backup", Interrupt(*at), save_freq=save_freq)
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path / "backup", save_freq)), *undisturbed)


@pytest.mark.parametrize("steps", [3, 16])
def test_a_run_goes_on_with_other_executions(tmp_path, undisturbed, steps):
    interrupted(tmp_path, Interrupt(1, 4), save_freq=3)
    model = make_model(steps_per_execution=steps)
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path, 5)), *undisturbed)


def test_an_interrupted_validation_begins_anew(tmp_path, undisturbed):
    interrupted(tmp_path, Interrupt(1, 1, "test"), save_freq=datetime.timedelta(microseconds=1))
    model = make_model()

    class Counter(cb.Callback):
        batches = 0

        def on_test_batch_end(self, batch, logs=None):
            self.batches += 1

    counter = Counter()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path), counter), *undisturbed)
    assert counter.batches == 2 * 3, "the validations of the second and third epoch"


@pytest.mark.every_case
def test_a_run_that_was_interrupted_twice_goes_on(tmp_path, undisturbed):
    interrupted(tmp_path, Interrupt(0, 5))
    interrupted(tmp_path, Interrupt(2, 1))
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path, 2)), *undisturbed)


def test_a_finished_training_deletes_its_checkpoints_unless_told_otherwise(tmp_path, undisturbed):
    fit(make_model(), cb.BackupAndRestore(tmp_path / "deleted", 2))
    assert not (tmp_path / "deleted").exists()
    fit(make_model(), cb.BackupAndRestore(tmp_path / "kept", 2, delete_checkpoint=False))
    assert len(list((tmp_path / "kept").glob("step_*"))) == 2
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path / "kept", "epoch")), *undisturbed)


@pytest.mark.parametrize(("double", "count"), [(True, 2), (False, 1)])
def test_so_many_checkpoints_are_kept(tmp_path, double, count):
    fit(make_model(), cb.BackupAndRestore(tmp_path, 2, double_checkpoint=double, delete_checkpoint=False), epochs=1)
    assert len(list(tmp_path.glob("step_*"))) == count


def test_training_can_be_prolonged(tmp_path, undisturbed):
    fit(make_model(), cb.BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path), epochs=3), *undisturbed)


def test_a_saved_model_is_not_taken_for_a_run(tmp_path):
    model = make_model()
    model.build(X)
    model.save(tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"is a model that `Model.save` wrote.*`trainer.load_model\("):
        fit(model, cb.BackupAndRestore(tmp_path / "saved"))


def test_a_run_that_has_ended_says_that_nothing_is_left(tmp_path, capsys):
    class Stops(cb.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    for name, callbacks, said in (
            ("complete", (), "is complete, with 2 epochs: there is nothing left to train. Give more `epochs` to go on"),
            ("stopped", (Stops(),), "was stopped after 1 epoch: there is nothing left to train. Start in another")):
        for _ in range(2):
            model = make_model()
            fit(model, cb.BackupAndRestore(tmp_path / name, delete_checkpoint=False), *callbacks, epochs=2, verbose=2)
        printed = capsys.readouterr().out
        assert said in printed and "Resumed" not in printed


def test_a_run_that_was_stopped_stays_stopped(tmp_path):
    class Stops(cb.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 4

    expected = make_model()
    expected_history = fit(expected, Stops())
    assert len(expected_history.epoch) == 1
    interrupted(tmp_path, Interrupt(0, 1, "test"), Stops(), save_freq=1)
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path), Stops()), expected, expected_history)


def test_the_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path, undisturbed):
    interrupted(tmp_path, Interrupt(1, 5))
    newest = max(tmp_path.glob("[a-z]*_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    document = newest / "document.json"
    document.write_bytes(document.read_bytes()[:-3])
    model = make_model()
    with pytest.warns(UserWarning, match=r"document\.json.*Taking .*instead"):
        history = fit(model, cb.BackupAndRestore(tmp_path))
    assert_same_run(model, history, *undisturbed)


def test_without_a_whole_checkpoint_there_is_no_silent_restart(tmp_path):
    interrupted(tmp_path, Interrupt(1, 5))
    for path in tmp_path.glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(ValueError, match=r"No checkpoint in .* is whole"):
        fit(make_model(), cb.BackupAndRestore(tmp_path))


# --- other data, models and callbacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "named"), [
    ({"data": (X[:40], Y[:40])}, r"batches of an epoch \(received 5, then 7\), rows \(received 40, then 52\)"),
    ({"data": (X + 1, Y)}, "training data .* differ in first batch"),
    ({"batch_size": 4}, "training data"),
    ({"shuffle": False}, "training data .* differ in first batch"),
    ({"validation_data": (X[:12], Y[:12])}, "validation data"),
])
def test_other_data_are_refused(tmp_path, changes, named):
    interrupted(tmp_path, Interrupt(0, 5))
    with pytest.raises(ValueError, match=named):
        fit(make_model(), cb.BackupAndRestore(tmp_path), **changes)


def test_another_model_is_refused(tmp_path):
    interrupted(tmp_path, Interrupt(0, 5))
    with pytest.raises(ValueError, match=r"state/opt_state"):
        fit(make_model(optimizer=trainer.optimizers.Adam(0.02, amsgrad=True)), cb.BackupAndRestore(tmp_path))


def test_other_callbacks_are_refused(tmp_path):
    interrupted(tmp_path, Interrupt(0, 5))
    with pytest.raises(ValueError, match=r"Resume with the same callbacks"):
        fit(make_model(), cb.BackupAndRestore(tmp_path), cb.EarlyStopping("loss"))


@pytest.mark.smoke
def test_what_a_callback_cannot_save_is_named(tmp_path):
    class Odd(cb.Callback):
        state_attributes = ("thing",)
        thing = object()

    with pytest.raises(TypeError, match=r"callbacks.*Odd.*thing"):
        fit(make_model(), cb.BackupAndRestore(tmp_path, 2), Odd())


# --- other data than arrays -------------------------------------------------------------------------------------------


def batches():
    """Yields the batches of all epochs."""
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(X))
        for start in range(0, len(X), BATCH_SIZE):
            yield X[order[start:start + BATCH_SIZE]], Y[order[start:start + BATCH_SIZE]]


def validation_batches():
    """Yields other batches for each validation."""
    for start in range(6):
        yield X[start:start + 8], Y[start:start + 8]


class Iterable:
    """Batches that can be read anew, in an order of their own."""

    def __iter__(self):
        return iter(list(batches())[:7])


PIPELINES = {
    "generator": lambda: {"data": (batches(),), "steps_per_epoch": 7},
    "iterable": lambda: {"data": (Iterable(),)},
    "uneven parts of passes": lambda: {"data": (Iterable(),), "steps_per_epoch": 5},
    "as many steps as batches": lambda: {"data": (Iterable(),), "steps_per_epoch": 7},
    "dataset": lambda: {"data": (trainer.data.Dataset.from_arrays((X, Y)).shuffle(1).batch(BATCH_SIZE)
                                  .map(lambda x, y: (x * 2, y)),)},
    "validated by a generator": lambda: {"data": (Iterable(),), "validation_data": validation_batches(),
                                             "validation_steps": 2},
}


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_pipelines_are_continued(tmp_path, kind, capfd):
    expected = make_model()
    expected_history = fit(expected, batch_size=None, **PIPELINES[kind]())
    for at in ((0, 4), (1, 1 if kind == "uneven parts of passes" else 3)):
        interrupted(tmp_path, Interrupt(*at), batch_size=None, **PIPELINES[kind]())
    model = make_model()
    history = fit(model, cb.BackupAndRestore(tmp_path), **PIPELINES[kind](), batch_size=None, verbose=2)
    assert_same_run(model, history, expected, expected_history)
    line = capfd.readouterr().out.splitlines()[0]
    assert line.startswith("Resumed at epoch 2, batch ")
    assert ("batches were read and dropped" in line) == (kind != "dataset")


def test_grain_continues_by_its_state(tmp_path, capfd):
    grain = pytest.importorskip("grain")

    def pipeline(seed=0, rows=52, first=None):
        # The first rows are those of `first` rows, so that only the length differs.
        numbers = [*grain.MapDataset.range(first or rows).shuffle(seed=seed)][:rows]
        rows = grain.MapDataset.source(numbers).map(lambda row: (X[row], Y[row]))
        return rows.batch(BATCH_SIZE).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    for data, steps in ((pipeline, None), (lambda: iter(pipeline()), 3), (pipeline, 3)):
        folder = tmp_path / f"{steps}_{data is pipeline}"
        expected, arguments = make_model(), {"batch_size": None, "steps_per_epoch": steps, "epochs": 2}
        expected_history = fit(expected, data=(data(),), **arguments)
        interrupted(folder, Interrupt(1, 1), save_freq=1, data=(data(),), **arguments)
        model = make_model()
        history = fit(model, cb.BackupAndRestore(folder), data=(data(),), **arguments | {"verbose": 2})
        assert_same_run(model, history, expected, expected_history)
        assert "dropped" not in capfd.readouterr().out.splitlines()[0]
    interrupted(tmp_path, Interrupt(1, 1), save_freq=1, data=(pipeline(),), batch_size=None)
    with pytest.raises(ValueError, match=r"training data .* differ in first batch.* seed"):
        fit(make_model(), cb.BackupAndRestore(tmp_path), data=(pipeline(seed=1),), batch_size=None)
    with pytest.raises(ValueError, match=r"training data .* differ in steps of the pipeline"):
        fit(make_model(), cb.BackupAndRestore(tmp_path), data=(pipeline(rows=48, first=52),), batch_size=None)


def test_a_generator_with_other_batches_goes_on_with_a_warning(tmp_path):
    interrupted(tmp_path, Interrupt(0, 4), batch_size=None, **PIPELINES["generator"]())
    other = ((x + 1, y) for x, y in batches())
    with pytest.warns(UserWarning, match="not as it would have done"):
        fit(make_model(), cb.BackupAndRestore(tmp_path), data=(other,), steps_per_epoch=7, batch_size=None)


# --- other devices ----------------------------------------------------------------------------------------------------


def many_devices():
    return distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(4)], min_shard_bytes=0)


def layers_over_devices():
    return distribute.ModelParallelStrategy({"replica": 2, "model": 2}, [f"cpu:{index}" for index in range(4)],
                                            {"Dense_0/kernel": (None, "model")})


def on_a_mesh():
    return distribute.ModelParallelStrategy(
        {"replica": 2, "shard": 2, "model": 2}, [f"cpu:{index}" for index in range(8)],
        {"Dense_0/kernel": (None, "model")}, min_shard_bytes=0)


@pytest.mark.parametrize(("before", "after"), [
    (lambda: mirrored(2), lambda: mirrored(4)), (lambda: mirrored(2), many_devices), (many_devices, lambda: None),
    (many_devices, layers_over_devices), (layers_over_devices, lambda: mirrored(2)), (many_devices, on_a_mesh),
    (on_a_mesh, layers_over_devices),
], ids=["more-devices", "mirrored-sharded", "sharded-one", "sharded-parallel", "parallel-mirrored", "sharded-mesh",
        "mesh-parallel"])
def test_a_run_goes_on_on_other_devices(tmp_path, before, after):
    def plain_model(strategy):
        with (strategy or distribute.OneDeviceStrategy()).scope():
            model = trainer.Model(LinenMLP(batch_norm=True), seed=3)
            model.compile(trainer.optimizers.SGD(0.05, momentum=0.9), logits_loss(), metrics=["accuracy"])
        return model

    expected = plain_model(None)
    expected_history = fit(expected)
    interrupted(tmp_path, Interrupt(1, 3), model=plain_model(before()))
    model = plain_model(after())
    history = fit(model, cb.BackupAndRestore(tmp_path))
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, values in expected_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, err_msg=name)


# --- arguments and the signal -----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_empty_folder_name_is_refused():
    with pytest.raises(ValueError, match=r"`backup_dir` must be the path of a folder .* an empty one"):
        cb.BackupAndRestore("")


PREEMPTED = """
import os, signal, sys
import numpy as np
sys.path.insert(0, {root!r})
from tests.callbacks import test_backup_and_restore as tests
from trainer import callbacks as cb

class Preempt(cb.Callback):
    def __init__(self, phase, batch):
        self.phase, self.batch = phase, batch
    def next_sync_step(self, phase, batch):
        return batch
    def on_execution_end(self, phase, batch, logs=None):
        if (phase, batch) == (self.phase, self.batch):
            os.kill(os.getpid(), signal.{name})

model = tests.make_model()
tests.fit(model, cb.BackupAndRestore("backup", preemption_signal=signal.{name}), Preempt({phase!r}, {batch}))
print("not preempted")
"""


@pytest.mark.parametrize(("name", "phase", "batch"), [("SIGTERM", "train", 3), ("SIGUSR1", "test", 1)])
def test_a_preempted_run_saves_exits_and_goes_on(tmp_path, undisturbed, name, phase, batch):
    script = PREEMPTED.format(root=str(pathlib.Path(__file__).parents[2]), name=name, phase=phase, batch=batch)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 143, done.stderr
    assert f"Received {name}: the run is saved in 'backup'" in done.stderr
    assert "not preempted" not in done.stdout
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path / "backup")), *undisturbed)


def failing(folder, error, *callbacks, data=(X, Y), **arguments):
    """Runs a fit that ends by an exception, with a checkpoint for nothing else."""
    backup = cb.BackupAndRestore(folder, save_freq=10**6, save_on_error=True)
    with pytest.raises(error):
        fit(make_model(), backup, *callbacks, data=data, **arguments)
    return backup


def assert_goes_on(folder, expected, data=(X, Y), **arguments):
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(folder), data=data, **arguments), *expected)


def raise_at(epoch, error=Interruption):
    def hook(number, logs=None):
        if number == epoch:
            raise error
    return hook


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_an_exception_at_an_epochs_border_leaves_a_run_that_goes_on(tmp_path, undisturbed, hook, caplog):
    rates = cb.LambdaCallback()  # changes what the exception must not leave behind
    rates.on_epoch_end = lambda epoch, logs: setattr(
        rates.model.optimizer, "learning_rate", 0.5 if epoch == 1 else 0.02)
    failing(tmp_path, Interruption, *[rates] * (hook == "on_epoch_end"), cb.LambdaCallback(**{hook: raise_at(1)}))
    assert f"The run is saved in {str(tmp_path)!r}, as it was before the exception" in caplog.text
    assert_goes_on(tmp_path, undisturbed)


def test_an_exception_in_a_validation_leaves_a_run_that_goes_on(tmp_path, undisturbed):
    failing(tmp_path, Interruption, Interrupt(1, 1, "test"))
    assert_goes_on(tmp_path, undisturbed)


@pytest.mark.parametrize("fails_at", [3, 7])
def test_an_exception_in_the_data_leaves_a_run_that_goes_on(tmp_path, fails_at):
    class Data:
        def __init__(self, fails_at=None):
            self.fails_at, self.read = fails_at, -1  # the first is looked at

        def __iter__(self):
            for start in range(0, 40, 8):
                if self.read == self.fails_at:
                    raise OSError("the disk is gone")
                self.read += 1
                yield X[start:start + 8], Y[start:start + 8]

    model = make_model()
    expected = model, fit(model, data=(Data(),), batch_size=None, validation_batch_size=8)
    failing(tmp_path, RuntimeError, data=(Data(fails_at),), batch_size=None, validation_batch_size=8)
    assert_goes_on(tmp_path, expected, data=(Data(),), batch_size=None, validation_batch_size=8)


def test_a_callback_that_fails_after_a_batch_leaves_what_was_saved_before(tmp_path):
    with pytest.warns(UserWarning, match=r"could not be saved.* a step had run after batch 3 of epoch 1"):
        failing(tmp_path, Interruption, Interrupt(0, 3))
    assert not list(tmp_path.glob("step_*"))


class CountsBegun(cb.Callback):
    """Counts the batches that begin."""

    state_attributes = ("count",)

    def __init__(self, fails_at=None):
        self.count, self.fails_at = 0, fails_at

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1
        if self.count == self.fails_at:
            raise Interruption


@pytest.mark.parametrize("fails_at", [4, 6, 8])
def test_a_batch_that_begins_again_after_an_exception_is_counted_once(tmp_path, undisturbed, fails_at):
    counting, whole = CountsBegun(), CountsBegun()
    failing(tmp_path, Interruption, CountsBegun(fails_at))
    model = make_model()
    assert_same_run(model, fit(model, cb.BackupAndRestore(tmp_path), counting), *undisturbed)
    fit(make_model(), whole)
    assert counting.count == whole.count


def test_nothing_is_saved_of_a_run_that_had_just_begun_or_without_being_asked(tmp_path):
    begun = cb.LambdaCallback(on_epoch_begin=raise_at(0))
    with pytest.warns(UserWarning, match=r"could not be saved.*it had just begun"):
        failing(tmp_path, Interruption, begun)
    interrupted(tmp_path / "other", cb.LambdaCallback(on_epoch_end=raise_at(0)), save_freq=10**6)
    assert not list(tmp_path.glob("**/step*"))


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_at_the_next_boundary_and_ends_at_once_if_it_comes_again(tmp_path, undisturbed, times, caplog):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(batch, logs):
        if batch == 3:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    context = pytest.warns(UserWarning, match="could not be saved") if times == 2 else contextlib.nullcontext()
    try:
        with context:
            failing(tmp_path, KeyboardInterrupt, cb.LambdaCallback(on_train_batch_end=press))
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Ctrl-C: the run ends after these batches" in caplog.text
    if times == 1:
        assert_goes_on(tmp_path, undisturbed)


def test_the_signal_means_what_it_meant_once_fit_is_over(tmp_path):
    received = []
    outer = signal.signal(signal.SIGTERM, lambda *arguments: received.append(arguments))
    try:
        fit(make_model(), cb.BackupAndRestore(tmp_path / "whole"), epochs=1)
        signal.raise_signal(signal.SIGTERM)
        assert len(received) == 1
        interrupted(tmp_path / "interrupted", Interrupt(0, 3))
        signal.raise_signal(signal.SIGTERM)
        assert len(received) == 2
    finally:
        signal.signal(signal.SIGTERM, outer)


def test_the_time_that_saving_takes_is_counted(tmp_path):
    assert fit(make_model(), cb.BackupAndRestore(tmp_path, 2), epochs=1).timing["checkpoint"] > 0
