"""The first operations that compute with an argument, through moves, calls, loops and branches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from trainer.core.compile.traces.first_uses import first_uses

X = np.ones((4, 3), np.float32)


@jax.custom_jvp
def custom(x):
    return x @ jnp.ones((3, 2))


custom.defjvp(lambda primals, tangents: (custom(*primals), custom(*tangents)))


@pytest.mark.parametrize(("function", "expected"), [
    (lambda x: x.reshape(3, 4)[:, :2] @ jnp.ones(2), {"product"}),
    (lambda x: x.astype(jnp.bfloat16) * 2, {"narrowing"}),
    (lambda x: x.astype(jnp.float16), {"convert_element_type"}),
    (lambda x: x.astype(int), {"convert_element_type"}),
    (lambda x: (x.T, 1), {"result"}),
    (lambda x: x.T + 1 + x @ jnp.ones(3), {"add", "product"}),
    (lambda x: jnp.concatenate([x, jnp.zeros_like(x)]).astype(jnp.bfloat16), {"narrowing"}),
    (lambda x: jnp.where(jnp.arange(4)[:, None] > 1, x, 0.0) @ jnp.ones(3), {"product"}),
    (lambda x: jax.jit(lambda x: jax.checkpoint(jnp.sin)(x.T))(x), {"sin"}),
    (lambda x: jax.jit(lambda x: x.T)(x).astype(jnp.bfloat16), {"narrowing"}),
    (custom, {"product"}),
    (lambda x: lax.scan(lambda carry, row: (carry, row.astype(jnp.bfloat16)), 0, x), {"narrowing"}),
    (lambda x: lax.scan(lambda carry, _: (jnp.cos(carry), None), x, length=2)[0], {"scan"}),
    (lambda x: lax.cond(x.shape[0] > 1, lambda x: x.astype(jnp.bfloat16), lambda x: jnp.zeros(x.shape, jnp.bfloat16),
                        x), {"narrowing"}),
    (lambda x: lax.while_loop(lambda x: x[0, 0] < 1, jnp.cos, x), {"while"}),
    (lambda x: jnp.ones(3), set()),
])
def test_first_uses_of_an_argument(function, expected):
    assert first_uses(function, X, jnp.bfloat16) == expected


def test_integers_that_become_floats_are_followed():
    uses = first_uses(lambda x: (x["ids"].astype(jnp.float32).astype(jnp.float16), jnp.ones(9)[x["rows"]]),
                      {"ids": np.arange(3), "rows": np.arange(3)}, jnp.float16)
    assert uses["ids"] == {"narrowing"} and "narrowing" not in uses["rows"]
