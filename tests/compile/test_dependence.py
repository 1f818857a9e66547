"""Which results of a function depend on the values of an argument."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trainer.compile.dependence import dependent_results


def test_values_count_and_shapes_do_not():
    def function(batch, steps):
        x = batch["x"]
        return {
            "steps": steps + 1, "rows": steps + len(x), "passed on": jax.jit(lambda x, n: (n + 1, x))(x, steps)[0],
            "sum": x.sum(), "inside": jax.jit(lambda x, n: (n + x.sum(), x))(x, steps)[0], "itself": x,
            "remat": jax.checkpoint(lambda x: x.max())(x), "constant": jnp.zeros(3),
            "branch": lax.cond(x[0, 0] > 0, lambda: 1, lambda: 2),
            "loop": lax.fori_loop(0, 3, lambda _, total: total + x.sum(), 0.0),
        }

    found = dependent_results(function, {"x": np.ones((4, 2), np.float32)}, 0)
    assert found == {"sum", "inside", "itself", "remat", "branch", "loop"}
