"""The hand-written loop and `fit`, for large models on all devices of the process. The data stay on the devices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import Unavailable
from gpu.workloads import Workload
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loops_hand import IN_FLIGHT, initial_state, train_step

import trainer
from trainer import distribute
from trainer.models import TransformerLM

Run = Callable[[int], dict[str, float]]


def placed_batches(workload: Workload) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the batches of an epoch, their rows split over all devices."""
    (x, y), size = workload.data(), workload.batch_size()
    rows = NamedSharding(Mesh(np.asarray(jax.devices()), ("replica",)), PartitionSpec("replica"))
    return [jax.device_put((x[start:start + size], y[start:start + size]), rows)
            for start in range(0, len(x), size)]


def round_of(workload: Workload, epochs: int) -> dict[str, float]:
    """Returns the steps and rows of a round, and the most memory that a GPU has had in use so far."""
    steps = epochs * workload.steps
    figures = {"steps": steps, "rows": steps * workload.batch_size()}
    if stats := jax.local_devices()[0].memory_stats():
        figures["peak_megabytes"] = stats["peak_bytes_in_use"] / 1e6
    return figures


def use_attention(implementation: str | None) -> None:
    """Makes all modules of this process use this implementation of JAX's attention; None leaves the choice to JAX.

    They attend in bfloat16, in their initialization too, which is in float32: cuDNN has nothing for that.
    """
    if implementation is None:
        return
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Unavailable("cuDNN's attention is for GPUs")
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)

    def in_bfloat16(query, key, value, **options):
        arrays = (array.astype(jnp.bfloat16) for array in (query, key, value))
        return attend(*arrays, **options).astype(query.dtype)

    jax.nn.dot_product_attention = in_bfloat16


def by_hand(workload: Workload, attention: str | None = None, loss_chunks: int = 1) -> Run:
    """Calls a jitted step that donates its state; over several devices XLA adds the collectives.

    Args:
      workload: the model and its data.
      attention: see `use_attention`.
      loss_chunks: in how many parts the loss of a language model is computed, each of which forgets its logits.
    """
    use_attention(attention)
    module, tx = workload.module(jnp.bfloat16), workload.optimizer()
    batches = placed_batches(workload)
    whole = NamedSharding(batches[0][0].sharding.mesh, PartitionSpec())
    carry = [initial_state(module, tx, np.asarray(batches[0][0][:1]), out_shardings=whole)]
    step = jax.jit(train_step(module, tx, workload.has_accuracy) if loss_chunks == 1
                   else _chunked_step(module, tx, loss_chunks), donate_argnums=0)
    # Simulated devices have a thread each: the collectives of many queued steps then wait for each other for ever.
    is_simulated = jax.default_backend() == "cpu" and jax.device_count() > 1

    def run(epochs):
        for _ in range(epochs):
            logs = []
            for x, y in batches:
                carry[0], log = step(carry[0], x, y)
                logs.append(log)
                if is_simulated and len(logs) > IN_FLIGHT:
                    jax.block_until_ready(logs[-1 - IN_FLIGHT])
            np.mean(jax.device_get(logs), axis=0)
        return round_of(workload, epochs)

    return run


def _chunked_step(module: TransformerLM, tx: optax.GradientTransformation, chunks: int) -> Callable:
    """Returns a `train_step` for a language model, with logits of a part of the rows at a time."""

    def hidden(module, tokens):
        x = module._embedded(tokens, 0, training=True)
        for block in module.blocks:
            x, _ = block(x, training=True)
        return x

    def step(state, x, y):
        params, model_state, opt_state = state

        def loss_fn(params):
            @jax.checkpoint
            def loss_of(part):
                logits = module.apply({"params": params}, part[0], method="_logits")
                return optax.softmax_cross_entropy_with_integer_labels(logits, part[1]).mean()

            features = module.apply({"params": params}, x, method=hidden)
            parts = jax.tree.map(lambda leaf: leaf.reshape(chunks, -1, *leaf.shape[1:]), (features, y))
            return jax.lax.map(loss_of, parts).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), model_state, opt_state), (loss,)

    return step


def new_model(workload: Workload, **options) -> trainer.Model:
    """Returns a compiled model over all devices; `options` are those of `compile`."""
    strategy = distribute.MirroredStrategy() if jax.device_count() > 1 else distribute.get_strategy()
    with strategy.scope():
        model = trainer.Model(workload.module())
        model.compile(workload.optimizer(), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"] if workload.has_accuracy else None,
                      **({"precision": "mixed_bfloat16"} | options))
    return model


def fit(workload: Workload, attention: str | None = None, **options) -> Run:
    """Calls `fit` once for all epochs, with a `Dataset`, which is placed on the devices the first time.

    `attention` is for `use_attention`, and `options` are those of `compile`.
    """
    use_attention(attention)
    dataset = trainer.data.Dataset.from_arrays(workload.data()).shuffle(seed=0).batch(workload.batch_size())
    model = new_model(workload, **options)

    def run(epochs):
        model.fit(dataset, epochs=epochs, verbose=0)
        return round_of(workload, epochs)

    return run
