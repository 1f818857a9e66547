"""SwapEMAWeights: what is saved and what a training ends with are moving averages, and training does not notice."""

import functools
import types

import jax
import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, SwapEMAWeights
from trainer.callbacks.checkpoints.backup_and_restore import BackupAndRestore

X, Y, _ = classification(24)


class Recorder(Callback):
    """Records what a callback sees of the model after each batch and at the end of each epoch."""

    def __init__(self):
        self.trained, self.weights, self.averages, self.evaluated = [], [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.trained.append(self.model.get_weights())

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())
        self.averages.append(jax.device_get(jax.tree.leaves(self.model.state.averaged().params)))
        self.evaluated.append((self.model.evaluate(X, Y, verbose=0)["loss"], logs["val_loss"]))


def compiled(replicas=1, module=None, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(module or LinenMLP())
        model.compile("sgd", logits_loss(), metrics=["accuracy"], **{"ema_decay": 0.8, **options})
    return model


def fit(model, *callbacks, epochs=3, **options):
    return model.fit(X, Y, batch_size=4, epochs=epochs, validation_data=(X, Y), verbose=0, callbacks=list(callbacks),
                     **options)


@functools.cache
def plain():
    """What there is to see of a training without the callback, and its logs."""
    recorder = Recorder()
    return recorder, fit(compiled(), recorder).history


def assert_same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def differs(ours, theirs):
    return any(not np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


# --- the callback alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("swap_on_epoch", "shown"), [(False, [False, False, False]), (True, [False, True, False])])
def test_averages_are_shown_between_epochs_if_asked_for_and_adopted_in_the_end(swap_on_epoch, shown):
    adopted = []
    run = types.SimpleNamespace(
        keeps_averages=True, shows_averages=True, adopt_averages=lambda: adopted.append(run.shows_averages))
    callback = SwapEMAWeights(swap_on_epoch)
    callback.set_model(types.SimpleNamespace(current_run=run))
    callback.on_train_begin()
    assert not run.shows_averages  # whatever an earlier fit left
    seen = []
    for hook in ("on_epoch_begin", "on_epoch_end", "on_epoch_begin"):
        getattr(callback, hook)(0)
        seen.append(run.shows_averages)
    assert seen == shown
    callback.on_epoch_end(1)
    assert adopted == []
    callback.on_train_end()
    assert adopted == [False]


@pytest.mark.parametrize("hook", ["on_train_begin", "on_test_begin", "on_predict_begin"])
def test_a_model_without_averages_is_refused(hook):
    callback = SwapEMAWeights()
    callback.set_model(types.SimpleNamespace(current_run=types.SimpleNamespace(keeps_averages=False)))
    with pytest.raises(ValueError, match="SwapEMAWeights must be used when `use_ema=True` is set on the optimizer"):
        getattr(callback, hook)()


# --- with a model -----------------------------------------------------------------------------------------------------


def test_a_model_without_averages_is_refused_before_training():
    model = compiled(ema_decay=None)
    with pytest.raises(ValueError, match=r"SwapEMAWeights must be used when .* `compile\(ema_decay=0.999\)`"):
        fit(model, SwapEMAWeights())
    assert int(model.state.step) == 0


@pytest.mark.slow
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_callbacks_behind_it_see_averages_and_neither_those_before_it_nor_the_training_do(swap_on_epoch):
    before, behind = Recorder(), Recorder()
    history = fit(compiled(), before, SwapEMAWeights(swap_on_epoch), behind).history
    expected, expected_history = plain()
    assert history == expected_history
    for ours, theirs in zip(before.trained, expected.trained, strict=True):
        assert_same_bits(ours, theirs)
    for epoch in range(3):
        assert differs(expected.weights[epoch], expected.averages[epoch])
        assert_same_bits(before.weights[epoch], expected.weights[epoch])
        assert_same_bits(behind.weights[epoch], (expected.averages if swap_on_epoch else expected.weights)[epoch])
    # Whoever evaluates in between gets the averages: they are not swapped twice.
    for evaluated, validated in behind.evaluated:
        assert evaluated == pytest.approx(validated, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("swap_on_epoch", "replicas"), [(False, 1), (True, 1), (True, 2)])
def test_fit_ends_with_the_averages(swap_on_epoch, replicas):
    model = compiled(replicas)
    history = fit(model, SwapEMAWeights(swap_on_epoch)).history
    assert_same_bits(model.get_weights(), jax.tree.leaves(model.state.opt_state.average))
    other = compiled(ema_decay=None)
    other.build(X)
    other.set_weights(model.get_weights())
    for each in (model, other):
        assert each.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)


@pytest.mark.slow
def test_a_fit_that_is_stopped_ends_with_the_averages_too():
    model = compiled()
    fit(model, SwapEMAWeights(swap_on_epoch=True),
        LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1)))
    assert_same_bits(model.get_weights(), jax.tree.leaves(model.state.opt_state.average))


def test_another_fit_goes_on_from_the_averages():
    model = compiled()
    fit(model, SwapEMAWeights(swap_on_epoch=True), epochs=1)
    weights = model.get_weights()
    fit(model, SwapEMAWeights(swap_on_epoch=True), epochs=1)
    assert differs(model.get_weights(), weights)


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], [SwapEMAWeights(swap_on_epoch=True)]], ids=["alone", "behind it"])
def test_a_model_checkpoint_saves_averages(others, tmp_path):
    model = compiled()
    fit(model, *others, ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_weights_only=True))
    other = compiled(ema_decay=None)
    other.build(X)
    for epoch, averages in enumerate(plain()[0].averages):
        other.load_weights(tmp_path / f"{epoch + 1}.safetensors")
        assert_same_bits(other.get_weights(), averages)
    assert other.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-6)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("others", [[], [SwapEMAWeights(swap_on_epoch=True)]], ids=["alone", "behind it"])
def test_early_stopping_restores_the_best_averages(others):
    model = compiled()
    stopping = EarlyStopping("val_loss", mode="max", patience=9, restore_best_weights=True)
    history = fit(model, *others, stopping).history
    best = max(history["val_loss"])
    assert history["val_loss"].index(best) < 2  # it falls, and the worst is asked for
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_a_resumed_run_equals_an_undisturbed_one(precision, tmp_path):
    def run(*others):
        model = compiled(precision=precision)
        fit(model, SwapEMAWeights(swap_on_epoch=True), *others)
        return model

    def interrupt(epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(BackupAndRestore(tmp_path), LambdaCallback(on_epoch_begin=interrupt))
    resumed, whole = run(BackupAndRestore(tmp_path)), run()
    assert_same_bits(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state))


@pytest.mark.slow
def test_a_fit_that_fails_between_epochs_leaves_the_weights_and_not_the_averages():
    model = compiled()

    def fail(epoch, logs):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fit(model, SwapEMAWeights(swap_on_epoch=True), LambdaCallback(on_epoch_end=fail))
    assert_same_bits(model.get_weights(), plain()[0].weights[0])


@pytest.mark.slow
def test_frozen_weights_stay_as_they_are():
    model = compiled(freeze="Dense_0")
    model.build(X)
    start = model.get_weights()
    fit(model, SwapEMAWeights(swap_on_epoch=True), epochs=1)
    assert_same_bits(model.get_weights()[:2], start[:2])
    assert differs(model.get_weights()[2:], start[2:])
