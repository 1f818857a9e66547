"""Packs of graphs as rows: the numbers of a loop by hand, on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored

GRAPHS = 3
rng = np.random.default_rng(0)
PACKS = {"nodes": rng.normal(size=(5, 10, 4)).astype(np.float32),
         "graph": np.sort(rng.integers(0, GRAPHS, (5, 10)), axis=1),
         "edges": rng.integers(0, 10, (5, 7, 2))}
Y = rng.normal(size=(5, GRAPHS, 1)).astype(np.float32)
IS_GRAPH = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]], np.float32)


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, packs):
        nodes = nn.Dense(8)(packs["nodes"])
        messages = jax.vmap(lambda nodes, edges: nodes.at[edges[:, 1]].add(nodes[edges[:, 0]]))(nodes, packs["edges"])
        sums = jax.vmap(lambda nodes, graph: jax.ops.segment_sum(nodes, graph, GRAPHS))
        return nn.Dense(1)(sums(nn.tanh(messages), packs["graph"]))


def by_hand(params, epochs):
    transformation = optax.sgd(0.1)
    state = transformation.init(params)

    @jax.jit
    def gradients(params, packs, y, is_graph):
        def loss(params):
            errors = jnp.square(GraphNet().apply({"params": params}, packs) - y)[..., 0]
            return (errors * is_graph).sum() / is_graph.size  # Keras divides by the number of values
        return jax.grad(loss)(params)

    for start in [0, 2, 4] * epochs:
        batch = jax.tree.map(lambda rows: rows[start:start + 2], (PACKS, Y, IS_GRAPH))  # noqa: B023
        updates, state = transformation.update(gradients(params, *batch), state)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("replicas", [1, 2])
def test_packs_of_graphs_train_as_in_a_loop_by_hand(replicas):
    with mirrored(replicas).scope():
        model = trainer.Model(GraphNet())
        model.compile(optax.sgd(0.1), "mse")
    model.build(PACKS)
    params = jax.device_get(model.state.params)
    model.fit(PACKS, Y, sample_weight=IS_GRAPH, batch_size=2, epochs=2, shuffle=False, verbose=0)
    jax.tree.map(lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6),
                 jax.device_get(model.state.params), jax.device_get(by_hand(params, 2)))


def test_a_list_of_rows_is_explained():
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"A list given as `x` is 4 inputs.*If each is a row, give `np.stack\(x\)`"):
        model.train_on_batch([np.ones(4, np.float32)] * 4, np.ones((4, 1), np.float32))
