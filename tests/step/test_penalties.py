"""What belongs to the loss besides the loss of `compile`: penalties of weights, and what a module sows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer import distribute, regularizers

rng = np.random.default_rng(0)
X = rng.normal(size=(26, 4)).astype(np.float32)
Y = rng.normal(size=(26, 1)).astype(np.float32)


class Sows(nn.Module):
    """Half the sum of the squared weights, sown in one of several ways."""

    how: str = "tuple"

    @nn.compact
    def __call__(self, x, train: bool = False):
        kernel = self.param("kernel", nn.initializers.ones, (4, 1))
        penalty = 0.5 * jnp.sum(jnp.square(kernel))
        if self.how == "tuple":
            self.sow("losses", "l2", penalty)
        elif self.how == "sum":
            self.sow("losses", "l2", penalty, init_fn=lambda: 0.0, reduce_fn=lambda so_far, new: so_far + new)
        elif self.how == "variable":
            self.variable("losses", "l2", lambda: jnp.zeros(())).value = penalty
        self.sow("intermediates", "outputs", x)
        self.sow("seen", "rows", jnp.float32(len(x)))
        return x @ kernel


class Loss(nnx.Variable):
    pass


class OwnPenalty(Loss):
    pass


class SowsNNX(nnx.Module):
    def __init__(self, how):
        self.kernel, self.how = nnx.Param(jnp.ones((4, 1))), how
        if how == "variable":
            self.l2 = Loss(jnp.zeros(()))

    def __call__(self, x):
        penalty = 0.5 * jnp.sum(jnp.square(self.kernel[...]))
        if self.how == "variable":
            self.l2[...] = penalty
        else:
            self.sow({"sow": Loss, "subclass": OwnPenalty, "named": "losses"}[self.how], "l2", penalty)
        return x @ self.kernel[...]


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.ones, (4, 1))


MODULES = {
    "linen": lambda: Sows(), "linen, summed": lambda: Sows("sum"), "linen, variable": lambda: Sows("variable"),
    "nnx": lambda: SowsNNX("sow"), "nnx, variable": lambda: SowsNNX("variable"),
    "nnx, a type of losses": lambda: SowsNNX("subclass"), "nnx, by name": lambda: SowsNNX("named"),
}


class Custom(trainer.Model):
    def train_step(self, state, batch):
        x, y, w = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(params):
            y_pred, model_state = self.apply(params, state, x, training=True)
            return self.compute_loss(x, y, y_pred, w) + self.compute_penalties(params, model_state), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return {"loss": loss}, state.apply_gradients(grads, model_state=model_state)


def fit(module, strategy=None, make=trainer.Model, epochs=2, **options):
    with (strategy or distribute.OneDeviceStrategy("cpu:0")).scope():
        model = make(module)
        model.compile(optax.sgd(0.01), "mse", **options)
    losses = model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    return np.asarray(losses), model.get_weights()[0], model.evaluate(X, Y, verbose=0)["loss"]


def loop(penalty, epochs=2):
    """Returns the same from a loop by hand."""
    kernel, losses = jnp.ones((4, 1)), []

    def loss_fn(kernel, x, y):
        return jnp.square(x @ kernel - y).mean() + penalty(kernel)

    for _ in range(epochs):
        total = 0.0
        for start in range(0, len(X), 8):
            x, y = X[start:start + 8], Y[start:start + 8]
            loss, gradient = jax.value_and_grad(loss_fn)(kernel, x, y)
            kernel, total = kernel - 0.01 * gradient, total + float(loss) * len(x)
        losses.append(total / len(X))
    return np.asarray(losses), np.asarray(kernel), float(loss_fn(kernel, X, Y))


def assert_same(found, expected, rtol=1e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


def half_square(kernel):
    return 0.5 * jnp.sum(jnp.square(kernel))


@pytest.mark.slow
@pytest.mark.parametrize("make", [trainer.Model, Custom])
@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_sows_into_losses_is_a_part_of_the_loss(module, make):
    assert_same(fit(MODULES[module](), make=make), loop(half_square))


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {}, {"microbatches": 2}, {"remat": True}, {"run_eagerly": True}])
@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_sown_losses_under_every_option(module, options):
    strategy = distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(4)])
    assert_same(fit(MODULES[module](), strategy, **options), loop(half_square))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_a_loss_scale_scales_the_gradients_of_sown_losses_too(module):
    model = trainer.Model(MODULES[module]())
    model.compile(optax.sgd(0.1), "mse", precision="mixed_float16")
    history = model.fit(1e-3 * X, 1e-3 * Y, batch_size=26, verbose=0).history
    assert history["skipped_steps"] == [0]
    np.testing.assert_allclose(model.get_weights()[0], np.full((4, 1), 0.9), rtol=1e-2)


def test_other_sown_collections_are_returned_and_not_kept():
    model = trainer.Model(Sows())
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert model.state.model_state == {}
    _, returned = model.apply(model.state.params, model.state, X[:3])
    assert set(returned) == {"losses", "intermediates", "seen"}
    assert returned["intermediates"]["outputs"][0].shape == (3, 4) and len(returned["seen"]["rows"]) == 1


PENALTIES = {
    "l2": ("l2", lambda kernel: 0.01 * jnp.sum(jnp.square(kernel))),
    "L1": (regularizers.L1(0.3), lambda kernel: 0.3 * jnp.sum(jnp.abs(kernel))),
    "L1L2": (regularizers.L1L2(0.3, 0.2), lambda kernel: jnp.sum(0.3 * jnp.abs(kernel) + 0.2 * jnp.square(kernel))),
    "a function": (jnp.max, jnp.max),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [trainer.Model, Custom])
@pytest.mark.parametrize("name", PENALTIES)
def test_regularizers_are_a_part_of_the_loss(name, make):
    given, penalty = PENALTIES[name]
    strategy = distribute.MirroredStrategy([f"cpu:{index}" for index in range(4)])
    assert_same(fit(Plain(), strategy, make, regularizers={"**/kernel": given}), loop(penalty))


def test_a_step_that_leaves_regularizers_out_is_refused():
    class Forgets(trainer.Model):
        def train_step(self, state, batch):
            return super().train_step(state, batch)[0], state.replace(step=state.step + 1)

        def compute_penalties(self, params, model_state):
            return jnp.zeros(())

    with pytest.raises(ValueError, match=r"regularizers.*self\.compute_penalties\(params, model_state\)"):
        fit(Plain(), make=Forgets, regularizers={"kernel": "l2"})
    with pytest.warns(UserWarning, match=r"sows into 'losses'.*compute_penalties"):
        fit(Sows(), make=Forgets)


@pytest.mark.parametrize(("given", "message"), [
    ({"kernels": "l2"}, "'kernels', which matches none.*'kernel'"), ({"kernel": "l3"}, "Unknown regularizer 'l3'"),
    ({"kernel": 0.1}, "path patterns to penalties"), ("l2", "path patterns to penalties"),
    ({"kernel": dict}, "path patterns to penalties")])
def test_regularizers_that_cannot_be_used(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fit(Plain(), regularizers=given)


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_factors_are_finite_and_not_negative(factor):
    with pytest.raises(ValueError, match="l2"):
        regularizers.L2(factor)


@pytest.mark.parametrize(("penalty", "shape"), [
    (lambda w: 0.1 * w ** 2, r"\(4, 1\)"), (lambda w: 0.1 * jnp.sum(w ** 2, 0), r"\(1,\)")])
def test_a_penalty_that_is_no_scalar_is_refused_by_its_pattern(penalty, shape):
    model = trainer.Model(Plain())
    model.compile("sgd", "mse", regularizers={"kernel": penalty})
    with pytest.raises(ValueError, match=rf"penalty of `regularizers` for 'kernel' must be a scalar.*{shape}.*Sum it"):
        model.fit(np.ones((4, 4), np.float32), np.ones((4, 1), np.float32), verbose=0)


def test_a_module_that_sows_its_whole_loss_may_return_nothing():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "square", (nn.Dense(1)(x) ** 2).mean())

    model = trainer.Model(Sowing())
    model.compile("sgd", None)
    x = np.ones((8, 4), np.float32)
    first, last = model.fit(x, x[:, :1], epochs=2, verbose=0).history["loss"]
    assert last < first
