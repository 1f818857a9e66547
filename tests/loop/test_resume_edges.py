"""Less usual runs that are interrupted and go on: data that depend on their passes, arguments that differ, signals."""

from __future__ import annotations

import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.callbacks.test_backup_and_restore import (
    BATCH_SIZE,
    Interrupt,
    Interruption,
    X,
    Y,
    assert_same_run,
    batches,
    fit,
    interrupted,
    make_model,
)
from trainer import callbacks as cb
from trainer.callbacks.base.late_logs_callback import LateLogsCallback
from trainer.distribute.cluster.description import package_versions
from trainer.engine.loop import begun_run, resumable_run


class Shuffled:
    """Batches in another order in each pass, as a seeded loader of another library draws them."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        order = self.rng.permutation(len(X))
        for start in range(0, len(X), BATCH_SIZE):
            yield X[order[start:start + BATCH_SIZE]], Y[order[start:start + BATCH_SIZE]]


class Indexed:
    """What `keras.utils.PyDataset` is used for: shuffled at the end of each epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.on_epoch_end()

    def on_epoch_end(self):
        self.order = self.rng.permutation(len(X))

    def __len__(self):
        return -(-len(X) // BATCH_SIZE)

    def __getitem__(self, index):
        rows = self.order[index * BATCH_SIZE:][:BATCH_SIZE]
        return X[rows], Y[rows]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, 5])
@pytest.mark.parametrize("data", [Shuffled, Indexed])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_that_depend_on_the_passes_before_go_on(tmp_path, data, steps):
    arguments = {"batch_size": None, "steps_per_epoch": steps, "shuffle": False}
    expected = make_model()
    expected_history = fit(expected, data=(data(),), **arguments)
    for at in ((0, 4), (2, 1)):
        interrupted(tmp_path, Interrupt(*at), data=(data(),), **arguments)
    model = make_model()
    history = fit(model, cb.BackupAndRestore(tmp_path), data=(data(),), **arguments)
    assert_same_run(model, history, expected, expected_history)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_what_ends_an_epoch_comes_before_the_next_batch_is_read(tmp_path):
    def interrupt(batch, logs=None):
        if int(model.state.step) == 7:
            raise KeyboardInterrupt

    arguments = {"batch_size": None, "steps_per_epoch": 5, "shuffle": False}
    expected, model = make_model(), make_model()
    expected_history = fit(expected, data=(Indexed(),), **arguments)
    with pytest.raises(KeyboardInterrupt):
        fit(model, cb.BackupAndRestore(tmp_path, save_freq=5), cb.LambdaCallback(on_train_batch_end=interrupt),
            data=(Indexed(),), **arguments)
    resumed = make_model()
    history = fit(resumed, cb.BackupAndRestore(tmp_path), data=(Indexed(),), **arguments)
    assert_same_run(resumed, history, expected, expected_history)


@pytest.mark.slow
def test_a_generator_that_was_read_to_its_end_has_no_further_epoch(tmp_path):
    def once():
        yield from list(batches())[:7]

    with pytest.warns(UserWarning, match="ran out of data"):
        fit(make_model(), cb.BackupAndRestore(tmp_path, delete_checkpoint=False), data=(once(),), batch_size=None)
    history = fit(make_model(), cb.BackupAndRestore(tmp_path), data=(once(),), batch_size=None)
    assert history.epoch == [0]


@pytest.mark.slow
def test_a_generator_is_read_on_by_a_later_fit():
    generator, seen = batches(), []

    class Counts(cb.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    model, whole = make_model(), make_model()
    for first in (0, 1):
        fit(model, Counts(), data=(generator,), batch_size=None, steps_per_epoch=7, initial_epoch=first,
            epochs=first + 1)
    fit(whole, data=(batches(),), batch_size=None, steps_per_epoch=7, epochs=2)
    assert seen == [*range(7)] * 2
    for ours, theirs in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class ReadsLate(LateLogsCallback):
    state_attributes = ("seen",)

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.seen = []

    def _read_logs(self, first, last, logs):
        self.seen.append((first, last, logs["loss"]))


class SavesInValidation(cb.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_save_point(self, point):
        if point.kind == "start":
            point.restore(self.folder)
        if point.kind == "validation":
            point.save(self.folder, keep=1, wait=True)


@pytest.mark.slow
def test_logs_that_are_read_late_are_read_once(tmp_path):
    def seen(*callbacks):
        reader = ReadsLate()
        fit(make_model(steps_per_execution=1), reader, *callbacks, validation_data=(X, Y), epochs=1)
        return reader.seen

    with pytest.raises(Interruption):
        seen(SavesInValidation(str(tmp_path)), Interrupt(0, 1, "test"))
    resumed = seen(SavesInValidation(str(tmp_path)))
    assert resumed == seen() and len(resumed) > 1


@pytest.mark.slow
def test_the_end_of_training_is_told_the_last_logs_after_a_resume_too(tmp_path):
    ends = []

    class Ends(cb.Callback):
        def on_train_end(self, logs=None):
            ends.append(dict(logs))

    for _ in range(2):
        fit(make_model(), cb.BackupAndRestore(tmp_path, delete_checkpoint=False), Ends(), epochs=1)
    assert ends[0] == ends[1] != {}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "arguments", "message"), [
    ({"precision": "mixed_bfloat16"}, {}, "differs in precision"),
    ({"regularizers": {"**/kernel": "l2"}}, {}, r"differs in regularizers \(received \[\['\*\*/kernel', 'L2"),
    ({"microbatches": 2}, {}, r"differs in microbatches \(received 2, in the checkpoint 1\)"),
    ({}, {"initial_epoch": 1}, r"differs in initial_epoch \(received 1, in the checkpoint 0\)"),
    ({}, {"epochs": 0}, r"has 1 epochs behind it\. Received: epochs=0"),
])
def test_what_differs_from_the_run_is_refused(tmp_path, make, arguments, message):
    fit(make_model(), cb.BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=1)
    with pytest.raises(ValueError, match=message):
        fit(make_model(**make), cb.BackupAndRestore(tmp_path), **arguments)
    assert any(tmp_path.glob("step_*")), "the checkpoint stays"


def small_model(optimizer=None, loss="mse", metrics=("mae",), **options):
    model = trainer.Model(nn.Dense(1), seed=3)
    model.compile(optimizer or trainer.optimizers.Adam(0.02), loss, metrics=list(metrics), **options)
    return model


def small_fit(folder, model, epochs=1, dtype=np.float32, as_generator=False):
    x, y = X.astype(dtype), Y[:, None].astype(np.float32)
    data = (itertools.repeat((x[:8], y[:8])),) if as_generator else (x, y)
    return model.fit(*data, batch_size=None if as_generator else 8, steps_per_epoch=3 if as_generator else None,
                     epochs=epochs, verbose=0, callbacks=[cb.BackupAndRestore(folder, delete_checkpoint=False)])


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now", "message"), [
    (None, trainer.optimizers.AdamW(0.02), r"optimizer \(received 'AdamW', in the checkpoint 'Adam'\)"),
    (optax.adam(0.1), optax.adamw(0.1), "optimizer .*'scale_by_adam, add_decayed_weights, scale', in the"),
    (optax.adam(0.1), optax.nadam(0.1), r"optimizer \(received 'scale_by_adam \(nesterov\), scale', in the"),
    (optax.inject_hyperparams(optax.adam)(0.1), optax.inject_hyperparams(optax.nadam)(0.1), "optimizer .*nesterov"),
    (optax.apply_if_finite(optax.adam(0.1), 3), optax.apply_if_finite(optax.adamw(0.1), 3), "optimizer .*'apply_if_f"),
])
def test_another_optimizer_with_the_same_state_is_refused(tmp_path, then, now, message):
    small_fit(tmp_path, small_model(then))
    with pytest.raises(ValueError, match=f"differs in {message}"):
        small_fit(tmp_path, small_model(now), epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("now", "message"), [
    ({"loss": "mae"}, r"loss \(received 'MeanAbsoluteError\(\)', in the checkpoint 'Huber\(\)'\)"),
    ({"loss": trainer.losses.Huber(delta=2.0)}, r"loss \(received 'Huber\(delta=2.0\)'"),
    ({"loss": lambda y, outputs: (y - outputs) ** 2}, "loss .*'<lambda>'"),
    ({"metrics": ["mse"]}, "logs .*'mse': 'MeanSquaredError'.*'mae'"),
])
def test_another_loss_or_other_logs_are_refused(tmp_path, now, message):
    small_fit(tmp_path, small_model(loss="huber"))
    with pytest.raises(ValueError, match=f"differs in {message}"):
        small_fit(tmp_path, small_model(**{"loss": "huber", **now}), epochs=2)


def squared(scale):
    return lambda y, outputs: scale * (y - outputs) ** 2


class Weighed(trainer.Model):
    factor = 1.0

    def compute_loss(self, x, y, y_pred, sample_weight):
        return self.factor * super().compute_loss(x, y, y_pred, sample_weight)


class Stepping(trainer.Model):
    factor = 1.0

    def train_step(self, state, batch):
        x, y = batch

        def loss_of(params):
            outputs, _ = self.apply(params, state, x, training=True)
            return self.factor * jnp.mean((outputs - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return {"loss": loss}, state.apply_gradients(grads)


def same_loss(**compiled):
    return lambda: small_model(**{"loss": squared(1.0), **compiled})


def subclass(base, factor):
    def make():
        model = type(base.__name__, (base,), {"factor": factor})(nn.Dense(1), seed=3)
        model.compile("sgd", "mse")
        return model
    return make


def same_signs(y, outputs):
    return jnp.square(y - outputs)


@jax.custom_vjp
def other_signs(y, outputs):
    return jnp.square(y - outputs)


other_signs.defvjp(lambda y, outputs: (other_signs(y, outputs), y - outputs), lambda kept, g: (g * kept, g * kept))
other_signs.__name__ = "same_signs"


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now", "what"), [
    (same_loss(), same_loss(loss=squared(2.0)), "the loss"),
    (same_loss(loss=same_signs), same_loss(loss=other_signs), "the loss"),
    (same_loss(), same_loss(optimizer=trainer.optimizers.Adam(0.01)), "the optimizer"),
    (same_loss(), same_loss(optimizer=trainer.optimizers.Adam(0.02, beta_1=0.8)), "the optimizer"),
    (subclass(Weighed, 1.0), subclass(Weighed, 3.0), "the loss"),
    (subclass(Stepping, 1.0), subclass(Stepping, 3.0), "`train_step`, with the module,"),
])
def test_what_has_the_same_name_and_computes_otherwise_is_warned_of(tmp_path, then, now, what):
    small_fit(tmp_path, then())
    small_fit(tmp_path, then(), epochs=2)
    with pytest.warns(UserWarning, match=f"The computation of {what} differs from the run .*another folder"):
        assert small_fit(tmp_path, now(), epochs=3).epoch == [0, 1, 2]


class LooksAtValues(Stepping):
    def train_step(self, state, batch):
        logs, state = super().train_step(state, batch)
        assert float(logs["loss"]) >= 0
        return logs, state


class OwnUpdate(Stepping):
    def train_step(self, state, batch):
        grads = jax.tree.map(jnp.ones_like, state.params)
        return {"loss": jnp.zeros(())}, state.replace(
            params=jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state.params, grads), step=state.step + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "compiled"), [
    (LooksAtValues, {"optimizer": "sgd", "run_eagerly": True}), (OwnUpdate, {"optimizer": None}),
])
def test_what_cannot_be_traced_is_saved_and_resumed_as_well(tmp_path, base, compiled):
    for epochs in (1, 2):
        model = base(nn.Dense(1), seed=3)
        model.compile(loss="mse", **compiled)
        assert small_fit(tmp_path, model, epochs=epochs).epoch == list(range(epochs))


@pytest.mark.slow
def test_what_computes_is_not_compared_across_versions_of_packages(tmp_path, monkeypatch):
    small_fit(tmp_path, small_model(loss=squared(1.0)))
    monkeypatch.setitem(package_versions.COMPARED_PACKAGES, "jax", "flax")
    small_fit(tmp_path, small_model(loss=squared(2.0)), epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("kind of device", "NVIDIA H100"), ("compiler", "jaxlib 0.1")])
def test_another_kind_of_device_or_compiler_is_warned_of(tmp_path, monkeypatch, name, value):
    here = resumable_run.describe_platform(jax.devices())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(resumable_run, "describe_platform", lambda devices: {**here, name: value})
        small_fit(tmp_path, small_model())
    with pytest.warns(UserWarning, match=rf"had another {name} \(here {here[name]}, then {value}\). .* not to the bit"):
        assert small_fit(tmp_path, small_model(), epochs=2).epoch == [0, 1]


@pytest.mark.slow
def test_a_run_is_not_made_deterministic_on_its_way(tmp_path):
    small_fit(tmp_path, small_model())
    with pytest.raises(ValueError, match=r"deterministic \(received True, in the checkpoint False\)"):
        small_fit(tmp_path, small_model(deterministic=True), epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("as_generator", [True, False])
def test_data_of_another_type_are_refused(tmp_path, as_generator):
    small_fit(tmp_path, small_model(), as_generator=as_generator)
    with pytest.raises(ValueError, match=r"types \(received x: float16, y: float32, then x: float32, y: float32\)"):
        small_fit(tmp_path, small_model(), 2, np.float16, as_generator)


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [
    (trainer.optimizers.Adam(0.02), trainer.optimizers.Adam(0.01, beta_1=0.8)),
    (optax.adam(0.02), optax.adam(0.01, b1=0.8)),
    (trainer.optimizers.Adam(trainer.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)),
     trainer.optimizers.Adam(trainer.optimizers.schedules.CosineDecay(0.1, 5))),
])
def test_other_hyperparameters_of_the_optimizer_are_accepted_with_a_warning(tmp_path, then, now):
    small_fit(tmp_path, small_model(then))
    with pytest.warns(UserWarning, match="The computation of the optimizer .* a constant learning rate is taken from"):
        assert small_fit(tmp_path, small_model(now), epochs=2).epoch == [0, 1]


def test_a_run_that_was_killed_before_its_first_checkpoint_tells_the_next_what_it_had_begun(tmp_path):
    class Begins(cb.Callback):
        state_attributes = ("rows",)

        def __init__(self, rows):
            self.rows, self.begun_by = rows, None

        def snapshot_side_effects(self):
            return {"rows": self.rows}

        def rollback_side_effects(self, note):
            self.begun_by = note

    first, second = Begins(3), Begins(5)
    for callback in (first, second):
        begun_run.begin(tmp_path, cb.CallbackList([callback]))
    assert first.begun_by is None and second.begun_by == {"rows": 3}
    begun_run.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_backups_of_one_run_are_refused(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    with pytest.raises(Interruption):
        fit(make_model(), *(cb.BackupAndRestore(folder, 1) for folder in folders), Interrupt(0, 3))
    with pytest.raises(ValueError, match="Two `BackupAndRestore`"):
        fit(make_model(), *(cb.BackupAndRestore(folder, 1) for folder in folders))


@pytest.mark.slow
def test_a_relative_folder_does_not_move_with_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    class Moves(cb.Callback):
        def on_epoch_end(self, epoch, logs=None):
            os.chdir(tmp_path / "elsewhere")

    fit(make_model(), cb.BackupAndRestore("backup", delete_checkpoint=False), Moves(), epochs=2)
    assert len(list((tmp_path / "backup").glob("step_*"))) == 2


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    begun = []
    begins = cb.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    with pytest.raises(OSError, match="cannot be written to the folder"):
        fit(make_model(), cb.BackupAndRestore(tmp_path / "file"), begins)
    assert not begun


@pytest.mark.slow
def test_the_signal_ends_the_process_after_fits_that_failed(tmp_path):
    received = []
    outer = signal.signal(signal.SIGTERM, lambda *arguments: received.append(arguments))
    backup = cb.BackupAndRestore(tmp_path, 2)
    try:
        for _ in range(2):
            with pytest.raises(Interruption):
                fit(make_model(), backup, Interrupt(2, 3))
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, outer)
    assert len(received) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("members", "message"), [
    ({"state_attributes": "count"}, r"must be a tuple of names.*Write \('count',\)"),
    ({"state_dict": lambda self: {}}, "defines `state_dict` and not `load_state_dict`"),
])
def test_a_callback_that_could_not_be_restored_is_refused_at_the_first_save(tmp_path, members, message):
    odd = type("Odd", (cb.Callback,), members)()
    with pytest.raises(TypeError, match=message):
        fit(make_model(), cb.BackupAndRestore(tmp_path, 1), odd)


class Halves(cb.Callback):
    """Changes weights and learning rate in the middle of epochs, and counts how often."""

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        if batch % 3 == 2:
            self.count += 1
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])
            self.model.optimizer.learning_rate = 0.02 / (1 + self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.slow
def test_what_a_callback_changes_in_an_epoch_takes_effect_and_is_saved(tmp_path):
    plain, expected = make_model(), make_model()
    fit(plain)
    halves = Halves()
    expected_history = fit(expected, halves)
    assert halves.count == 6
    assert any((one != other).any() for one, other in zip(plain.get_weights(), expected.get_weights(), strict=True))
    interrupted(tmp_path, Interrupt(1, 4), Halves(), save_freq=2)
    model, resumed = make_model(), Halves()
    history = fit(model, cb.BackupAndRestore(tmp_path), resumed)
    assert_same_run(model, history, expected, expected_history)
    assert resumed.count == 6


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, training: bool = False):
        x = nn.BatchNorm(use_running_average=not training)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not training)(x))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 3)])
def test_a_run_goes_on_with_the_same_masks_on_another_number_of_devices(tmp_path, before, after):
    x = np.random.default_rng(0).normal(size=(44, 5)).astype(np.float32)

    class Stop(cb.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(devices, *callbacks):
        with trainer.distribute.MirroredStrategy([f"cpu:{index}" for index in range(devices)]).scope():
            model = trainer.Model(Dropped(), seed=2)
            model.compile(optax.sgd(0.05, momentum=0.9), "mse")
        history = model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=list(callbacks)).history
        return history["loss"], jax.tree.map(np.asarray, model.state)

    undisturbed = fit(1)
    with pytest.raises(KeyboardInterrupt):
        fit(before, cb.BackupAndRestore(tmp_path, save_freq=4), Stop())
    resumed = fit(after, cb.BackupAndRestore(tmp_path, save_freq=4))
    for expected, found in zip(jax.tree.leaves(undisturbed), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=5e-3, atol=1e-3)  # other masks differ in the first digit
