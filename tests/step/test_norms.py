"""`compile(log_norms=True)`: norms of gradients, updates and parameters, in all and by top-level module."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer.core.updates.norms import LOGS
from trainer.distribute import FullyShardedStrategy

X, Y, _ = classification(24)
STEPS = 3


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))


def compiled(module=LinenMLP, **options):
    model = trainer.Model(module(), seed=1)
    model.compile(options.pop("optimizer", None) or optimizer(), logits_loss(), log_norms=True, **options)
    return model


def fitted(model, **options):
    """Returns the history of epochs of a single step."""
    return model.fit(X, Y, batch_size=24, shuffle=False, epochs=STEPS, verbose=0, **options).history


def by_hand(frozen=()):
    """Returns the norms of a loop of plain optax."""
    model = compiled()
    model.build(X[:1])
    params, tx = model.state.params, optimizer()
    trained = {name: value for name, value in params.items() if name not in frozen}
    opt_state, logs = tx.init(trained), {}
    for _ in range(STEPS):
        def loss_of(trained):
            logits = model.apply({**params, **trained}, model.state, X, training=True)[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()

        grads = jax.grad(loss_of)(trained)
        updates, opt_state = tx.update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        for log, tree in zip(LOGS, (grads, updates, trained), strict=True):
            logs.setdefault(log, []).append(float(optax.tree.norm(tree)))
            for name, part in tree.items():
                logs.setdefault(f"{log}/{name}", []).append(float(optax.tree.norm(part)))
    return logs


@pytest.fixture(scope="module")
def expected():
    return by_hand()


def assert_logs(history, expected, rel=1e-6):
    assert {name for name in history if "norm" in name} == expected.keys()
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=rel, abs=1e-7), name


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "skip_non_finite": True}], ids=["plain", "ema"])
def test_norms_are_those_of_optax(expected, options):
    assert_logs(fitted(compiled(**options)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
@pytest.mark.parametrize("make", [
    lambda: mirrored(3), lambda: FullyShardedStrategy(["cpu:0", "cpu:1"], min_shard_bytes=0),
], ids=["mirrored", "sharded"])
def test_norms_are_the_same_on_any_number_of_devices_and_with_microbatches(module, make):
    one = fitted(compiled(module))
    with make().scope():
        several = compiled(module, microbatches=2)
    history = fitted(several)
    assert_logs(history, {name: values for name, values in one.items() if "norm" in name}, rel=1e-5)


@pytest.mark.slow
def test_frozen_parameters_do_not_count_and_an_optimizer_by_module_gives_the_same_sums():
    assert_logs(fitted(compiled(freeze=["Dense_0"])), by_hand(frozen=["Dense_0"]))
    sgd = {"Dense_0": optax.sgd(0.1), "Dense_1": optax.sgd(0.1)}
    by_module = fitted(compiled(optimizer=sgd))
    whole = fitted(compiled(optimizer=optax.sgd(0.1)))
    assert_logs(by_module, {name: values for name, values in whole.items() if "norm" in name})


@pytest.mark.slow
def test_a_skipped_update_has_the_norm_zero():
    model = compiled(skip_non_finite=True)
    x = X.copy()
    x[3] = np.nan
    history = model.fit(x, Y, batch_size=24, verbose=0).history
    assert history["update_norm"] == [0.0] and history["update_norm/Dense_0"] == [0.0]
    assert not np.isfinite(history["grad_norm"][0]) and np.isfinite(history["param_norm"][0])


@pytest.mark.slow
def test_the_progress_bar_shows_totals_and_files_have_all(tmp_path, capsys):
    model = compiled()
    model.fit(X, Y, batch_size=8, verbose=2, callbacks=[trainer.callbacks.CSVLogger(tmp_path / "log.csv")])
    shown = capsys.readouterr().out
    assert "grad_norm: " in shown and "param_norm: " in shown and "grad_norm/" not in shown
    header = (tmp_path / "log.csv").read_text().splitlines()[0].split(",")
    assert {f"{log}/Dense_1" for log in LOGS} <= set(header)


class OwnLog(trainer.Model):
    def train_step(self, state, batch):
        logs, state = super().train_step(state, batch)
        return {**logs, "grad_norm": 0.0}, state


def test_a_log_of_the_same_name_is_refused():
    model = OwnLog(LinenMLP())
    model.compile("sgd", logits_loss(), log_norms=True)
    with pytest.raises(ValueError, match="`train_step` returns the log 'grad_norm', and so does `compile"):
        model.fit(X, Y, verbose=0)
