"""FP8 layers: their scales are overwritten by their gradients, as in Flax's TrainState."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from flax.training import train_state

import trainer
from tests.support.networks import mirrored
from trainer.core.overwritten import OVERWRITTEN
from trainer.distribute import FullyShardedStrategy
from trainer.distribute.parameter_server.push_context import PushContext

ROWS, STEPS = 16, 20


class FP8(nn.Module):
    """Two FP8 layers around a layer without FP8."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, name="first")(x)
        x = nn.LayerNorm()(x)
        return nn.Dense(2, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, name="last")(x)


def data(steps=STEPS):
    random = np.random.default_rng(0)
    x = (random.normal(size=(steps * ROWS, 16)) * 700).astype(np.float32)  # above 448, the largest float8
    return x, (x[:, :2] / 700).astype(np.float32)


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1))


def compiled(model_class=trainer.Model, module=None, optimizer_=None, **options):
    model = model_class(module or FP8(), seed=0)
    model.compile(optimizer_ or optimizer(), "mse", **options)
    model.build(np.zeros((1, 16), np.float32))
    return model


def fitted(model, steps=STEPS, **kwargs):
    losses = []
    model.fit(*data(steps), batch_size=ROWS, shuffle=False, verbose=0, callbacks=[
        trainer.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))], **kwargs)
    return losses


class Custom(trainer.Model):
    """A train step of one's own."""

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(values):
            y_pred, model_state = self.apply(values, state, x, training=True)
            return self.compute_loss(x, y, y_pred, sample_weight), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(self.values(state))
        return {"loss": loss}, self.updated(state, grads, model_state)

    def values(self, state):
        return state.differentiable

    def updated(self, state, grads, model_state):
        return state.apply_gradients(grads, model_state=model_state)


@pytest.fixture(scope="module")
def flax_loop():
    """The losses, parameters and scales of a loop around Flax's TrainState, with each number of microbatches."""
    built = compiled()
    begin = {"params": built.state.params, OVERWRITTEN: built.state.model_state[OVERWRITTEN]}

    def run(parts):
        state = train_state.TrainState.create(
            apply_fn=FP8().apply, params=jax.tree.map(jnp.copy, begin), tx=optimizer())

        @jax.jit
        def step(state, x, y):
            total, values, losses = None, state.params, []
            for part in range(parts):
                def loss_of(values, part=part):
                    return ((state.apply_fn(values, x[part::parts]) - y[part::parts]) ** 2).mean()
                loss, grads = jax.value_and_grad(loss_of)(values)
                values = {**values, OVERWRITTEN: grads[OVERWRITTEN]}
                total = grads if total is None else jax.tree.map(jnp.add, total, grads)
                losses.append(loss)
            grads = {"params": jax.tree.map(lambda leaf: leaf / parts, total["params"]),
                     OVERWRITTEN: values[OVERWRITTEN]}
            return state.apply_gradients(grads=grads), sum(losses) / parts

        losses, (x, y) = [], data()
        for start in range(0, len(x), ROWS):
            state, loss = step(state, x[start:start + ROWS], y[start:start + ROWS])
            losses.append(loss)
        return losses, state.params

    return {parts: run(parts) for parts in (1, 2)}


def assert_equals(model, losses, expected, rtol=1e-6):
    expected_losses, values = expected
    running_means = np.cumsum(expected_losses) / np.arange(1, len(expected_losses) + 1)  # the logs of a batch in Keras
    np.testing.assert_allclose(losses, running_means, rtol=rtol)
    for ours, theirs in ((model.state.params, values["params"]),
                         (model.state.model_state[OVERWRITTEN], values[OVERWRITTEN])):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol), ours, theirs)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("model_class", "parts"), [(trainer.Model, 1), (trainer.Model, 2), (Custom, 1)])
def test_twenty_steps_equal_flaxs_train_state(flax_loop, model_class, parts):
    model = compiled(model_class, **({} if parts == 1 else {"microbatches": parts}))
    losses = fitted(model)
    assert_equals(model, losses, flax_loop[parts])
    assert float(model.state.model_state[OVERWRITTEN]["first"]["Fp8DirectDotGeneralOp_0"]["input_scale"][0]) > 1.5
    assert OVERWRITTEN not in str(jax.tree_util.tree_leaves_with_path(model.state.opt_state))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
@pytest.mark.parametrize("make_strategy", [
    lambda: mirrored(2), lambda: FullyShardedStrategy(["cpu:0", "cpu:1"], min_shard_bytes=0),
], ids=["mirrored", "sharded"])
def test_two_devices_overwrite_as_one_device_does(flax_loop, make_strategy, options):
    with make_strategy().scope():
        model = compiled(**options)
    # Sums over devices round differently, which moves a few values to the next float8.
    assert_equals(model, fitted(model), flax_loop[options.get("microbatches", 1)], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"remat": True}, {"ema_decay": 0.9}, {"skip_non_finite": True},
    {"regularizers": {"**": trainer.regularizers.L2(0.0)}}], ids=lambda options: next(iter(options)))
def test_options_leave_the_collection_to_its_gradient(flax_loop, options):
    model, expected = compiled(**options), compiled()
    ours, theirs = (fitted(each, steps=3) for each in (model, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6),
                 model.state.model_state, expected.state.model_state)


@pytest.mark.slow
def test_frozen_layers_and_an_untrained_model():
    model = compiled(freeze=["first"])
    before = jax.tree.map(np.array, model.state)
    fitted(model, steps=3)
    after = model.state
    np.testing.assert_array_equal(before.params["first"]["kernel"], after.params["first"]["kernel"])
    assert float(after.model_state[OVERWRITTEN]["first"]["Fp8DirectDotGeneralOp_0"]["input_scale"][0]) > 1.5

    scales = jax.tree.map(np.array, after.model_state)
    model.evaluate(*data(1), verbose=0)
    jax.tree.map(np.testing.assert_array_equal, scales, model.state.model_state)


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_the_collection_unchanged():
    model = compiled(skip_non_finite=True)
    fitted(model, steps=2)
    before = jax.tree.map(np.array, model.state.model_state)
    x, y = data(1)
    model.fit(x, np.full_like(y, np.nan), batch_size=ROWS, verbose=0)
    assert int(model.state.skipped_updates.total) == 1
    jax.tree.map(np.testing.assert_array_equal, before, model.state.model_state)


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_same_scales(tmp_path):
    class Stop(trainer.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                raise KeyboardInterrupt

    whole = compiled()
    fitted(whole, steps=3, epochs=2)
    stopped, backup = compiled(), trainer.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(*data(3), batch_size=ROWS, shuffle=False, verbose=0, epochs=2, callbacks=[backup, Stop()])
    resumed = compiled()
    resumed.fit(*data(3), batch_size=ROWS, shuffle=False, verbose=0, epochs=2,
                callbacks=[trainer.callbacks.BackupAndRestore(tmp_path)])
    jax.tree.map(np.testing.assert_array_equal, whole.state.model_state, resumed.state.model_state)
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)


@pytest.mark.slow
def test_scales_keep_float32_in_mixed_precision():
    model = compiled(precision="bfloat16")
    fitted(model, steps=3)
    collection = jax.tree.leaves(model.state.model_state[OVERWRITTEN])
    assert {leaf.dtype for leaf in collection} == {np.dtype(np.float32)}
    assert float(model.state.model_state[OVERWRITTEN]["first"]["Fp8DirectDotGeneralOp_0"]["input_scale"][0]) > 1.5


class Pair(trainer.Model):
    """Two modules, of which a step trains the encoder alone."""

    def sample_inputs(self, batch):
        return {"encoder": batch[0], "critic": np.zeros((1, 16), np.float32)}

    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(values):
            y_pred, model_state = self.apply(values, state, x, module="encoder", training=True)
            return ((y_pred - y) ** 2).mean(), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.differentiable["encoder"])
        return {"loss": loss}, state.apply_gradients(encoder=grads, model_state=model_state)


@pytest.mark.slow
def test_a_named_module_overwrites_its_own_collection():
    pair, alone = Pair({"encoder": FP8(), "critic": FP8()}, seed=0), compiled()
    pair.compile({"encoder": optimizer(), "critic": optimizer()})
    pair.build(np.zeros((1, 16), np.float32))
    critic = jax.tree.map(np.array, pair.state.model_state["critic"])
    fitted(pair, steps=3)
    jax.tree.map(np.testing.assert_array_equal, critic, pair.state.model_state["critic"])
    fitted(alone, steps=3)
    for scales in (pair.state.model_state["encoder"], alone.state.model_state):  # of the inputs, so of any weights
        assert float(scales[OVERWRITTEN]["first"]["Fp8DirectDotGeneralOp_0"]["input_scale"][0]) == pytest.approx(
            np.abs(data(2)[0]).max() / 448, rel=1e-6)


class OfParams(Custom):
    def values(self, state):
        return state.params


class OwnUpdate(OfParams):
    def updated(self, state, grads, model_state):
        return state.replace(params=jax.tree.map(lambda leaf, grad: leaf - grad, state.params, grads),
                             model_state=model_state)


@pytest.mark.sampled
@pytest.mark.parametrize(("model_class", "options", "says"), [
    (OfParams, {}, "Differentiate by `state.differentiable` in place of `state.params`"),
    (OwnUpdate, {}, "trained the parameters and left the collection '_overwrite_with_gradient' as it was"),
    (trainer.Model, {"precision": "mixed_float16"}, r'use `compile\(precision="mixed_bfloat16"\)`')])
def test_steps_that_would_leave_the_collection_out_are_refused(model_class, options, says):
    with pytest.raises(ValueError, match=says):
        fitted(compiled(model_class, **options), steps=1)


@pytest.mark.slow
def test_replicas_and_parameter_servers_are_refused():
    with mirrored(2).scope() as strategy:
        model = compiled()
    state, grads = model.state, model.state.differentiable
    with pytest.raises(ValueError, match=r"no reduction over the 2 replicas of `strategy\.run`"):
        strategy.run(lambda state: state.apply_gradients(grads, reduce="mean"), args=(state,))
    with (trainer.core.replica_context.enter(PushContext(ROWS)),
          pytest.raises(ValueError, match="Servers of ParameterServerStrategy cannot")):
        state.apply_gradients(grads)


@pytest.mark.slow
def test_nnx_modules_with_the_collection_are_refused():
    dense = nn.Dense(2, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    module = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(np.zeros((1, 16), np.float32))
    with pytest.raises(TypeError, match="ToNNX wraps a Linen module with the collection '_overwrite_with_gradient'"):
        trainer.Model(module)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, name="dense")(x), None


class Scanned(nn.Module):
    """A scan over layers, with a stack of scales."""

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, OVERWRITTEN: 0}
        x, _ = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)(name="layers")(x, None)
        return nn.Dense(2, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, name="last")(x)


@pytest.mark.slow
def test_scanned_layers_and_accumulated_updates_equal_flaxs_train_state_and_are_saved_whole(tmp_path):
    def tx():
        return optax.MultiSteps(optimizer(), every_k_schedule=2)

    model = compiled(module=Scanned(), optimizer_=tx())
    begin = {"params": model.state.params, OVERWRITTEN: model.state.model_state[OVERWRITTEN]}
    # The weights are updated in each second step, the scales in each.
    state = train_state.TrainState.create(apply_fn=Scanned().apply, params=jax.tree.map(jnp.copy, begin), tx=tx())

    @jax.jit
    def step(state, x, y):
        loss, grads = jax.value_and_grad(lambda values: ((state.apply_fn(values, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    losses, (x, y) = [], data(5)
    for start in range(0, len(x), ROWS):
        state, loss = step(state, x[start:start + ROWS], y[start:start + ROWS])
        losses.append(loss)
    assert_equals(model, fitted(model, steps=5), (losses, state.params))
    history = model.state.model_state[OVERWRITTEN]["layers"]["dense"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert history.shape[0] == 2 and np.count_nonzero(history) == 2 * 5

    model.save(tmp_path / "state.safetensors")
    model.save_weights(tmp_path / "weights.safetensors")
    loaded = compiled(module=Scanned(), optimizer_=tx())
    loaded.load_weights(tmp_path / "weights.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded.state.model_state, model.state.model_state)
    resumed = trainer.load(tmp_path / "state.safetensors", compiled(module=Scanned(), optimizer_=tx()))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(resumed.state), jax.tree.leaves(model.state))
