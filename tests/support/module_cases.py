"""Small modules and helpers that the tests of the functional interface share."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from trainer.core.rng import stream_key

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def key_maker(seed=0, step=0, replica=0, seen=None):
    def make_key(stream):
        if seen is not None:
            seen.append(stream)
        return stream_key(seed, stream, step, replica)
    return make_key


def no_keys(stream):
    raise AssertionError(f"no key of {stream!r} is needed")


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm()(nn.Dense(4)(x))
        return nn.Dense(2)(nn.Dropout(0.5)(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.dense(x))))


NETS = pytest.mark.parametrize("make", [LinenNet, lambda: NNXNet(nnx.Rngs(0)),
                                        lambda: [nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5), nn.relu, nn.Dense(2)]],
                               ids=["linen", "nnx", "stack"])


def plain_dicts_of_arrays(tree):
    if isinstance(tree, dict):
        return all(isinstance(key, str) and plain_dicts_of_arrays(value) for key, value in tree.items())
    return isinstance(tree, jax.Array)


def close(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first, second)
