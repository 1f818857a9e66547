"""Where a run can be interrupted, with a small model that is compiled once: it goes on to the same bits, and hooks.

Real kills are in test_exact_resume.py, and other ways to train in tests/callbacks/test_backup_and_restore.py.
"""

from __future__ import annotations

import datetime
import itertools

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import callbacks as cb
from trainer.engine.loop import resumable_run

X = np.linspace(-1, 1, 10, dtype=np.float32).reshape(10, 1)
Y = X**2
EPOCHS, BATCHES, VALIDATION_BATCHES = 3, 3, 2  # the last batch has two rows
EVERY_BATCH = datetime.timedelta(microseconds=1)


class Interruption(Exception):
    """Instead of a kill: nothing of the run goes on after it."""


class Hooks(cb.Callback):
    """Counts its hooks over interruptions, and raises or stops at one of them."""

    state_attributes = ("counts",)

    def __init__(self, interrupt_at=None, stop_at=None):
        self.interrupt_at, self.stop_at, self.epoch, self.counts = interrupt_at, stop_at, 0, {}

    def _count(self, hook, number):
        self.counts = {**self.counts, hook: self.counts.get(hook, 0) + 1}
        at = (self.epoch, hook, number)
        if at == self.stop_at:
            self.model.stop_training = True
        if at == self.interrupt_at:
            raise Interruption

    def next_sync_step(self, phase, batch):
        return batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self._count("epoch begin", 0)

    def on_train_batch_end(self, batch, logs=None):
        self._count("train", batch)

    def on_test_batch_end(self, batch, logs=None):
        self._count("test", batch)

    def on_epoch_end(self, epoch, logs=None):
        self._count("epoch end", 0)

    def on_train_end(self, logs=None):
        self.last_logs = dict(logs)


class Run:
    """The results of a fit: weights, history, the counts of hooks, and the logs at the end."""

    def __init__(self, model, history, hooks):
        self.weights, self.history, self.epoch = model.get_weights(), history.history, history.epoch
        self.rate, self.step = model.optimizer.learning_rate, int(model.state.step)
        self.hooks, self.last_logs = hooks.counts, hooks.last_logs

    def assert_same(self, other):
        for ours, theirs in zip(self.weights, other.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert (self.history, self.epoch) == (other.history, other.epoch)
        assert (self.rate, self.step) == (other.rate, other.step)
        assert (self.hooks, self.last_logs) == (other.hooks, other.last_logs)


@pytest.fixture(scope="module")
def model():
    return compiled()


def compiled(steps_per_execution=1):
    model = trainer.Model(nn.Dense(1), seed=3)
    model.compile(
        trainer.optimizers.Adam(0.1), "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    model.build(X)
    model.first_state = model.state
    return model


def fit(model, hooks, *callbacks, epochs=EPOCHS, data=(X, Y), **options):
    """Trains from the first state; in another process, a resumed run would not have the state of this one either."""
    model.state = model.first_state
    plateau = cb.ReduceLROnPlateau("loss", patience=0, min_delta=1.0)
    options = {
        "batch_size": 4, "validation_data": (X[:6], Y[:6]), "validation_batch_size": 4, "verbose": 0} | options
    options = {name: value for name, value in options.items() if value is not None}
    history = model.fit(*data, epochs=epochs, callbacks=[*callbacks, hooks, plateau], **options)
    return Run(model, history, hooks)


def interrupted(model, folder, at, save_freq=1, stop_at=None, **options):
    """Trains until an interruption, as if by a kill: without the last save that an exception allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumable_run.TrainingRun, "_failed", lambda run: None)
        with pytest.raises(Interruption):
            fit(model, Hooks(at, stop_at), cb.BackupAndRestore(folder, save_freq), **options)


def resumed(model, folder, save_freq=1, stop_at=None, **options):
    return fit(model, Hooks(stop_at=stop_at), cb.BackupAndRestore(folder, save_freq), **options)


@pytest.fixture(scope="module")
def undisturbed(model):
    return fit(model, Hooks())


MOMENTS = [(epoch, hook, number) for epoch in range(EPOCHS) for hook, count in (
    ("epoch begin", 1), ("train", BATCHES), ("test", VALIDATION_BATCHES), ("epoch end", 1)) for number in range(count)]


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize(("save_freq", "at"), [
    *[(1, at) for at in MOMENTS], *[(save_freq, at) for save_freq in (2, "epoch") for at in MOMENTS if at[0] == 1],
    *[(EVERY_BATCH, at) for at in MOMENTS if at[1] == "test"]], ids=str)
def test_a_run_goes_on_from_any_moment(tmp_path, model, undisturbed, at, save_freq):
    interrupted(model, tmp_path / "run", at, save_freq)
    resumed(model, tmp_path / "run", save_freq).assert_same(undisturbed)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_goes_on_after_many_interruptions(tmp_path, model, undisturbed):
    for at in ((0, "train", 1), (0, "test", 0), (1, "train", 0), (1, "epoch end", 0), (2, "train", 2)):
        interrupted(model, tmp_path, at)
    resumed(model, tmp_path).assert_same(undisturbed)


def batches():
    """Yields the batches of one epoch."""
    for start in range(0, 10, 4):
        yield X[start:start + 4], Y[start:start + 4]


def endless():
    """Yields batches of four rows, which differ."""
    for number in itertools.count():
        yield X[:4] + number / 10, Y[:4]


class InAnotherOrder:
    """Yields batches in another order in each pass."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def __iter__(self):
        order = self.random.permutation(10)
        for start in range(0, 10, 4):
            yield X[order[start:start + 4]], Y[order[start:start + 4]]


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize("at", [(0, "train", 1), (0, "test", 0), (1, "train", 0), (2, "train", 2)], ids=str)
@pytest.mark.parametrize("kind", ["generator", "passes", "validation generator", "named sets", "in part"])
def test_data_go_on_where_they_were(tmp_path, model, kind, at):
    def options():
        return {
            "generator": {"data": ((batch for _ in range(EPOCHS) for batch in batches()),), "batch_size": None,
                          "steps_per_epoch": BATCHES},
            "passes": {"data": (InAnotherOrder(),), "batch_size": None},
            "validation generator": {"validation_data": endless(), "validation_batch_size": None,
                                     "validation_steps": VALIDATION_BATCHES},
            "named sets": {"validation_data": {"one": (X[:6], Y[:6]), "other": (X[3:], Y[3:])}},
            "in part": {"steps_per_epoch": BATCHES, "data": (np.tile(X, (4, 1)), np.tile(Y, (4, 1)))},
        }[kind]

    expected = fit(model, Hooks(), **options())
    interrupted(model, tmp_path, at, **options())
    resumed(model, tmp_path, **options()).assert_same(expected)


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize("stop_at", [(1, "train", 0), (1, "train", 2), (1, "test", 1), (1, "epoch end", 0)], ids=str)
@pytest.mark.parametrize("interrupt_at", [(0, "train", 0), (1, "train", 0), (1, "test", 0)], ids=str)
def test_a_stop_holds_over_an_interruption(tmp_path, model, stop_at, interrupt_at):
    expected = fit(model, Hooks(stop_at=stop_at))
    assert expected.epoch == [0, 1]
    interrupted(model, tmp_path, interrupt_at, stop_at=stop_at)
    resumed(model, tmp_path, stop_at=stop_at).assert_same(expected)


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize(("steps", "epoch"), [(2, 0), (3, 0), (4, 1), (6, 1)])
def test_a_run_that_ended_at_its_steps_is_there_already_and_goes_on_with_more(
        tmp_path, model, undisturbed, steps, epoch):
    first = resumed(model, tmp_path, max_steps=steps)
    assert (first.step, first.epoch[-1]) == (steps, epoch)
    again = resumed(model, tmp_path, max_steps=steps)
    assert (again.step, again.hooks["train"]) == (steps, steps)
    assert again.hooks.get("test", 0) == (steps - 1) // BATCHES * VALIDATION_BATCHES, "nothing is validated again"
    for weights, expected in zip(again.weights, first.weights, strict=True):
        np.testing.assert_array_equal(weights, expected)
    last = resumed(model, tmp_path)
    assert (last.history, last.step) == (undisturbed.history, undisturbed.step)


class NoBatchHooks(cb.Callback):
    """Lets steps be fused, as hooks for batches would not."""

    counts: dict[str, int] = {}
    on_train_end = Hooks.on_train_end


@pytest.mark.slow
def test_a_run_of_several_steps_per_execution_ends_at_its_steps_and_goes_on(tmp_path, undisturbed):
    model = compiled(steps_per_execution=2)
    for steps in (4, 5, 7):
        run = fit(model, NoBatchHooks(), cb.BackupAndRestore(tmp_path, 2), max_steps=steps)
        assert run.step == steps
    last = fit(model, NoBatchHooks(), cb.BackupAndRestore(tmp_path, 2))
    assert (last.step, last.epoch) == (undisturbed.step, undisturbed.epoch)
    for name, values in undisturbed.history.items():
        np.testing.assert_allclose(last.history[name], values, rtol=1e-5)


def kept(folder):
    return cb.BackupAndRestore(folder, delete_checkpoint=False)


def test_a_run_can_be_prolonged_but_not_shortened(tmp_path, model, undisturbed):
    fit(model, Hooks(), kept(tmp_path), epochs=2)
    with pytest.raises(ValueError, match=r"has 2 epochs behind it\. Received: epochs=1\. Give at least as many"):
        fit(model, Hooks(), kept(tmp_path), epochs=1)
    resumed(model, tmp_path).assert_same(undisturbed)


@pytest.mark.parametrize(("stop_at", "said"), [
    (None, "is complete, with 2 epochs: there is nothing left to train. Give more `epochs` to go on, or start in"),
    ((0, "epoch end", 0), "was stopped after 1 epoch: there is nothing left to train. Start in another folder")])
def test_a_run_without_a_further_epoch_says_so_and_keeps_its_results(tmp_path, model, capsys, stop_at, said):
    first = fit(model, Hooks(stop_at=stop_at), kept(tmp_path), epochs=2)
    fit(model, Hooks(), kept(tmp_path), epochs=2, verbose=2).assert_same(first)
    printed = capsys.readouterr().out
    assert said in printed and "Resumed" not in printed
