"""Tables on parameter servers: lookups, sparse updates, and files that other numbers of servers read."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support.inline_cluster import InlineHandle
from trainer import distribute, optimizers
from trainer.distribute.parameter_server.embedding_table import make_table
from trainer.distribute.parameter_server.server import ParameterServer
from trainer.optimizers.update_rule import UpdateRule


def made(servers, optimizer="sgd", rows=11, features=3, seed=0):
    handles = [InlineHandle(f"ps {index}", functools.partial(ParameterServer, False)) for index in range(servers)]
    return make_table(handles, "users", rows, features, UpdateRule(optimizers.get(optimizer)),
                      nn.initializers.normal(1.0), seed)


@pytest.mark.slow
def test_rows_are_the_same_on_any_number_of_servers():
    first = made(1).lookup(np.arange(11))
    assert first.shape == (11, 3) and first.std() > 0.5
    for servers in (2, 3, 20):
        np.testing.assert_array_equal(made(servers).lookup(np.arange(11)), first)


@pytest.mark.slow
def test_ids_may_have_any_shape_and_come_several_times():
    table = made(2)
    rows = table.lookup([[3, 3, 0], [10, 3, 1]])
    assert rows.shape == (2, 3, 3)
    np.testing.assert_array_equal(rows[0, 0], rows[1, 1])
    assert table.lookup(np.zeros((0, 2), int)).shape == (0, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rmsprop", "ftrl", optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("servers", [1, 2])
def test_updates_of_all_rows_are_those_of_the_optimizer(optimizer, servers):
    table, rule = made(servers, optimizer), optimizers.get(optimizer)
    rng = np.random.default_rng(0)
    weights = jnp.asarray(table.lookup(np.arange(11)))
    state = rule.init(weights)
    for _ in range(3):
        grads = rng.normal(size=(11, 3)).astype(np.float32)
        updates, state = rule.update(jnp.asarray(grads), state, weights)
        weights = optax.apply_updates(weights, updates)
        table.push(np.arange(11), grads)
    np.testing.assert_allclose(table.lookup(np.arange(11)), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_without_a_gradient_and_their_state_stay():
    table = made(2, optax.sgd(1.0, momentum=0.9))
    before = table.lookup(np.arange(11))
    table.push([4, 7, 4], np.ones((3, 3)))
    table.push([7], np.zeros((1, 3)))
    moved = before - table.lookup(np.arange(11))
    expected = np.zeros((11, 3))
    expected[4], expected[7] = 2.0, 1.9  # two gradients in one, and momentum where there was a push
    np.testing.assert_allclose(moved, expected, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1)])
def test_what_was_saved_is_read_by_another_number_of_servers(tmp_path, before, after):
    table = made(before, "adagrad")
    rng = np.random.default_rng(1)
    table.push(np.arange(11), rng.normal(size=(11, 3)))
    table.save(tmp_path)
    restored = made(after, "adagrad", seed=5)
    restored.restore(tmp_path)
    grads = rng.normal(size=(11, 3))
    for each in (table, restored):
        each.push(np.arange(11), grads)
    np.testing.assert_allclose(restored.lookup(np.arange(11)), table.lookup(np.arange(11)), rtol=1e-6)


def test_a_table_of_another_size_or_none_is_refused(tmp_path):
    made(2).save(tmp_path)
    with pytest.raises(ValueError, match=r"has 11 rows of \(3,\).*has 12 of \(3,\)"):
        made(1, rows=12).restore(tmp_path)
    with pytest.raises(ValueError, match=r"must have one 'users'. Found: 0"):
        made(1).restore(tmp_path / "other")


@pytest.mark.slow
def test_a_table_that_was_restored_may_be_saved_to_the_same_folder(tmp_path):
    made(3).save(tmp_path)
    table = made(2, seed=5)
    table.restore(tmp_path)
    table.save(tmp_path)
    restored = made(1, seed=7)
    restored.restore(tmp_path)
    np.testing.assert_array_equal(restored.lookup(np.arange(11)), made(1).lookup(np.arange(11)))


@pytest.mark.sampled(3)
@pytest.mark.every_case
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "sgd"])
def test_the_state_of_another_optimizer_is_refused(tmp_path, optimizer):
    made(2, "adagrad").save(tmp_path)
    with pytest.raises(ValueError, match=r"state of another optimizer.*sum_of_squares.*This one has \['opt"):
        made(2, optimizer).restore(tmp_path)


@pytest.mark.parametrize(("ids", "error", "message"), [
    ([0, 11], ValueError, r"`ids` must be from 0 to 10. Received: 0 to 11"),
    ([-1], ValueError, r"Received: -1"),
    ([0.5], TypeError, "integers")])
def test_wrong_ids_are_refused(ids, error, message):
    with pytest.raises(error, match=message):
        made(2).lookup(ids)


def test_gradients_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\). Received: \(2, 4\)"):
        made(2).push([0, 1], np.zeros((2, 4)))


@pytest.mark.parametrize("optimizer", [
    "lamb", optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), optax.adafactor(0.1),
    optimizers.SGD(0.1, gradient_accumulation_steps=2), optax.MultiSteps(optax.sgd(0.1), 2)])
def test_an_optimizer_that_looks_at_several_rows_or_pushes_is_refused(optimizer):
    with pytest.raises(ValueError, match="each row of a table on its own"):
        made(1, optimizer)


@pytest.mark.processes
def test_workers_train_a_table_that_only_servers_hold():
    labels = np.random.default_rng(0).integers(2, size=50)
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=2) as strategy:
        table = strategy.create_embedding_table("items", 50, 1, optimizer=optimizers.SGD(1.0))
        with pytest.raises(ValueError, match="already"):
            strategy.create_embedding_table("items", 5, 1)

        def train(ids):
            rows = table.lookup(ids)[:, 0]
            probabilities = 1 / (1 + np.exp(-rows))
            table.push(ids, (probabilities - labels[ids])[:, None])

        functions = [functools.partial(train, np.arange(start, start + 10)) for start in range(0, 50, 10)] * 6
        for function in functions:
            strategy.coordinator.schedule(function)
        strategy.coordinator.join()
        assert ((table.lookup(np.arange(50))[:, 0] > 0) == labels).all()
