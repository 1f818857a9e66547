"""Which functions may compute a row from other rows, by what their traces do along the axis of the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from trainer.compile.row_mixing import may_mix_rows

X = np.ones((4, 6), np.float32)
TABLE = np.ones((10, 3), np.float32)


def scanned(x):
    return lax.scan(lambda total, row: (total + row, total), jnp.zeros(6), x)[1]


MIXES = {
    "a mean": lambda x: x - x.mean(0),
    "a product of pairs": lambda x: x @ x.T,
    "a contraction": lambda x: x @ (x.T @ x),
    "a sort": lambda x: jnp.sort(x, axis=0),
    "a sum so far": lambda x: jnp.cumsum(x, axis=0),
    "an order": lambda x: x[::-1],
    "a shift": lambda x: jnp.roll(x, 1, axis=0),
    "a shift by a gather": lambda x: x[jnp.arange(len(x)) - 1],
    "a first row": lambda x: x - x[0],
    "a scan with a carry": scanned,
    "groups of rows": lambda x: x.reshape(2, -1, 6) - x.reshape(2, -1, 6).mean(0),
    "a compiled function": jax.jit(lambda x: x - x.mean(0)),
    "a branch": lambda x: lax.cond(x.shape[1] > jnp.pi, lambda x: x.max(0) + x, lambda x: x, x),
}
KEEPS = {
    "features": lambda x: nn.softmax(x - x.mean(-1, keepdims=True)),
    "a sort of features": lambda x: jnp.sort(x, axis=-1),
    "an order of features": lambda x: x[:, ::-1],
    "a table": lambda x: jnp.asarray(TABLE)[x[:, 0].astype(int)],
    "a contraction of features": lambda x: jnp.einsum("nf,ng->nfg", x, x) @ jnp.ones((6, 2)),
    "rows in one axis with others": lambda x: (x.reshape(-1, 3) @ jnp.ones((3, 3))).reshape(len(x), 6),
    "an axis moved": lambda x: jnp.cumsum(x.T, axis=0).T,
    "a scan of features": lambda x: lax.scan(lambda total, f: (total + f, total), jnp.zeros(len(x)), x.T)[1].T,
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "a mapped function": jax.vmap(lambda row: row / row.sum()),
    "a compiled function": jax.jit(jnp.tanh),
}


@pytest.mark.parametrize(("function", "mixes"), [
    *((MIXES[name], True) for name in MIXES), *((KEEPS[name], False) for name in KEEPS)], ids=[*MIXES, *KEEPS])
def test_what_mixes_rows_is_found(function, mixes):
    assert may_mix_rows(function, X) is mixes


def test_what_takes_certain_numbers_of_rows_only_is_suspected():
    def pairs(x):
        assert len(x) % 2 == 0
        return x

    assert may_mix_rows(pairs, X)


def test_other_arguments_have_no_rows():
    assert not may_mix_rows(lambda batch, kernel: batch["x"] @ kernel.sum(0), {"x": X}, np.ones((5, 6, 2), np.float32))
