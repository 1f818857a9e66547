"""Loops over replicas as a careful user of JAX writes them, and the models that they train.

They use `jax.shard_map` and optax, and nothing of the trainer. The trainer's strategies are compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "replica"
CLASSES = 10
# Gradients averaged as a tree, of which XLA makes one collective with an array per leaf; or joined to one vector.
MEANS = ("tree", "flat")


class MLP(nn.Module):
    """Dense layers with ReLU between them."""

    hidden: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


class Blocks(nn.Module):
    """Residual blocks of two dense layers, the hidden one four times as wide: `8 width**2` weights each."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x)


class ReplicatedStep:
    """A train step on all devices, each with a copy of the state and its rows of the batch.

    Args:
      module: a Linen module.
      tx: an optax transformation.
      x: some inputs.
      mean: "tree" or "flat", see `MEANS`.
      donates: whether the step takes the buffers of the old state.
      has_accuracy: whether it computes the accuracy of the batch as well.
    """

    def __init__(self, module, tx, x, *, mean, donates, has_accuracy=False):
        mesh = Mesh(np.asarray(jax.devices()), (AXIS,))
        whole, self._rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))

        def step(params, opt_state, x, y):
            def loss_and_logits(params):
                logits = module.apply(params, x)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

            (loss, logits), grads = jax.value_and_grad(loss_and_logits, has_aux=True)(params)
            logs = (loss, (logits.argmax(-1) == y).mean()) if has_accuracy else (loss,)
            if mean == "flat":
                flat, unravel = ravel_pytree((grads, logs))
                grads, logs = unravel(jax.lax.pmean(flat, AXIS))
            else:
                grads, logs = jax.lax.pmean((grads, logs), AXIS)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, logs

        # check_vma=False, as gradients of replicated parameters otherwise come summed already.
        mapped = jax.shard_map(step, mesh=mesh, out_specs=PartitionSpec(), check_vma=False, in_specs=(
            PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(AXIS)))
        self._step = jax.jit(mapped, donate_argnums=(0, 1) if donates else ())
        params = jax.jit(module.init, out_shardings=whole)(jax.random.key(0), x[:1])
        self._state = params, jax.jit(tx.init, out_shardings=whole)(params)

    def place(self, *arrays):
        """Returns arrays with their rows split over the devices."""
        return jax.device_put(arrays, self._rows)

    def __call__(self, x, y):
        """Trains on a batch; returns its logs."""
        *state, logs = self._step(*self._state, x, y)
        self._state = tuple(state)
        return logs

    def wait(self):
        """Waits for the last step."""
        jax.block_until_ready(self._state)
