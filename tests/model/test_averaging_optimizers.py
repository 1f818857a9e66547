"""Optimizers that average parameters: what is evaluated, saved and restarted is what a loop by hand would use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import optimizers
from trainer.callbacks import EarlyStopping, SwapEMAWeights
from trainer.optimizers.update_rule import UpdateRule

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(14, features)).astype(np.float32) for features in (64, 2))
KERNEL, BIAS = RNG.normal(size=(64, 2)).astype(np.float32), np.zeros(2, np.float32)
HALF_FROZEN = {"kernel": "train", "bias": "fixed"}

STRATEGIES = {
    "one device": lambda: trainer.distribute.OneDeviceStrategy("cpu:0"),
    "four replicas": lambda: trainer.distribute.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]),
    "sharded": lambda: trainer.distribute.FullyShardedStrategy(
        ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], min_shard_bytes=0),
}


def schedule_free(rate=0.1):
    return optax.contrib.schedule_free_sgd(rate)


OPTIMIZERS = {  # the optimizer, and where the state of `schedule_free` is in its state
    "alone": (schedule_free, lambda state: state),
    "in a chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), schedule_free()), lambda state: state[1]),
    "with an injected rate": (lambda: optax.inject_hyperparams(optax.contrib.schedule_free_sgd)(learning_rate=0.1),
                              lambda state: state.inner_state),
    "of accumulated gradients": (lambda: optax.MultiSteps(schedule_free(), 2).gradient_transformation(),
                                 lambda state: state.inner_opt_state),
}


def loss(params, x, y):
    return jnp.square(x @ params["kernel"] + params["bias"] - y).mean()


def by_hand(make, state_of):
    """Returns the parameters and those to evaluate after two epochs of batches of 8."""
    optimizer, params = make(), {"kernel": jnp.array(KERNEL), "bias": jnp.array(BIAS)}
    state = optimizer.init(params)
    for start in (0, 8, 0, 8):
        grads = jax.grad(loss)(params, X[start:start + 8], Y[start:start + 8])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, optax.contrib.schedule_free_eval_params(state_of(state), params)


def compiled(optimizer, strategy="one device", **options):
    with STRATEGIES[strategy]().scope():
        model = trainer.Model(nn.Dense(2))
        model.compile(optimizer, "mse", **options)
    model.build(X[:1])
    model.set_weights([BIAS, KERNEL])
    return model


def fit(model, *callbacks, **options):
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def evaluated(model):
    return model.evaluate(X, Y, batch_size=14, verbose=0)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "strategy"), [
    *((name, "one device") for name in OPTIMIZERS), ("alone", "four replicas"), ("alone", "sharded")])
def test_evaluate_and_predict_use_the_evaluation_parameters(optimizer, strategy):
    make, state_of = OPTIMIZERS[optimizer]
    params, averages = by_hand(make, state_of)
    model = compiled(make(), strategy)
    history = fit(model, validation_data=(X, Y)).history
    expected = float(loss(averages, X, Y))
    assert abs(expected - loss(params, X, Y)) > 1e-3
    np.testing.assert_allclose(model.get_weights()[1], params["kernel"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([evaluated(model), history["val_loss"][-1]], expected, rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), X @ averages["kernel"] + averages["bias"], rtol=1e-3,
                               atol=1e-5)


def lookahead():
    return optax.lookahead(optax.adam(0.05), sync_period=3, slow_step_size=0.5)


LOOKAHEAD = {
    "alone": lookahead,
    "behind clipping": lambda: optax.chain(optax.clip_by_global_norm(1.0), lookahead()),
    "with an injected rate": lambda: optax.lookahead(optax.inject_hyperparams(optax.adam)(0.05), 3, 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "strategy"), [
    *((name, "one device") for name in LOOKAHEAD), ("alone", "four replicas"), ("alone", "sharded")])
def test_look_ahead_trains_fast_parameters_and_evaluates_slow_ones(optimizer, strategy):
    make = LOOKAHEAD[optimizer]
    by_optax, params = make(), optax.LookaheadParams.init_synced({"kernel": jnp.array(KERNEL), "bias": jnp.array(BIAS)})
    state = by_optax.init(params)
    for start in (0, 8, 0, 8):
        grads = jax.grad(loss)(params.fast, X[start:start + 8], Y[start:start + 8])
        updates, state = by_optax.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    model = compiled(make(), strategy)
    fit(model)
    np.testing.assert_allclose(model.get_weights()[1], params.fast["kernel"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(evaluated(model), loss(params.slow, X, Y), rtol=1e-5)
    assert abs(evaluated(model) - loss(params.fast, X, Y)) > 1e-3


@pytest.mark.slow
def test_slow_parameters_start_again_from_weights_that_are_set():
    model = compiled(lookahead())
    fit(model)
    model.set_weights([BIAS, KERNEL])
    np.testing.assert_allclose(evaluated(model), loss({"kernel": KERNEL, "bias": BIAS}, X, Y), rtol=1e-5)


@pytest.mark.slow
def test_the_injected_rate_of_look_ahead_can_be_set():
    model = compiled(LOOKAHEAD["with an injected rate"]())
    model.optimizer.learning_rate = 0.0
    fit(model)
    np.testing.assert_array_equal(model.get_weights()[1], KERNEL)


@pytest.mark.slow
def test_parameters_without_the_averaging_optimizer_stay_as_they_are():
    optimizer = optax.partition({"train": schedule_free(), "fixed": optax.sgd(0.1)}, HALF_FROZEN)
    model = compiled(optimizer)
    fit(model)
    averages = model.state.averaged().params
    np.testing.assert_array_equal(averages["bias"], model.state.params["bias"])
    assert np.abs(averages["kernel"] - model.state.params["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_frozen_parameters_stay_as_they_are():
    model = compiled(schedule_free(), freeze="bias")
    fit(model)
    averages = model.state.averaged().params
    np.testing.assert_array_equal(averages["bias"], BIAS)
    assert np.abs(averages["kernel"] - model.state.params["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_an_export_has_the_evaluation_parameters(tmp_path):
    model = compiled(schedule_free())
    fit(model)
    model.export(tmp_path / "exported")
    np.testing.assert_allclose(trainer.load_exported(tmp_path / "exported")(X), model.predict(X, verbose=0), rtol=1e-5,
                               atol=1e-6)


def test_averages_start_again_from_weights_that_are_set():
    model = compiled(schedule_free())
    fit(model)
    model.set_weights([BIAS, KERNEL])
    expected = float(loss({"kernel": KERNEL, "bias": BIAS}, X, Y))
    np.testing.assert_allclose(evaluated(model), expected, rtol=1e-5)


@pytest.mark.slow
def test_weights_become_the_averages_and_evaluate_as_before():
    model, plain = compiled(schedule_free()), compiled(schedule_free())
    fit(model, SwapEMAWeights(swap_on_epoch=True), EarlyStopping("loss", restore_best_weights=True))
    fit(plain)
    averages = plain.state.averaged().params
    np.testing.assert_allclose(model.get_weights()[1], averages["kernel"], rtol=1e-5)
    np.testing.assert_allclose(evaluated(model), evaluated(plain), rtol=1e-5)


def test_a_moving_average_of_averages_is_refused():
    with pytest.raises(ValueError, match="`ema_decay` cannot be used with an optimizer that averages the parameters"):
        compiled(schedule_free(), ema_decay=0.9)


STARTING_FROM_WEIGHTS = {
    "DoG": optax.contrib.dog, "COCOB": optax.contrib.cocob, "MADGRAD": lambda: optax.contrib.madgrad(0.05),
    "one of two groups": lambda: optax.partition({"train": optax.contrib.dog(), "fixed": optax.sgd(0.1)}, HALF_FROZEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTING_FROM_WEIGHTS)
def test_an_optimizer_that_keeps_the_first_weights_starts_from_weights_that_are_set_before_training(name):
    optimizer, params = STARTING_FROM_WEIGHTS[name](), {"kernel": jnp.array(KERNEL), "bias": jnp.array(BIAS)}
    state = optimizer.init(params)
    for start in (0, 8, 0, 8):
        grads = jax.grad(loss)(params, X[start:start + 8], Y[start:start + 8])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    model = compiled(STARTING_FROM_WEIGHTS[name](), "four replicas")
    fit(model)
    np.testing.assert_allclose(model.get_weights()[1], params["kernel"], rtol=1e-4, atol=1e-5)


def with_assigned_weights(optimizer, **options):
    """Returns a model whose weights are assigned as a state, and not set."""
    model = trainer.Model(nn.Dense(2))
    model.compile(optimizer, "mse", **options)
    model.build(X[:1])
    model.state = model.state.replace(params={"kernel": KERNEL, "bias": BIAS})
    return model


@pytest.mark.parametrize("make", [optax.contrib.dog, schedule_free])
def test_it_starts_from_parameters_that_are_assigned_too(make):
    model, expected = with_assigned_weights(make()), compiled(make())
    for each in (model, expected):
        fit(each)
    np.testing.assert_allclose(model.get_weights()[1], expected.get_weights()[1], rtol=1e-6)


def test_averages_begin_with_parameters_that_are_assigned_before_training():
    model = with_assigned_weights("sgd", ema_decay=0.9)
    np.testing.assert_allclose(model.predict(X, verbose=0), X @ KERNEL + BIAS, rtol=1e-5)
    fit(model)
    averages = model.predict(X, verbose=0)
    model.state = model.state.replace(params={"kernel": KERNEL, "bias": BIAS})
    np.testing.assert_array_equal(model.predict(X, verbose=0), averages)


def test_an_optimizer_state_that_is_assigned_stays():
    model, other = with_assigned_weights(optax.contrib.dog()), compiled(optax.contrib.dog())
    other.set_weights([2 * BIAS, 2 * KERNEL])
    model.state = model.state.replace(params=model.state.params, opt_state=other.state.opt_state)
    for given, kept in zip(*map(jax.tree.leaves, (other.state.opt_state, model.state.opt_state)), strict=True):
        np.testing.assert_array_equal(given, kept)


@pytest.mark.slow
def test_an_optimizer_that_has_made_updates_keeps_its_state_when_weights_are_set():
    model = compiled(optax.contrib.dog())
    fit(model)
    before = jax.device_get(jax.tree.leaves(model.state.opt_state))
    model.set_weights([BIAS, KERNEL])
    for old, new in zip(before, jax.tree.leaves(model.state.opt_state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_only_optimizers_that_keep_weights_are_started_again():
    params = {"kernel": jax.ShapeDtypeStruct((64, 2), jnp.float32)}
    keeps = {name: UpdateRule(optimizers.get(made)).reads_params_in_init(params) for name, made in {
        "adam": optax.adam(0.1), "Adam": "adam", "dog": optax.contrib.dog(), "average": schedule_free()}.items()}
    assert keeps == {"adam": False, "Adam": False, "dog": True, "average": True}


@pytest.mark.slow
def test_an_optimizer_may_hold_a_random_key():
    model = compiled(optax.noisy_sgd(0.05, key=jax.random.key(0)), "four replicas")
    fit(model)
    assert np.isfinite(evaluated(model))
