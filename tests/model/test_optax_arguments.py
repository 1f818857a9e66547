"""Optax transformations that ask for the loss, or a function of it: they get what a loop by hand would give them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.event_files import scalars
from trainer.callbacks import LearningRateScheduler, ReduceLROnPlateau, TensorBoard

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(14, features)).astype(np.float32) for features in (64, 4))
KERNEL, BIAS = RNG.normal(size=(64, 4)).astype(np.float32), np.zeros(4, np.float32)

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
STRATEGIES = {
    "one device": lambda: trainer.distribute.OneDeviceStrategy("cpu:0"),
    "four replicas": lambda: trainer.distribute.MirroredStrategy(FOUR),
    "sharded": lambda: trainer.distribute.FullyShardedStrategy(FOUR, min_shard_bytes=0),
}
WITH_THE_LOSS = {
    "plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5, accumulation_size=2)),
    "polyak": optax.polyak_sgd,
    "injected polyak": lambda: optax.inject_hyperparams(optax.polyak_sgd)(max_learning_rate=0.2),
    "momo": lambda: optax.contrib.momo(0.5),
    "accumulated polyak": lambda: optax.MultiSteps(optax.polyak_sgd(), 2),
}
WITH_A_FUNCTION = {
    "zoom": optax.lbfgs,
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
    "sharpness": lambda: optax.contrib.sam(
        optax.sgd(0.05), optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), opaque_mode=True),
}


def loss(params, x, y):
    return jnp.square(x @ params["kernel"] + params["bias"] - y).mean()


def by_hand(optimizer, asked=()):
    """Returns the kernel after three epochs of batches of 8."""
    params = {"kernel": jnp.array(KERNEL), "bias": jnp.array(BIAS)}
    state = optimizer.init(params)
    for start in 3 * (0, 8):
        of_batch = lambda params, start=start: loss(params, X[start:start + 8], Y[start:start + 8])
        value, grad = jax.value_and_grad(of_batch)(params)
        extra = {"value": value, "grad": grad, "value_fn": of_batch,
                 "grad_fn": lambda params, _, of_batch=of_batch: jax.grad(of_batch)(params)}
        updates, state = optimizer.update(grad, state, params, **{name: extra[name] for name in asked})
        params = optax.apply_updates(params, updates)
    return params["kernel"]


class OwnLossLog(trainer.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight):
        return {"loss": jnp.float32(1e3)}


class OwnStep(trainer.Model):
    def train_step(self, state, batch):
        def loss_of(params):
            return self.compute_loss(*batch[:2], self.apply(params, state, batch[0], training=True)[0], None)

        value, grads = jax.value_and_grad(loss_of)(state.params)
        return {"loss": value}, state.apply_gradients(grads, **self.handed(value, loss_of))

    def handed(self, value, loss_of):
        return {"value": value, "value_fn": loss_of}


class UnawareStep(OwnStep):
    def handed(self, value, loss_of):
        return {}


def fitted(optimizer, strategy="one device", kind=trainer.Model, **options):
    with STRATEGIES[strategy]().scope():
        model = kind(nn.Dense(4))
        model.compile(optimizer, "mse", **options)
    model.build(X[:1])
    model.set_weights([BIAS, KERNEL])
    model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()[1]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "options"), [
    *((name, {}) for name in WITH_THE_LOSS),
    *((name, {"strategy": strategy}) for name in ("plateau", "polyak") for strategy in ("four replicas", "sharded")),
    ("accumulated polyak", {"strategy": "four replicas"}),
    ("plateau", {"microbatches": 2}), ("polyak", {"microbatches": 3, "strategy": "four replicas"}),
    ("polyak", {"kind": OwnLossLog}),
    ("polyak", {"kind": OwnStep, "strategy": "four replicas"}), ("polyak", {"kind": OwnStep, "strategy": "sharded"}),
])
def test_a_transformation_is_handed_the_loss_of_the_whole_batch(optimizer, options):
    expected = by_hand(WITH_THE_LOSS[optimizer](), ["value"])
    np.testing.assert_allclose(fitted(WITH_THE_LOSS[optimizer](), **options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_loss_that_is_handed_over_is_not_scaled_by_float16s_loss_scale():
    def keep_value(updates, state, params=None, *, value, **extra):
        return jax.tree.map(jnp.zeros_like, updates), value

    with STRATEGIES["four replicas"]().scope():
        model = trainer.Model(nn.Dense(4))
        model.compile(optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), keep_value), "mse",
                      precision="mixed_float16")
    history = model.fit(X[:12] / 100, Y[:12] / 100, batch_size=12, verbose=0).history
    assert history["skipped_steps"] == [0]
    np.testing.assert_allclose(model.state.opt_state.inner, history["loss"][0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "options"), [
    *((name, {}) for name in WITH_A_FUNCTION), ("zoom", {"strategy": "four replicas"}),
    ("sharpness", {"strategy": "four replicas"}), ("zoom", {"strategy": "sharded"}),
    ("zoom", {"kind": OwnStep, "strategy": "four replicas"}),
])
def test_a_transformation_is_handed_the_loss_as_a_function(optimizer, options):
    asked = ["grad_fn"] if optimizer == "sharpness" else ["value", "grad", "value_fn"]
    expected = by_hand(WITH_A_FUNCTION[optimizer](), asked)
    np.testing.assert_allclose(fitted(WITH_A_FUNCTION[optimizer](), **options), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_function_of_the_loss_is_of_the_parameters_that_are_trained():
    with trainer.distribute.OneDeviceStrategy("cpu:0").scope():
        model = trainer.Model(nn.Dense(4))
        model.compile(optax.lbfgs(), "mse", freeze="bias")
    history = model.fit(X, Y, batch_size=14, epochs=4, verbose=0).history
    assert history["loss"][-1] < 0.1 * history["loss"][0]
    np.testing.assert_array_equal(model.get_weights()[0], BIAS)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("optimizer", "options", "message"), [
    pytest.param(optax.polyak_sgd, {"kind": UnawareStep}, r"needs 'value', .*`state.apply_gradients\(grads, value=loss",
                 id="a step that hands over nothing"),
    pytest.param(optax.lbfgs, {"microbatches": 2}, r"needs 'grad', 'value_fn', .* without `microbatches`",
                 id="a function of microbatches"),
    pytest.param(lambda: optax.contrib.sophia(0.1), {}, r"also needs 'obj_fn', .*`strategy.run`", id="something else"),
    pytest.param(lambda: optax.GradientTransformation(optax.polyak_sgd().init, lambda updates, state, params:
                                                      optax.polyak_sgd().update(updates, state, params)), {},
                 r"needs 'value', .*around it does not pass them on", id="a wrapper that passes nothing on"),
])
def test_what_cannot_be_handed_over_is_named_with_the_fix(optimizer, options, message):
    with pytest.raises(ValueError, match=message):
        fitted(optimizer(), **options)


def test_gradients_of_a_module_named_value_are_no_loss():
    class ActorCritic(trainer.Model):
        def sample_inputs(self, batch):
            return {"policy": batch[0], "value": batch[0]}

        def train_step(self, state, batch):
            ones = {name: jax.tree.map(jnp.ones_like, state.params[name]) for name in state.params}
            return {"loss": 0.0}, state.apply_gradients(policy=ones["policy"], value=ones["value"])

    model = ActorCritic({"policy": nn.Dense(1), "value": nn.Dense(1)})
    model.compile({"policy": optax.sgd(0.1), "value": optax.sgd(1.0)})
    model.fit(X, Y, batch_size=14, verbose=0)
    np.testing.assert_allclose(model.state.params["value"]["bias"], -1.0)
    np.testing.assert_allclose(model.state.params["policy"]["bias"], -0.1)


def two_rates():
    return optax.partition({"kernel": optax.sgd(0.1), "bias": optax.sgd(0.01)}, {"kernel": "kernel", "bias": "bias"})


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("callback", [
    LearningRateScheduler(lambda epoch: 0.001), LearningRateScheduler(lambda epoch, rate: rate / 2),
    ReduceLROnPlateau("loss")])
def test_callbacks_of_the_rate_refuse_one_that_is_not_known_before_training(callback):
    model = trainer.Model(nn.Dense(4))
    model.compile(two_rates(), "mse")
    with pytest.raises(ValueError, match=r"rate of this optax transformation \(partition, .*\) is not known"):
        model.fit(X, Y, callbacks=[callback], verbose=0)
    assert not model.built or int(model.state.step) == 0


@pytest.mark.slow
def test_tensorboard_leaves_out_a_rate_that_is_not_known(tmp_path):
    model = trainer.Model(nn.Dense(4))
    model.compile(two_rates(), "mse")
    model.fit(X, Y, callbacks=[TensorBoard(tmp_path)], verbose=0)
    assert scalars(tmp_path).keys() == {"train/epoch_loss"}


@pytest.mark.slow
def test_the_rate_of_accumulated_gradients_is_scheduled_by_a_callback():
    model = trainer.Model(nn.Dense(4))
    model.compile(optax.MultiSteps(optax.sgd(0.5), 2), "mse")
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[
        LearningRateScheduler(lambda epoch, rate: rate / 2)]).history
    assert history["learning_rate"] == [0.25, 0.125]


def test_an_optimizer_of_nnx_is_refused_with_the_transformation_in_it():
    model = trainer.Model(nn.Dense(4))
    with pytest.raises(TypeError, match=r"type Optimizer, which updates a module by itself. .* `optimizer.tx`"):
        model.compile(nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param), "mse")
