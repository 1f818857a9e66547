"""Loops of one's own: run, reduce, gather and distributed datasets, with one device's numbers."""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.networks import NNXMLP, LinenMLP, classification, custom_step, logits_loss, mirrored
from trainer import distribute
from trainer.core.train_state import TrainState
from trainer.distribute import ReduceOp, get_replica_context


def batches(rows, batch_size=8, shuffle=False):
    x, y, _ = classification(rows)
    dataset = trainer.data.Dataset.from_arrays((x, y))
    return (dataset.shuffle(seed=0) if shuffle else dataset).batch(batch_size)


def train_by_hand(replicas, rows, epochs=2):
    """Returns the weights and each step's loss of a loop around TrainState."""
    strategy = mirrored(replicas)
    with strategy.scope():
        model = trainer.Model(LinenMLP(batch_norm=True), seed=1)
        model.compile(optax.sgd(0.1, momentum=0.9), logits_loss())
        model.build(np.zeros((1, 6), np.float32))

    state, losses, step = model.state, [], custom_step(model)
    for _ in range(epochs):
        for inputs in strategy.experimental_distribute_dataset(batches(rows)):
            state, loss = strategy.run(step, args=(state, inputs))
            losses.append(float(strategy.reduce(ReduceOp.MEAN, loss)))
    assert int(state.step) == len(losses)
    return jax.tree.map(np.asarray, (state.params, state.model_state)), losses


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "rows"), [
    (2, 32), pytest.param(4, 35, marks=pytest.mark.every_case), pytest.param(2, 35, marks=pytest.mark.every_case),
    pytest.param(4, 32, marks=pytest.mark.every_case)])
def test_a_loop_around_a_train_state_gives_one_devices_numbers(replicas, rows):
    for ours, theirs in zip(jax.tree.leaves(train_by_hand(1, rows)), jax.tree.leaves(train_by_hand(replicas, rows)),
                            strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("data", "length"), [
    (batches(35), 5), (batches(35).repeat(), None), (batches(35).repeat(2), 10), (iter([]), None)],
    ids=["once", "endless", "twice", "unknown"])
def test_the_length_of_distributed_data_is_that_of_a_pass_or_an_error(data, length):
    distributed = mirrored(2).experimental_distribute_dataset(data)
    if length is None:
        with pytest.raises(TypeError, match="The length of these data is not known"):
            len(distributed)
    else:
        assert len(distributed) == length


def train_nnx(replicas, rows):
    strategy = mirrored(replicas)
    with strategy.scope():
        net = NNXMLP()
        optimizer = nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param)

    def step(net, optimizer, inputs):
        x, y = inputs
        mask, replica = get_replica_context().row_mask, get_replica_context()

        def loss_fn(net):
            losses = optax.softmax_cross_entropy_with_integer_labels(net(x), y)
            return (losses * mask).sum() / 8

        loss, grads = nnx.value_and_grad(loss_fn)(net)
        optimizer.update(net, replica.all_reduce("sum", grads))
        return loss

    losses = [float(strategy.reduce("sum", strategy.run(step, args=(net, optimizer, inputs))))
              for inputs in strategy.experimental_distribute_dataset(batches(rows))]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(net, nnx.Param))], losses, optimizer


@pytest.mark.slow
def test_a_loop_around_nnx_objects_updates_them_in_place_with_one_devices_numbers():
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(NNXMLP(), nnx.Param))]
    one, many = train_nnx(1, 19), train_nnx(4, 19)
    for ours, theirs, untrained in zip(one[0], many[0], before, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        assert not np.array_equal(theirs, untrained)
    np.testing.assert_allclose(one[1], many[1], rtol=1e-4)
    assert int(many[2].step[...]) == 3


def test_an_nnx_dropout_draws_another_mask_on_each_replica_and_in_each_step():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    strategy = mirrored(4)
    masks = [strategy.run(lambda layer: layer(jnp.ones(64)), args=(dropout,)) for _ in range(2)]
    drawn = {values.tobytes() for mask in masks for values in strategy.experimental_local_results(mask)}
    assert len(drawn) == 8


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("rows", [1, 5, 8, 13])
def test_every_real_row_is_seen_once_however_rows_fall_on_replicas(rows):
    strategy = mirrored(4)
    x = np.arange(rows, dtype=np.float32)
    seen = []
    total = 0.0
    for inputs in strategy.experimental_distribute_dataset(trainer.data.Dataset.from_arrays(x).batch(8)):
        doubled = strategy.run(lambda v: 2 * v, args=(inputs,))
        seen.extend(strategy.gather(doubled, axis=0) / 2)
        assert len(strategy.experimental_local_results(inputs)) == 4
        mean = float(strategy.reduce(ReduceOp.MEAN, doubled, axis=0))
        np.testing.assert_allclose(mean, strategy.gather(doubled).mean(), rtol=1e-6)
        total += float(strategy.reduce(ReduceOp.SUM, doubled, axis=0))
    np.testing.assert_array_equal(seen, x)
    assert total == 2 * x.sum()


def test_reduce_counts_a_plain_value_once_per_replica_and_takes_trees():
    strategy = mirrored(3)
    assert float(strategy.reduce("SUM", 2.0)) == 6.0
    assert float(strategy.reduce("mean", 2.0)) == 2.0
    scores = strategy.run(lambda: {"id": get_replica_context().replica_id_in_sync_group, "row": jnp.arange(2.0)})
    assert int(strategy.reduce("sum", scores)["id"]) == 3
    np.testing.assert_array_equal(strategy.reduce("sum", scores)["row"], [0.0, 3.0])
    assert float(strategy.reduce("sum", scores["row"], axis=0)) == 3.0


def test_the_context_gathers_over_replicas():
    strategy = mirrored(4)
    values = strategy.run(lambda: get_replica_context().all_gather(
        get_replica_context().replica_id_in_sync_group[None]))
    for local in strategy.experimental_local_results(values):
        np.testing.assert_array_equal(local, [0, 1, 2, 3])


def test_run_compiles_once_per_function_and_shapes():
    strategy = mirrored(2)
    inputs = list(strategy.experimental_distribute_dataset(batches(24)))
    scale = 3.0

    def call(each):
        return strategy.run(lambda pair: (pair[0] * scale).sum(), args=(each,))

    with count_compilations() as first:
        call(inputs[0])
    assert first
    with count_compilations() as others:
        call(inputs[1])
        call(inputs[2])
    assert not others


def test_values_and_datasets_from_functions_reach_their_replicas():
    strategy = mirrored(4)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group))
    assert float(strategy.reduce("sum", values)) == 6.0

    def dataset_fn(context):
        assert context.num_replicas_in_sync == 4
        return trainer.data.Dataset.from_arrays(np.arange(22.0)).batch(context.get_per_replica_batch_size(16))

    elements = list(strategy.distribute_datasets_from_function(dataset_fn))
    assert [local.tolist() for local in strategy.experimental_local_results(elements[1])] == [
        [16, 17, 18, 19], [20, 21], [], []]
    assert sum(float(strategy.reduce("sum", element, axis=0)) for element in elements) == sum(range(22))
    with pytest.raises(ValueError, match=r"global_batch_size.*4 replicas.*Received: 6"):
        distribute.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(6)


def test_a_shuffled_dataset_comes_in_another_order_in_each_iteration():
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(batches(16, shuffle=True))
    assert len(dataset) == 2
    first, second = (np.concatenate([strategy.gather(inputs)[1] for inputs in dataset]) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first.tolist() != second.tolist()


def test_the_context_knows_where_the_caller_is():
    assert not distribute.in_cross_replica_context()
    strategy = mirrored(2)
    with strategy.scope():
        assert distribute.in_cross_replica_context()
        inside = strategy.run(lambda: jnp.float32(distribute.in_cross_replica_context()))
    assert float(strategy.reduce("sum", inside)) == 0.0


def test_a_step_that_runs_outside_of_a_scope_gets_its_strategy():
    strategy, seen = mirrored(2), set()
    strategy.run(lambda: seen.add(distribute.get_strategy()) or jnp.ones(()))
    assert seen == {strategy}
    assert not distribute.has_strategy()


kept = []


def appends(value):
    kept.append(value)
    return value


def changes_the_state(state):
    return state.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))


def makes_a_state(state):
    return TrainState(jnp.int32(0), state.params, {}, None, jnp.uint32(0))


def built(strategy, optimizer=None):
    with strategy.scope():
        model = trainer.Model(nn.Dense(2))
        model.compile(optimizer, "mse")
        model.build(np.ones((2, 3), np.float32))
    return model.state


CASES = {
    "a traced array in a list": (TypeError, "`appends` keeps a traced array in `kept`.*Return the value",
                                 lambda s: s.run(appends, args=(jnp.ones(()),))),
    "a state of other dtypes": (TypeError, "`changes_the_state` changed the structure.*bias.*float32.*bfloat16",
                                lambda s: s.run(changes_the_state, args=(built(s),))),
    "a state made anew": (ValueError, "TrainState.*not made of one",
                          lambda s: s.run(makes_a_state, args=(built(s),))),
    "a list of text": (TypeError, "array", lambda s: s.run(lambda: "text")),
    "arguments without a tuple": (TypeError, r"`args` must be a tuple", lambda s: s.run(len, args=np.ones(4))),
    "an unhashable argument": (TypeError, "hashable.*set", lambda s: s.run(lambda v: v, args=({1, 2},))),
    "a host value": (TypeError, r"into a Python value.*jax.numpy",
                     lambda s: s.run(lambda v: float(v), args=(jnp.ones(()),))),
    "an axis that is not there": (ValueError, "axis.*1.*0 axes", lambda s: s.reduce("sum", 1.0, axis=1)),
    "an unknown reduction": (ValueError, "sum.*mean.*median", lambda s: s.reduce("median", 1.0)),
    "gradients of some parameters": (ValueError, "no gradients of 'bias'.*freeze", lambda s: s.run(
        lambda state: state.apply_gradients({"kernel": state.params["kernel"]}), args=(built(s, "sgd"),))),
    "gradients of other parameters": (ValueError, "gradients of unknown 'other'", lambda s: s.run(
        lambda state: state.apply_gradients({**state.params, "other": jnp.ones(2)}), args=(built(s, "sgd"),))),
    "a value of each replica as a number": (TypeError, r"strategy.reduce\(\"mean\"", lambda s: float(
        s.run(lambda: jnp.ones(())))),
    "values of replicas in an average": (TypeError, r"strategy.reduce\(\"mean\"", lambda s: np.mean(
        s.run(lambda: jnp.ones(())))),
}


@pytest.mark.parametrize(("kind", "text", "call"), CASES.values(), ids=CASES)
def test_bad_steps_and_values_are_refused(kind, text, call):
    with pytest.raises(kind, match=text):
        call(mirrored(2))


def test_an_nnx_object_that_is_not_an_argument_cannot_be_changed():
    hidden = types.SimpleNamespace(away=types.SimpleNamespace(net=nnx.Linear(2, 1, rngs=nnx.Rngs(0))))

    def step(value):
        hidden.away.net.bias[...] = value
        return value

    with pytest.raises(TypeError, match=r"`step` changes an NNX object.*Pass it as an argument"):
        mirrored(2).run(step, args=(jnp.ones((1,)),))


def test_a_function_that_is_mended_runs_although_its_list_still_holds_a_traced_array():
    losses = []

    def leaks(value):
        losses.append(value)
        return value

    def mended(value):
        assert losses is not None
        return value

    strategy = mirrored(2)
    with pytest.raises(TypeError, match="`losses`"):
        strategy.run(leaks, args=(jnp.ones(()),))
    assert float(strategy.reduce("mean", strategy.run(mended, args=(jnp.ones(()),)))) == 1.0


def test_a_train_step_that_keeps_an_array_is_refused():
    class Custom(trainer.Model):
        def train_step(self, state, batch):
            logs, state = super().train_step(state, batch)
            self.last_loss = logs["loss"]
            return logs, state

    model = Custom(nn.Dense(1))
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"train_step` keeps a traced array in `self.last_loss`"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


outside = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
outsiders = {"critic": [outside]}


def outputs(x):
    return outside(x)


@jax.jit
def compiled_outputs(x):
    return outside(x)


def total(net, x):
    return net(x).sum()


class Evaluation:
    def __init__(self, net):
        self.net, self.unused = net, outside

    def step(self, x):
        return self.outputs(x).sum()

    def outputs(self, x):
        return self.net(x)

    def step_of(self, net, x):
        return net(x).sum()

    __call__ = step


def captures(net):
    return lambda x: jax.value_and_grad(lambda x: net(x).sum())(x)[0]


@pytest.mark.parametrize(("function", "name"), [
    (captures(outside), "net"),
    (lambda x: outside.kernel[...].sum(), "outside"),
    (lambda x: outsiders["critic"][0](x), "outsiders"),
    (lambda x: outputs(x).sum(), "outside"),
    (lambda x: compiled_outputs(x).sum(), "outside"),
    (lambda x: jax.lax.map(lambda row: outside(row).sum(), x), "outside"),
    (jax.checkpoint(outputs), "outside"),
    (Evaluation(outside).step, "self.net"),
    (Evaluation(outside), "self.net"),
    (functools.partial(total, outside), "args[0]"),
    (outside, "self"),
], ids=["closure", "global", "container", "helper", "compiled", "nested", "wrapped", "method", "callable", "partial",
        "module"])
def test_an_nnx_object_that_is_not_an_argument_cannot_be_read(function, name):
    with pytest.raises(TypeError, match=rf"uses `{re.escape(name)}`, an NNX object \(Linear\).*Pass it as an argument"):
        mirrored(1).run(function, args=(jnp.ones((3, 2)),))


def test_nnx_objects_that_are_arguments_are_read_anew_in_each_call():
    net, strategy, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), mirrored(1), jnp.ones((3, 2))

    def step(model, x):
        return total(model, x) * net.out_features

    def both_ways():
        return [float(strategy.reduce("mean", strategy.run(function, args=(net, x))))
                for function in (step, Evaluation(net).step_of)]

    before = both_ways()
    net.bias[...] += 2.0
    np.testing.assert_allclose(both_ways(), np.add(before, 3 * 2.0), rtol=1e-5)


def small_model():
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    model.build(np.ones((4, 2), np.float32))
    return model


def test_the_state_of_a_model_is_an_argument_and_is_not_read_from_outside():
    model, x = small_model(), jnp.ones((4, 2))

    def score(x):
        return model.apply(model.state.params, model.state, x)[0].sum()

    for step in (score, lambda x: model(x), lambda x: x @ model.get_weights()[1]):
        with pytest.raises(TypeError, match=r"reads the state of a model.*Pass `model.state` as an argument of `run`"):
            mirrored(1).run(step, args=(x,))
    model.state.replace(step=model.state.step)  # outside it can be read, also after an error inside


def test_a_train_step_of_ones_own_may_read_another_models_state():
    teacher = small_model()

    class Student(trainer.Model):
        def train_step(self, state, batch):
            x, _, _ = trainer.unpack_x_y_sample_weight(batch)
            return super().train_step(state, (x, teacher.apply(teacher.state.params, teacher.state, x)[0]))

    model = Student(nn.Dense(1))
    model.compile("sgd", "mse")
    assert model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0).history["loss"]


def test_a_state_that_is_assigned_inside_is_refused_and_the_model_keeps_its_own():
    model = small_model()

    def step(state, x):
        model.state = state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))
        return x.sum()

    before = model.get_weights()
    with pytest.raises(TypeError, match=r"`state` was assigned.*Return the new state.*assign it outside"):
        mirrored(1).run(step, args=(model.state, jnp.ones((4, 2))))
    for kept_weight, weight in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(kept_weight, weight)


def test_a_metric_that_is_updated_inside_is_named_and_works_again_once_reset():
    metric = trainer.metrics.Mean()

    def step(x):
        metric.update_state(x)
        return x.sum()

    strategy, x = mirrored(1), jnp.ones(4)
    with pytest.raises(TypeError, match=r"keeps a traced array in `metric\.\w+`.*Return the value"):
        strategy.run(step, args=(x,))
    metric.reset_state()
    metric.update_state(strategy.gather(strategy.run(lambda x: 3 * x, args=(x,))))
    assert float(metric.result()) == 3.0


def test_a_value_kept_where_it_is_not_looked_for_is_told_from_a_host_value():
    hidden = types.SimpleNamespace(away=types.SimpleNamespace(value=0.0))

    def step(x):
        hidden.away.value = hidden.away.value + x
        return x

    with pytest.raises(TypeError, match=r"`step` keeps a traced value in an object outside.*Return the value"):
        mirrored(1).run(step, args=(jnp.ones(()),))


def own_mean(state, inputs):
    x, _ = inputs
    grads = jax.grad(lambda params: jnp.square(x @ params["kernel"] - 1.0).mean())(state.params)
    return state.apply_gradients(grads)


def own_mean_of_real_rows(state, inputs):
    context = get_replica_context()

    def loss_fn(params):
        per_row = jnp.square(inputs[0] @ params["kernel"] - 1.0).mean(-1) * context.row_mask
        return per_row.sum() * context.num_replicas_in_sync / context.global_rows

    return state.apply_gradients(jax.grad(loss_fn)(state.params))


def nnx_mean(module, optimizer, inputs):
    grads = nnx.grad(lambda module: jnp.square(module(inputs[0]) - 1.0).mean())(module)
    optimizer.update(module, get_replica_context().all_reduce("mean", grads))


@pytest.mark.slow
def test_a_function_that_trains_on_rows_that_pad_is_refused():
    strategy = mirrored(4)
    with strategy.scope():
        model = trainer.Model(nn.Dense(3, use_bias=False))
        model.compile("sgd", "mse")
        model.build(np.zeros((1, 6), np.float32))
    module = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
    whole, padded = strategy.experimental_distribute_dataset(batches(13))  # 8 rows, then 5
    strategy.run(own_mean, args=(model.state, whole))
    strategy.run(nnx_mean, args=(module, optimizer, whole))
    strategy.run(own_mean_of_real_rows, args=(model.state, padded))
    for function, states in ((own_mean, (model.state,)), (nnx_mean, (module, optimizer))):
        message = rf"`{function.__name__}` changes the state by rows that only pad.*row_mask"
        with pytest.raises(ValueError, match=message):
            strategy.run(function, args=(*states, padded))
    strategy.run(lambda state, inputs: inputs[0].sum(), args=(model.state, padded))  # which changes nothing


def test_a_metric_of_nnx_that_replicas_cannot_share_is_refused():
    metric = nnx.MultiMetric(mean=nnx.metrics.Average("values"), spread=nnx.metrics.Welford("values"))

    def step(metric, inputs):
        metric.update(values=inputs[0])

    batch = next(iter(mirrored(4).experimental_distribute_dataset(batches(8))))
    with pytest.raises(ValueError, match=r"`nnx\.metrics\.Welford` cannot be updated by several replicas.*gather"):
        mirrored(4).run(step, args=(metric, batch))
