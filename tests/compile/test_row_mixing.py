"""Which functions are proved to compute each row from that row alone, by what their traces do along the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from trainer.core.compile.traces.row_mixing import why_rows_mix

X = np.ones((4, 6), np.float32)
TABLE = np.ones((10, 3), np.float32)


def scanned(x):
    return lax.scan(lambda total, row: (total + row, total), jnp.zeros(6), x)[1]


@jax.custom_vjp
def normalized_gradient(x):
    return x


normalized_gradient.defvjp(lambda x: (x, None), lambda _, grads: (grads / jnp.abs(grads).max(),))


clipped = jax.custom_vjp(lambda kernel: kernel)
clipped.defvjp(lambda kernel: (kernel, None), lambda _, grads: (jnp.clip(grads, -0.01, 0.01),))
normalized_tanh = jax.custom_vjp(jnp.tanh)
normalized_tanh.defvjp(lambda x: (jnp.tanh(x), None), lambda _, grads: (grads / jnp.abs(grads).max(),))
centered_tanh = jax.custom_jvp(jnp.tanh)
centered_tanh.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0] - tangents[0].mean(0)))


@jax.custom_gradient
def of_unit_gradient(x):
    return x, lambda grads: (grads / jnp.linalg.norm(grads),)


class SignedGradients(nn.Module):
    @nn.compact
    def __call__(self, x):
        def backward(vjp, grads):
            params, *others = vjp(grads)
            return jax.tree.map(jnp.sign, params), *others

        call = lambda module, x: module(x)
        return nn.custom_vjp(call, lambda module, x: nn.vjp(call, module, x), backward)(nn.Dense(3), x)


def signed_gradients(x):
    module = SignedGradients()
    return module.apply(module.init(jax.random.key(0), X), x)


def printed(x):
    jax.debug.print("{}", x)
    return x


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
    "a place in the batch": lambda x: x * jnp.arange(len(x))[:, None],
    "a number for each row": lambda x: x * np.arange(len(x))[:, None],
    "the number of rows": lambda x: x / len(x),
    "a root of the number of rows": lambda x: x * np.float32(len(x)) ** 0.5,
    "a power by the number of rows": lambda x: x ** min(len(x), 1011),
    "an update of the first row": lambda x: x.at[0].set(0.0),
    "a scatter to other rows": lambda x: jnp.zeros_like(x).at[jnp.arange(len(x)) // 2].add(x),
    "a convolution over rows": lambda x: lax.conv_general_dilated(
        x.T[None], jnp.ones((1, 6, 3)), (1,), "SAME")[0].T * x[:, :1],
    "a window over rows": lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "a transposed reshape": lambda x: x.T.reshape(len(x), 6),
    "noise of another generator": lambda x: x + jax.random.normal(jax.random.key(0, impl="rbg"), x.shape),
    "noise for rows that are not the first axis": lambda x: x + jax.random.normal(jax.random.key(0), x.T.shape).T,
    "noise by a key for each row": jax.vmap(lambda row: row + jax.random.normal(
        jax.random.fold_in(jax.random.key(0), row[0].astype(int)), row.shape)),
    "an order drawn at random": lambda x: jax.random.permutation(jax.random.key(0), x),
    "a mean of noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape).mean(0),
    "numbers of 64 bits": lambda x: x + jax.random.bits(jax.random.key(0), x.shape, "uint64"),
    "a derivative of the user's own": lambda x: normalized_gradient(x),
    "a derivative of the user's own, of a function of JAX": centered_tanh,
    "a backward pass without rows": lambda x: x @ clipped(jnp.ones((6, 2))),
    "a backward pass of a function of JAX": lambda x: normalized_tanh(x),
    "a gradient of the user's own": of_unit_gradient,
    "a backward pass of Flax's": signed_gradients,
    "a callback": lambda x: jax.pure_callback(lambda x: x, x, x),
    "a print": printed,
    "a loop until rows agree": lambda x: lax.while_loop(lambda x: (x > 1).any(), lambda x: x / 2, x),
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
    "a mapped function": jax.vmap(lambda row: row / row.sum()),
    "a compiled function": jax.jit(jnp.tanh),
    "functions with derivatives of JAX's own": lambda x: (
        nn.relu(x) + nn.silu(x) + jax.nn.logsumexp(x, 1, keepdims=True)),
    "a checkpoint": jax.checkpoint(lambda x: jnp.sin(x) @ jnp.ones((6, 6))),
    "an entry of each row": lambda x: jnp.take_along_axis(x, x[:, :1].astype(int), 1),
    "an update of a feature": lambda x: x.at[:, 0].set(0.0),
    "a convolution of images": lambda x: nn.Conv(2, (3, 3)).apply(
        {"params": {"kernel": jnp.ones((3, 3, 1, 2)), "bias": jnp.zeros(2)}}, x.reshape(-1, 2, 3, 1)).reshape(-1, 12),
    "a pool of images": lambda x: nn.max_pool(x.reshape(-1, 2, 3, 1), (2, 2), padding="SAME").reshape(len(x), -1),
    "attention within a row": lambda x: nn.dot_product_attention(*[x.reshape(-1, 3, 1, 2)] * 3).reshape(len(x), 6),
    "class indices": lambda x: jax.nn.one_hot(x[:, 0].astype(int), 5),
    "a position within the row": lambda x: x + jnp.arange(6),
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "noise for parameters": lambda x: x * jax.random.normal(jax.random.key(0), (6,)),
    "noise for rows in one axis with others": lambda x: x + jax.random.normal(
        jax.random.PRNGKey(0), (len(x) * 3, 2)).reshape(x.shape),
    "a state that counts calls": lambda x: (x, jnp.ones(()) + 1),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_may_mix_rows_is_found(name):
    assert why_rows_mix(MIXES[name], X) is not None


@pytest.mark.parametrize("name", KEEPS)
def test_rows_are_proved_to_be_apart(name):
    assert why_rows_mix(KEEPS[name], X) is None


@pytest.mark.parametrize(("name", "reason"), [
    ("a mean", "rows are combined (`reduce_sum`)"), ("noise of another generator", "numbers are drawn at random"),
    ("the number of rows", "it computes with the number of rows"), ("a number for each row", "there is a constant"),
    ("a derivative of the user's own", "a backward pass may be no sum"), ("a print", "there is a side effect"),
    ("a scan with a carry", "there is a loop over the rows")])
def test_the_reason_names_what_was_found(name, reason):
    assert reason in why_rows_mix(MIXES[name], X)


@pytest.mark.parametrize(("function", "traces"), [(lambda x: x - x.mean(0), 1), (jnp.tanh, 2)], ids=["mixes", "keeps"])
def test_rows_that_were_seen_to_mix_are_not_traced_again(function, traces):
    seen = []

    def traced(x):
        seen.append(len(x))
        return function(x)

    why_rows_mix(traced, X)
    assert len(set(seen)) == len(seen) == traces


@pytest.mark.parametrize("rows", [1, 2, 24])
@pytest.mark.parametrize("choose", [
    lambda x, few: x * 2 if few else x * 3,
    lambda x, few: (jnp.sin(x), jnp.cos(x))[few],
    lambda x, few: (lambda pair: jnp.tanh(pair[few]))((jnp.sin(x), jnp.cos(x))),
    lambda x, few: x * jnp.full((len(x), 1), 0.25 if few else 1.0),
    lambda x, few: x.astype(jnp.bfloat16 if few else jnp.float16),
    lambda x, few: (x, x if few else jnp.zeros(())),
    lambda x, few: (x, jnp.asarray(1.0 if few else 2.0)),
    lambda x, few: (jnp.cumsum if few else jnp.cumprod)(x, 1),
    lambda x, few: jnp.cumsum(x, 1, dtype="float32" if few else "bfloat16"),
    lambda x, few: x[:, 0] if few else x[:, :1],
], ids=["a literal", "a result", "an operand", "a broadcast literal", "a dtype", "a state", "a constant state",
        "an operation", "a dtype of sums", "a shape"])
def test_what_depends_on_the_number_of_rows_is_found(choose, rows):
    assert why_rows_mix(lambda x: choose(x, len(x) == rows), X, rows=(rows,)) == "it computes with the number of rows"
    assert why_rows_mix(lambda x: choose(x, len(x) == rows), X, rows=(rows + 1, 3)) is None


@pytest.mark.parametrize("function", [
    lambda x: nn.Dense(1).apply({"params": {"kernel": jnp.ones((6, 1)), "bias": jnp.zeros(1)}}, x)[:, 0],
    lambda x: x[:, None] * jnp.ones((3, 6)) + x.mean(1)[:, None, None],
    lambda x: jnp.squeeze(x[:, :1], 1), lambda x: jnp.reshape(x, (len(x), 2, 3)).transpose(0, 2, 1),
    lambda x: jnp.where(x > 0, x, jnp.broadcast_to(jnp.arange(6.0), x.shape))])
def test_one_row_is_computed_as_several_are(function):
    assert why_rows_mix(function, X, rows=(1, 8)) is None


def test_an_axis_of_rows_that_is_removed_where_it_is_one_is_found():
    assert why_rows_mix(lambda x: x[:, :1].squeeze(), X, rows=(8, 2)) is None
    assert why_rows_mix(lambda x: x[:, :1].squeeze(), X, rows=(8, 1)) == "it computes with the number of rows"


def test_what_takes_certain_numbers_of_rows_only_is_not_proved():
    def pairs(x):
        assert len(x) % 2 == 0
        return x

    assert "cannot be traced on any number of rows (AssertionError)" in why_rows_mix(pairs, X)
