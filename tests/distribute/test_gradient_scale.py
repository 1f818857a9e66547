"""Gradients in `strategy.run` that are scaled for another reduction than the default are refused, and no others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.networks import mirrored
from trainer import distribute
from trainer.distribute import get_replica_context

BATCH = 8
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 6)).astype(np.float32)
y = rng.normal(size=(40, 3)).astype(np.float32)


class Network(nn.Module):
    """With BatchNorm, whose bias before it has no gradient but rounding."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, training: bool = False):
        x = nn.BatchNorm(use_running_average=not training)(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(self.dropout, deterministic=not training)(nn.relu(x)))


def make(strategy, module=None, optimizer=None, **options):
    with strategy.scope():
        model = trainer.Model(module or nn.Dense(3))
        model.compile(optimizer or optax.sgd(0.1), "mse", **options)
        model.build(x[:1])
    return model


def batches(strategy, rows=BATCH, batch_size=BATCH):
    return list(strategy.experimental_distribute_dataset(
        trainer.data.Dataset.from_arrays((x[:rows], y[:rows])).batch(batch_size)))


def step_of(model, loss_of, change=lambda grads: grads, **options):
    """Returns a step whose loss is `loss_of(y, y_pred)`, from the squared errors of the rows."""
    def step(state, inputs):
        x, y = inputs

        def loss_fn(params):
            y_pred, model_state = model.apply(params, state, x, training=True)
            return loss_of(y, y_pred), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(change(grads), model_state=model_state, **options), loss

    return step


def per_row(y, y_pred):
    return jnp.square(y_pred - y).mean(-1) * get_replica_context().row_mask


def over_global_batch(y, y_pred):
    return per_row(y, y_pred).sum() / BATCH


def mean(y, y_pred):
    return jnp.square(y_pred - y).mean()


def over_replicas(y, y_pred):
    """As `tf.nn.compute_average_loss` without a `global_batch_size`."""
    return mean(y, y_pred) / distribute.get_strategy().num_replicas_in_sync


def of_real_rows(y, y_pred):
    context = get_replica_context()
    return per_row(y, y_pred).sum() * context.num_replicas_in_sync / context.global_rows


def spread(y, y_pred):
    return (y_pred - y).std(0).sum() / BATCH


def summed(grads):
    return get_replica_context().all_reduce("sum", grads)


def multiplied(grads):
    return jax.tree.map(lambda grad: grad * distribute.get_strategy().num_replicas_in_sync, grads)


IS_PART = (r"`step` applies gradients that are 1/{n} of those of the whole batch.*"
           r'rows of the whole batch.* write `state\.apply_gradients\(grads, reduce="sum"\)`.*'
           r'rows that each replica has.*write `reduce="mean"`.*explain gradient-scale')
IS_MULTIPLE = r'`step` applies gradients that are {n} times those.*summed over.*Leave that out.*`reduce="mean"`'
CASES = {
    "a loss over the global batch": (over_global_batch, {}, IS_PART),
    "a loss over the number of replicas": (over_replicas, {}, IS_PART),
    "a sum over the rows": (lambda y, y_pred: per_row(y, y_pred).sum(), {}, IS_PART),
    "a sum over the global batch": (over_global_batch, {"reduce": "sum"}, None),
    "a mean": (mean, {}, None),
    "a mean over real rows": (of_real_rows, {}, None),
    "a loss over the global batch that is summed": (over_global_batch, {"change": summed}, None),
    "that, and no reduction": (over_global_batch, {"change": summed, "reduce": None}, None),
    "a mean that is summed": (mean, {"change": summed}, IS_MULTIPLE),
    "a mean that is multiplied": (mean, {"change": multiplied}, IS_MULTIPLE),
    "a sum over a replica's rows as they are": (lambda y, y_pred: per_row(y, y_pred).sum() / 2, {}, IS_PART),
    "that, and the mean": (lambda y, y_pred: per_row(y, y_pred).sum() / 2, {"reduce": "mean"}, None),
    "meant to be small": (over_global_batch, {"reduce": "mean"}, None),
    "meant to be small, by the enum": (over_global_batch, {"reduce": distribute.ReduceOp.MEAN}, None),
    "a mean of all, by a fixed number": (
        mean, {"change": lambda grads: jax.tree.map(lambda leaf: leaf / 4, summed(grads)), "reduce": "mean"}, None),
    "meant to be large": (mean, {"change": summed, "reduce": "mean"}, None),
    "rows that are mixed": (spread, {}, None),
}


def run(strategy, step, state, rows=BATCH, batch_size=BATCH):
    for inputs in batches(strategy, rows, batch_size):
        state, _ = strategy.run(step, args=(state, inputs))
    return state


def outcome(strategy, step, state, message, **rows):
    """Runs a step, which is to be refused if there is a message."""
    if message is None:
        return run(strategy, step, state, **rows)
    with pytest.raises(ValueError, match=message.replace("{n}", str(strategy.num_replicas_in_sync))):
        run(strategy, step, state, **rows)
    return None


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("loss_of", "options", "message"), CASES.values(), ids=CASES)
@pytest.mark.sampled
def test_gradients_of_another_scale_are_refused_unless_the_step_says_how_they_are_reduced(
        loss_of, options, message, replicas):
    strategy = mirrored(replicas)
    model = make(strategy)
    outcome(strategy, step_of(model, loss_of, **options), model.state, message)


def strategies():
    devices = [f"cpu:{index}" for index in range(4)]
    return {
        "fully sharded": distribute.FullyShardedStrategy(devices, min_shard_bytes=0),
        "sharded optimizer": distribute.FullyShardedStrategy(devices, level="optimizer", min_shard_bytes=0),
        "central storage": distribute.CentralStorageStrategy(devices),
        "model parallel": distribute.ModelParallelStrategy(
            {"replica": 2, "model": 2}, devices, {"Dense_0/kernel": (None, "model")}),
        "hierarchical": distribute.MirroredStrategy(devices, distribute.HierarchicalCopyAllReduce(group_size=2)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", strategies())
@pytest.mark.parametrize("case", ["a loss over the global batch", "a mean", "a mean that is summed"])
def test_every_strategy_tells(name, case):
    loss_of, options, message = CASES[case]
    strategy = strategies()[name]
    model = make(strategy, Network(), optimizer="adam")
    outcome(strategy, step_of(model, loss_of, **options), model.state, message)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_tells(precision):
    strategy = mirrored(4)
    model = make(strategy, Network(), precision=precision)
    outcome(strategy, step_of(model, over_global_batch), model.state, IS_PART)
    outcome(strategy, step_of(model, mean), model.state, None)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "batch_size"), [(5, 8), (13, 16), (2, 8)])
def test_an_uneven_batch_tells_by_its_real_rows(rows, batch_size):
    strategy = mirrored(4)
    model = make(strategy)
    outcome(strategy, step_of(model, over_global_batch), model.state, IS_PART, rows=rows, batch_size=batch_size)
    for loss_of in (of_real_rows, lambda y, y_pred: model.compute_loss(None, y, y_pred, None)):
        outcome(strategy, step_of(model, loss_of), model.state, None, rows=rows, batch_size=batch_size)


@pytest.mark.slow
def test_a_batch_of_which_one_replica_has_all_rows_does_not_tell_but_the_next_does():
    def of_own_rows(y, y_pred):  # a mean over the replica's rows, and 1/4 of the batch's where the others have none
        return per_row(y, y_pred).sum() / jnp.maximum(get_replica_context().row_mask.sum(), 1)

    strategy = mirrored(4)
    model = make(strategy)
    one, whole = batches(strategy, 1)[0], batches(strategy)[0]
    for loss_of, message in ((of_own_rows, None), (over_global_batch, IS_PART)):
        step = step_of(model, loss_of)
        state, _ = strategy.run(step, args=(model.state, one))
        if message is None:
            strategy.run(step, args=(state, whole))
        else:
            with pytest.raises(ValueError, match=message.replace("{n}", "4")):
                strategy.run(step, args=(state, whole))


@pytest.mark.slow
def test_random_code_is_not_judged():
    strategy = mirrored(4)
    model = make(strategy, Network(dropout=0.5))
    for loss_of in (mean, over_global_batch):
        outcome(strategy, step_of(model, loss_of), model.state, None)


# --- functions that cannot be run on the whole batch, or not twice --------------------------------------------------


def test_a_function_for_so_many_rows_is_left_alone():
    def loss_of(y, y_pred):
        assert len(y) == 2
        return over_global_batch(y, y_pred)

    strategy = mirrored(4)
    model = make(strategy)
    outcome(strategy, step_of(model, loss_of), model.state, None)


@pytest.mark.slow
def test_gradients_that_are_applied_in_a_loop_of_the_compiler_are_left_alone():
    strategy = mirrored(4)
    model = make(strategy)
    step = step_of(model, over_global_batch)

    def steps(state, inputs):
        state, losses = jax.lax.scan(lambda state, _: step(state, inputs), state, length=2)
        return state, losses

    outcome(strategy, steps, model.state, None)


def test_gradients_that_are_added_up_in_such_a_loop_tell():
    strategy = mirrored(4)
    model = make(strategy)

    def step(state, inputs):
        def one(total, part):
            grads = jax.grad(lambda params: over_global_part(*part, params))(state.params)
            return jax.tree.map(jnp.add, total, grads), None

        def over_global_part(x, y, params):
            return jnp.square(model.apply(params, state, x, training=True)[0] - y).mean(-1).sum() / BATCH

        parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), inputs)
        grads, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state.params), parts)
        return state.apply_gradients(grads), grads["bias"]

    outcome(strategy, step, model.state, IS_PART)


def test_what_shows_outside_is_not_done_more_often():
    strategy, seen = mirrored(4), []
    model = make(strategy)
    step = step_of(model, over_global_batch)

    def shows(state, inputs):
        jax.debug.callback(lambda value: seen.append(float(value)), inputs[0].sum())
        return step(state, inputs)

    jax.block_until_ready(outcome(strategy, shows, model.state, None))
    jax.effects_barrier()
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("values", [[], [1.0], [[1.0, 2.0]]], ids=["nothing", "a number each", "a row each"])
def test_gradients_of_no_rows_are_left_alone(values):
    """What is the same on all replicas is the mean of itself."""
    strategy = mirrored(4)
    model = make(strategy)
    before = jax.device_get(jax.tree.leaves(model.state.params))

    def step(state, *values):
        return state.apply_gradients(jax.tree.map(jnp.ones_like, state.params))

    made = [strategy.experimental_distribute_values_from_function(lambda _, value=value: np.asarray(value))
            for value in values]
    state = strategy.run(step, args=(model.state, *made))
    for new, old in zip(jax.tree.leaves(state.params), before, strict=True):
        np.testing.assert_allclose(new, old - 0.1, rtol=1e-6)


def test_a_refused_function_has_changed_nothing():
    strategy = mirrored(4)
    model = make(strategy)
    metric = nnx.metrics.Average("values")
    step = step_of(model, over_global_batch)
    right = step_of(model, over_global_batch, reduce="sum")

    def counting(function, state, metric, inputs):
        metric.update(values=inputs[0])
        return function(state, inputs)

    inputs = batches(strategy)[0]
    before = jax.tree.map(np.asarray, model.state.params)
    with pytest.raises(ValueError, match="gradients that are 1/4"):
        strategy.run(functools.partial(counting, step), args=(model.state, metric, inputs))
    assert float(metric.count[...]) == 0
    state, _ = strategy.run(functools.partial(counting, right), args=(model.state, metric, inputs))
    assert float(metric.count[...]) > 0
    for old, kept, new in zip(jax.tree.leaves(before), jax.tree.leaves(model.state.params),
                              jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(old, kept)
        assert not np.array_equal(old, new)


def test_a_function_is_looked_at_once():
    strategy = mirrored(4)
    model = make(strategy)
    step, calls = step_of(model, of_real_rows), []

    def counted(state, inputs):
        calls.append(jnp.shape(inputs[0])[0])
        return step(state, inputs)

    even, same, uneven = batches(strategy, 21)
    with count_compilations() as first:
        state, _ = strategy.run(counted, args=(model.state, even))
    assert calls.count(BATCH) == 1  # the whole batch, once
    seen = len(calls)
    with count_compilations() as second:
        state, _ = strategy.run(counted, args=(state, same))
    assert len(calls) == seen
    assert not second
    strategy.run(counted, args=(state, uneven))
    assert calls.count(BATCH) == 1
    assert 5 not in calls
    assert first


@pytest.mark.slow
def test_one_replica_is_not_looked_at():
    strategy = mirrored(1)
    model = make(strategy)
    calls, step = [], step_of(model, over_global_batch)
    strategy.run(lambda state, inputs: calls.append(0) or step(state, inputs), args=(model.state, batches(strategy)[0]))
    with_steps = len(calls)
    explicit = step_of(model, over_global_batch, reduce="sum")
    strategy.run(lambda state, inputs: calls.append(0) or explicit(state, inputs),
                 args=(model.state, batches(strategy)[0]))
    assert len(calls) == 2 * with_steps


# --- several updates in a step ---------------------------------------------------------------------------------------


def gan(strategy):
    with strategy.scope():
        model = trainer.Model({"generator": nn.Dense(3), "critic": nn.Dense(1)})
        model.compile({"generator": optax.sgd(0.1), "critic": optax.adam(0.01)}, None)
        model.build({"generator": x[:1], "critic": y[:1]})
    return model


def gan_step(model, generator_scale, critic_scale, **reductions):
    """Returns a step that updates the critic, and then the generator against the new critic."""
    def run(name, params, state, inputs):
        return model.apply(params, state, inputs, module=name, training=True)[0]

    def step(state, inputs):
        x, y = inputs

        def critic_loss(critic):
            made = run("generator", state.params["generator"], state, x)
            scores = run("critic", critic, state, made) - run("critic", critic, state, y)
            return nn.softplus(scores).sum() * critic_scale(len(x))

        grads = jax.grad(critic_loss)(state.params["critic"])
        state = state.apply_gradients(critic=grads, **reductions.get("critic", {}))

        def generator_loss(generator):
            made = run("generator", generator, state, x)
            return nn.softplus(-run("critic", state.params["critic"], state, made)).sum() * generator_scale(len(x))

        grads = jax.grad(generator_loss)(state.params["generator"])
        return state.apply_gradients(generator=grads, **reductions.get("generator", {})), jnp.zeros(())

    return step


def as_mean(rows):
    return 1 / rows


def as_part(rows):
    return 1 / BATCH


@pytest.mark.slow
@pytest.mark.parametrize(("scales", "reductions", "message"), [
    ((as_mean, as_mean), {}, None),
    ((as_part, as_mean), {}, r"of 'generator' that are 1/4.*apply_gradients\(generator=grads, reduce=\"sum\"\)"),
    ((as_mean, as_part), {}, r"gradients of 'critic' that are 1/4"),
    ((as_part, as_mean), {"generator": {"reduce": "sum"}}, None),
    ((as_part, as_part), {"critic": {"reduce": "sum"}}, "gradients of 'generator'"),
    ((as_part, as_part), {"generator": {"reduce": "sum"}}, "gradients of 'critic'"),
    ((as_part, as_part), {"critic": {"reduce": "sum"}, "generator": {"reduce": "sum"}}, None),
], ids=["means", "the generator's", "the critic's", "summed", "one of both", "the other", "both summed"])
def test_each_update_of_a_step_is_looked_at_by_itself(scales, reductions, message):
    strategy = mirrored(4)
    model = gan(strategy)
    outcome(strategy, gan_step(model, *scales, **reductions), model.state, message)


@pytest.mark.slow
def test_a_code_that_asks_for_the_number_of_replicas_gets_that_of_the_whole_batch():
    """The number of replicas is 1 to code that is given all rows, so that a correct factor stays correct."""
    strategy = mirrored(4)
    model = make(strategy)
    step = step_of(model, lambda y, y_pred: over_global_batch(y, y_pred) * strategy.num_replicas_in_sync)
    outcome(strategy, step, model.state, None)
    assert strategy.num_replicas_in_sync == 4
