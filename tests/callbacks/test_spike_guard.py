"""`SpikeGuard`: updates far above the running median are skipped in the step, and the run goes back to a save."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer
from tests.support.networks import LinenMLP, mirrored
from trainer.callbacks import BackupAndRestore, SpikeGuard
from trainer.distribute import FullyShardedStrategy

WINDOW, DEVIATIONS, ROWS, STEPS = 5, 40.0, 4, 24
SPIKES = (9, 15, 16, 17)


def data(spikes=SPIKES):
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * ROWS, 6)).astype(np.float32)
    y = (x[:, :3] * 0.5).astype(np.float32)
    for step in spikes:
        y[step * ROWS] = 300
    return x, y


def compiled(**options):
    model = trainer.Model(LinenMLP(), seed=0)
    model.compile(optax.adam(0.01), "mse", **options)
    model.build(np.zeros((1, 6), np.float32))
    return model


def fitted(model, *callbacks, spikes=SPIKES, epochs=1):
    return model.fit(*data(spikes), batch_size=ROWS, shuffle=False, verbose=0, epochs=epochs,
                     callbacks=list(callbacks)).history


def guard(**options):
    return SpikeGuard(WINDOW, DEVIATIONS, **options)


def by_hand():
    """Returns the parameters of a loop of plain JAX, and the steps that it skips."""
    model, tx, skipped, losses, norms = compiled(), optax.adam(0.01), [], [], []
    params = model.state.params
    opt_state = tx.init(params)
    x, y = data()

    def is_far(value, values):
        last = np.array(values[-WINDOW:], np.float32)
        median = np.median(last)
        return value > median + DEVIATIONS * max(np.median(np.abs(last - median)), 0.01 * abs(median))

    @jax.jit
    def gradients(params, x, y):
        return jax.value_and_grad(
            lambda params: ((model.apply(params, model.state, x, training=True)[0] - y) ** 2).mean())(params)

    for step in range(STEPS):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        loss, grads = gradients(params, x[rows], y[rows])
        norm = float(optax.tree.norm(grads))
        if len(losses) >= WINDOW and (is_far(float(loss), losses) or is_far(norm, norms)):
            skipped.append(step)
            continue
        losses.append(float(loss))
        norms.append(norm)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, skipped


@pytest.fixture(scope="module")
def expected():
    return by_hand()


def assert_same(one, other, rtol=1e-6):
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-7), one, other)


@pytest.mark.parametrize("options", [{}, pytest.param({"microbatches": 2, "ema_decay": 0.9}, marks=pytest.mark.slow)],
                         ids=["plain", "microbatches"])
def test_spikes_are_skipped_as_in_a_loop_by_hand(expected, options):
    params, skipped = expected
    assert set(SPIKES) <= set(skipped)
    model = compiled(**options)
    history = fitted(model, guard())
    assert history["skipped_steps"] == [len(skipped)] and "spike_streaks" not in history
    assert_same(model.state.params, params, rtol=1e-5 if options else 1e-6)
    assert int(model.state.step) == STEPS
    assert int(model.state.opt_state.spikes.count) == STEPS - len(skipped)


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    lambda: mirrored(2), lambda: FullyShardedStrategy(["cpu:0", "cpu:1"], min_shard_bytes=0),
], ids=["mirrored", "sharded"])
def test_two_devices_skip_the_same_updates(expected, make):
    with make().scope():
        model = compiled()
    assert fitted(model, guard())["skipped_steps"] == [len(expected[1])]
    assert_same(model.state.params, expected[0], rtol=1e-4)


class Watch(trainer.callbacks.Callback):
    """Keeps the weights after each batch."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_end(self, batch, logs=None):
        self.weights[batch] = np.array(self.model.get_weights()[1])


@pytest.mark.slow
def test_a_streak_goes_back_to_the_last_save_and_on_with_the_next_data(tmp_path, caplog):
    model, watch = compiled(steps_per_execution=1), Watch()
    back = guard(rollback_after=3, backup_dir=tmp_path)
    history = fitted(model, back, BackupAndRestore(tmp_path, save_freq=12), watch, spikes=(15, 16, 17))
    assert history["spike_streaks"] == [1.0] and history["skipped_in_a_row"] == [3.0]
    assert [record.levelname for record in caplog.records if "3 updates in a row were spikes" in record.message] == [
        "WARNING"]
    # The logs are read when the next execution has begun, which trained on the rolled-back weights' successors.
    saved, before = watch.weights[11], watch.weights[17]
    assert not np.array_equal(saved, before)
    assert int(model.state.step) == STEPS
    # 12 saved updates, and those after the rollback.
    made = int(model.state.opt_state.spikes.count)
    assert 12 < made < STEPS - 3
    assert int(model.state.opt_state.count) == made


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    class Stop(trainer.callbacks.Callback):
        def __init__(self, at):
            self.at = at

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at:
                raise KeyboardInterrupt

    def run(folder, stop=None):
        model = compiled(steps_per_execution=1)
        callbacks = [guard(rollback_after=3, backup_dir=folder), BackupAndRestore(folder, save_freq=6)]
        if stop is None:
            return model, fitted(model, *callbacks, spikes=(15, 16, 17), epochs=2)
        with pytest.raises(KeyboardInterrupt):
            fitted(model, *callbacks, Stop(stop), spikes=(15, 16, 17), epochs=2)

    whole, history = run(tmp_path / "whole")
    assert sum(history["spike_streaks"]) == 2
    for stop in (13, 17, 20):  # before the spikes, among them, and after the rollback
        run(tmp_path / str(stop), stop)
        resumed, resumed_history = run(tmp_path / str(stop))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state))
        assert resumed_history == history


@pytest.mark.slow
def test_the_folder_may_be_relative_or_in_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = []
    for folder in (tmp_path / "absolute", "relative", "memory://bucket/spikes"):
        model = compiled(steps_per_execution=1)
        history = fitted(model, guard(rollback_after=3, backup_dir=folder), BackupAndRestore(folder, save_freq=6),
                         spikes=(15, 16, 17))
        assert sum(history["spike_streaks"]) == 1
        weights.append(model.get_weights())
    jax.tree.map(np.testing.assert_array_equal, *weights[:2])
    jax.tree.map(np.testing.assert_array_equal, *weights[1:])


@pytest.mark.slow
def test_spikes_that_go_on_end_the_training_and_the_first_updates_are_never_spikes(tmp_path, capsys):
    model = compiled(steps_per_execution=1)
    back = guard(rollback_after=2, backup_dir=tmp_path, max_rollbacks=2)
    history = fitted(model, back, BackupAndRestore(tmp_path, save_freq=6), spikes=range(8, STEPS))
    assert capsys.readouterr().out.count("The losses spike again after 2 rollbacks; terminating training.") == 1
    assert model.stop_training and history["skipped_steps"][0] < STEPS - 8
    x, y = (array[:WINDOW * ROWS] for array in data((0, 2, 4)))
    assert compiled().fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[guard()]).history[
        "skipped_steps"] == [0.0]


@pytest.mark.slow
def test_values_that_are_not_finite_are_skipped_from_the_first_update_on():
    model = compiled()
    x, y = data(())
    y[0] = np.nan
    with pytest.warns(RuntimeWarning, match="has ended with loss=nan"):  # its batch counts
        history = model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[guard()]).history
    assert history["skipped_steps"] == [1.0]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert jnp.isfinite(model.state.opt_state.spikes.losses).all()


@pytest.mark.parametrize(("options", "says"), [
    ({"window": 1}, "`window` must be"), ({"deviations": 0.0}, "`deviations` must be"),
    ({"rollback_after": 3}, "give both, or neither"), ({"backup_dir": "runs"}, "give both, or neither"),
    ({"rollback_after": 0, "backup_dir": "runs"}, "`rollback_after` must be"),
    ({"max_rollbacks": 0}, "`max_rollbacks` must be")])
def test_arguments_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        SpikeGuard(**options)


def test_a_rollback_needs_the_checkpoints_of_the_same_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, back = compiled(), guard(rollback_after=3, backup_dir="here")
    for others, received in (([], "none"), ([BackupAndRestore("there")], r"BackupAndRestore\('there'\)")):
        with pytest.raises(ValueError, match=rf"checkpoints in 'here', where no callback .*Received: {received}\."):
            fitted(model, back, *others)
    with pytest.raises(ValueError, match=r"`callbacks` has 2 `SpikeGuard`s"):
        fitted(model, guard(), guard())
    fitted(model, back, BackupAndRestore(tmp_path / "here"))
