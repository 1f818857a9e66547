"""Packed graphs, each a row of a batch: the numbers of a loop by hand, on one device and on several."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored

GRAPHS = 3  # in a packed graph, the last of them padding


class Graphs(NamedTuple):
    nodes: np.ndarray
    edges: None
    senders: np.ndarray
    receivers: np.ndarray
    graph_of_node: np.ndarray


class Network(nn.Module):
    """One packed graph: an output for each of its graphs."""

    @nn.compact
    def __call__(self, graphs):
        hidden = nn.tanh(nn.Dense(4)(graphs.nodes))
        hidden += jax.ops.segment_sum(hidden[graphs.senders], graphs.receivers, len(hidden))
        return nn.Dense(1)(jax.ops.segment_sum(hidden, graphs.graph_of_node, GRAPHS))


def packed(seed, nodes, edges):
    """A packed graph, with targets and the mask of real graphs."""
    rng = np.random.default_rng(seed)
    graphs = Graphs(rng.normal(size=(nodes, 2)).astype(np.float32), None, rng.integers(0, nodes, edges),
                    rng.integers(0, nodes, edges), np.sort(rng.integers(0, GRAPHS, nodes)))
    return graphs, rng.normal(size=(GRAPHS, 1)).astype(np.float32), np.array([1, 1, 0], np.float32)


# Batches of two packed graphs each, of two sizes; the last batch has a single packed graph.
BATCHES = [[packed(0, 7, 9), packed(1, 7, 9)], [packed(2, 5, 4), packed(3, 5, 4)], [packed(4, 7, 9)]]


def stacked(batch):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batch)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("replicas", [1, 2])
def test_packed_graphs_give_the_numbers_of_a_loop_by_hand(replicas):
    network, optimizer = Network(), optax.sgd(0.1)
    params = network.init(jax.random.key(0), BATCHES[0][0][0])

    def loss_of(params, batch):
        parts = [((network.apply(params, graphs) - y)[:, 0] ** 2 * mask, mask) for graphs, y, mask in batch]
        errors, masks = map(jnp.concatenate, zip(*parts, strict=True))
        return errors.sum() / masks.sum()

    with mirrored(replicas).scope():
        rows = nn.vmap(Network, variable_axes={"params": None}, split_rngs={"params": False})
        model = trainer.Model(rows())
        model.build(stacked(BATCHES[0])[0])
        model.set_weights(jax.tree.leaves(params))
        model.compile(optimizer, trainer.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
                      compile_guard="off")
    opt_state = optimizer.init(params)
    model.fit(map(stacked, BATCHES), verbose=0)
    for batch in BATCHES:
        grads = jax.grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
    for mine, theirs in zip(model.get_weights(), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    outputs = list(model.predict_iter([(graphs,) for graphs, _, _ in map(stacked, BATCHES)]))
    expected = [np.stack([network.apply(params, graphs) for graphs, _, _ in batch]) for batch in BATCHES]
    for mine, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_packed_graph_without_an_axis_of_rows_is_told_of():
    model = trainer.Model(Network())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"same number of rows.*packed graph"):
        model.fit([BATCHES[0][0]], verbose=0)
