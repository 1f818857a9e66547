"""Random numbers of the rows of a replicated step: those of one device, to the bit."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer import distribute

ROWS, WIDTH = 64, 12
X, Y = np.eye(ROWS, dtype=np.float32), np.ones((ROWS, WIDTH), np.float32)


class Drops(nn.Module):
    """Drops of rows that are their own numbers: the weights that an update has moved are the mask."""

    broadcast_dims: tuple = ()
    all_but: int = 0  # rows

    @nn.compact
    def __call__(self, x, training=False):
        x = nn.Dense(WIDTH, use_bias=False, kernel_init=nn.initializers.zeros)(x)
        return nn.Dropout(0.5, self.broadcast_dims, deterministic=not training or len(x) == self.all_but)(x)


class Draws(nn.Module):
    """Adds noise of the outputs' shape and some of a weight's, which may be equal shapes, by a raw key in a scan."""

    raw: bool = True

    @nn.compact
    def __call__(self, x, training=False):
        x = nn.Dense(WIDTH, use_bias=False, kernel_init=nn.initializers.zeros)(x)
        key = self.make_rng("dropout")
        if self.raw:
            key = jax.random.PRNGKey(jax.random.bits(key, dtype=jnp.uint16).astype(int))

        def turn(x, number):
            one, other = jax.random.split(jax.random.fold_in(key, number))
            mask = jax.random.bernoulli(one, 0.7, x.shape)
            weight = jax.random.uniform(other, (ROWS // 8, WIDTH)).mean(0)
            return jnp.where(mask, x * weight, 0.0), None

        return jax.lax.scan(turn, x, jnp.arange(2))[0]


class NnxDrops(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(ROWS, WIDTH, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))

    def __call__(self, x):
        return self.drop(self.dense(x))


def trained(count, module, strategy=distribute.MirroredStrategy, batch_size=16, **options):
    """Returns the weights after an epoch, and what was logged of the lowering."""
    with strategy([f"cpu:{number}" for number in range(count)]).scope():
        model = trainer.Model(module())
        model.compile(options.pop("optimizer", None) or optax.sgd(1.0), "mse", **options)
    model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0)
    return np.asarray(jax.tree.leaves(model.state.params)[0])


CASES = {
    "dropout": (Drops, {}),
    "dropout with NNX": (NnxDrops, {}),
    "one mask for all rows": (functools.partial(Drops, (0,)), {}),
    "a raw key in a scan": (Draws, {}),
    "a typed key in a scan": (functools.partial(Draws, False), {}),
    "one step at a time": (Drops, {"steps_per_execution": 1}),
    "a row for each replica": (Drops, {"batch_size": 8}),
    "microbatches": (Drops, {"microbatches": 2}),
    "recomputed": (Draws, {"remat": True}),
    "fully sharded": (Drops, {"strategy": functools.partial(
        distribute.FullyShardedStrategy, min_shard_bytes=0)}),
    "an optimizer that draws too": (Drops, {"optimizer": optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1.0))}),
}


@pytest.mark.parametrize("count", [8, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(10)
def test_replicas_draw_the_numbers_of_one_device(case, count, caplog):
    module, options = CASES[case]
    one = trained(1, module, **options)
    with caplog.at_level(logging.INFO, "trainer"):
        found = trained(count, module, **options)
    assert "The train step is replicated." in caplog.messages
    np.testing.assert_array_equal(found == 0, one == 0)
    np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-7)
    assert 0.2 < (one != 0).mean() < 1.0 or "optimizer" in case


@pytest.mark.slow
def test_what_is_drawn_for_some_numbers_of_rows_only_is_partitioned(caplog):
    one = trained(1, functools.partial(Drops, all_but=4))
    with caplog.at_level(logging.INFO, "trainer"):
        found = trained(8, functools.partial(Drops, all_but=4))
    assert "The train step is partitioned: what is drawn at random depends on the number of rows." in caplog.messages
    np.testing.assert_array_equal(found == 0, one == 0)
    assert (one == 0).any()
