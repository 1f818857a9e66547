"""Batches of arrays that are split over the devices: rows are exchanged, and no number is computed with."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import trainer
from tests.support.hlo import collectives
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer.data.sources.arrays import HostArrays
from trainer.data.sources.groups import Group
from trainer.distribute.placement import placement
from trainer.distribute.strategies import strategy

ROWS, BATCH = 53, 8


@pytest.fixture(autouse=True)
def split_arrays(monkeypatch):
    """No device has memory for the arrays of these tests, but all have together, and keep what they are given."""
    monkeypatch.setattr(trainer.distribute.Strategy, "keeps_arrays", True)
    monkeypatch.setattr(strategy, "memory_bytes", lambda device: 1300 / placement.DATA_FRACTION)


def model_parallel():
    return trainer.distribute.ModelParallelStrategy(
        {"replica": 4, "model": 2}, layout_map={"Dense_0/kernel": (None, "model")})


def hybrid():
    return trainer.distribute.FullyShardedStrategy(
        [f"cpu:{index}" for index in range(4)], mesh_shape={"replica": 2, "shard": 2})


def fully_sharded():
    return trainer.distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(4)])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [lambda: mirrored(4), lambda: mirrored(3), fully_sharded, model_parallel, hybrid],
                         ids=["four", "three", "fully_sharded", "model_parallel", "hybrid"])
def test_every_bit_of_every_row_comes_to_its_replica(make):
    under, rng = make(), np.random.default_rng(0)
    batch = 6 * under.num_replicas_in_sync
    floats = rng.normal(size=(ROWS, 3)).astype(np.float32)
    floats[::2, 0], floats[1::4, 1], floats[3::4, 2] = -0.0, np.nan, -np.inf
    tree = {"floats": floats, "bytes": rng.integers(0, 255, (ROWS, 2, 2)).astype(np.uint8),
            "flags": np.arange(ROWS) % 3 == 0, "numbers": np.arange(ROWS, dtype=np.int32)}
    placed = under.place_arrays(HostArrays(tree), forced=True)
    numbers = rng.integers(0, ROWS, (3, batch)).astype(np.int32)
    numbers[1], numbers[2] = ROWS - 1, np.arange(batch) % 3  # all from one device
    group = under.place_group(Group(numbers, 3, batch, 0), placed)
    found = under.stack_at(group, 0, 3).data
    for name, leaf in tree.items():
        assert np.asarray(found[name]).tobytes() == leaf[numbers].tobytes(), name


def test_no_device_gets_the_batch_of_all():
    x, y, _ = classification(ROWS)
    under = mirrored(4)
    numbers = np.zeros((2, BATCH), np.int32)
    group = under.place_group(Group(numbers, 2, BATCH, 0), under.place_arrays(HostArrays((x, y)), forced=True))
    gather = placement._gathering(2, group.data.numbers.sharding)
    found = collectives(gather.lower(group.data, under.place_number(0)).compile().as_text())
    assert {each.kind for each in found} == {"collective-permute"}
    assert {each.shape[0] for each in found} == {BATCH // 4}
    assert {each.times for each in found} == {2 * 4}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: mirrored(4), model_parallel], ids=["mirrored", "model_parallel"])
def test_a_training_has_the_numbers_that_it_has_with_whole_copies(make, monkeypatch):
    x, y, weights = classification(ROWS)

    def trained():
        with make().scope():
            model = trainer.Model(LinenMLP(batch_norm=True, dropout=0.2), seed=1)
            model.compile(trainer.optimizers.SGD(0.1, momentum=0.9), logits_loss(), metrics=["accuracy"])
        model.fit(x, y, batch_size=BATCH, epochs=3, sample_weight=weights, validation_data=(x[:21], y[:21]), verbose=0)
        return model.get_weights(), model.history.history

    exchanges, exchange = [], strategy.exchange_rows
    monkeypatch.setattr(strategy, "exchange_rows", lambda *args, **options: (
        exchanges.append(1), exchange(*args, **options))[1])
    split = trained()
    assert exchanges
    exchanges.clear()
    monkeypatch.setattr(strategy, "memory_bytes", lambda device: 2**30)
    whole = trained()
    assert not exchanges
    for mine, theirs in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)  # other programs may round differently
