"""Loops as a careful user of JAX writes them: jitted, donating, never waiting for a step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import Workload
from hand_written import MEANS, ReplicatedStep

import models

IN_FLIGHT = 2  # steps, where they must be few


def loss_and_accuracy(logits, y):
    """Returns the mean loss and the accuracy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), (logits.argmax(-1) == y).mean()


def train_step(module, tx: optax.GradientTransformation, has_accuracy: bool = True) -> Callable:
    """Returns a train step of `(params, model_state, opt_state), x, y`; its logs are the loss, and the accuracy."""

    def step(state, x, y):
        params, model_state, opt_state = state

        def loss_fn(params):
            logits, updated = module.apply({"params": params, **model_state}, x, training=True,
                                           mutable=list(model_state))
            loss, accuracy = loss_and_accuracy(logits.astype(jnp.float32), y)
            return loss, ((accuracy,) if has_accuracy else (), updated)

        (loss, (logs, model_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), model_state, opt_state), (loss, *logs)

    return step


def initial_state(module, tx: optax.GradientTransformation, x, **options) -> tuple:
    """Returns the state that `train_step` starts with; `options` are those of `jax.jit`."""

    def init(x):
        model_state = dict(module.init(jax.random.key(0), x))
        params = model_state.pop("params")
        return params, model_state, tx.init(params)

    return jax.jit(init, **options)(x[:1])


def new_step(workload: Workload, x) -> tuple[Callable, tuple]:
    """Returns a train step, and the state to start with."""
    module, tx = models.linen(workload), optax.adam(1e-3)
    return train_step(module, tx), initial_state(module, tx, x)


def orders(workload: Workload, epochs: int):
    """Yields the rows of the batches of each epoch."""
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        yield rng.permutation(workload.rows).reshape(workload.steps, workload.batch_size)


def train(jitted: Callable, state, batches, place=lambda *batch: batch) -> tuple[tuple, int]:
    """Trains over batches; returns the state and the number of steps, once the logs are there."""
    logs = []
    for x, y in batches:
        state, log = jitted(state, *place(x, y))
        logs.append(log)
    np.mean(jax.device_get(logs), axis=0)
    return state, len(logs)


def fit(workload: Workload) -> Callable[[int], int]:
    """Gathers each batch with numpy, and calls the jitted step with it."""
    x, y = workload.data()
    step, state = new_step(workload, x)
    jitted, carry = jax.jit(step, donate_argnums=0), [state]

    def run(epochs):
        steps = 0
        for order in orders(workload, epochs):
            carry[0], count = train(jitted, carry[0], ((x[rows], y[rows]) for rows in order))
            steps += count
        return steps

    return run


def one_call(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Uploads the data, and calls one function for each epoch: about the least time that there can be."""
    x, y = workload.data()
    step, state = new_step(workload, x)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="unroll")
    def epoch(state, x, y, order, unroll):
        def body(carry, rows):
            state, sums = carry
            # Without the barrier the gathering becomes part of each product with the batch, and is done twice.
            batch = jax.lax.optimization_barrier((x[rows], y[rows]))
            state, logs = step(state, *batch)
            return (state, jax.tree.map(jnp.add, sums, logs)), None

        return jax.lax.scan(body, (state, (jnp.zeros(()), jnp.zeros(()))), order, unroll=unroll)[0]

    def candidate(unroll):
        carry = [jax.tree.map(jnp.copy, state)]

        def run(epochs):
            data = jax.device_put((x, y))
            for order in orders(workload, epochs):
                carry[0], sums = epoch(carry[0], *data, order, unroll)
            jax.device_get(sums)
            return epochs * workload.steps

        return run

    return {f"unroll={unroll}": candidate(unroll) for unroll in (1, 4)}


def replicated(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Splits each batch over all devices, and averages the gradients in either of two ways."""
    x, y = workload.data()
    assert jax.device_count() == workload.replicas, jax.devices()

    def averaging(mean):
        step = ReplicatedStep(models.linen(workload), optax.adam(1e-3), x, mean=mean, donates=True, has_accuracy=True)

        def run(epochs):
            for order in orders(workload, epochs):
                logs = []
                for rows in order:
                    logs.append(step(*step.place(x[rows], y[rows])))
                    if is_simulated and len(logs) > IN_FLIGHT:
                        jax.block_until_ready(logs[-1 - IN_FLIGHT])
                np.mean(jax.device_get(logs), axis=0)
            return epochs * workload.steps

        return run

    # Simulated devices have a thread each: the collectives of many queued steps then wait for each other for ever.
    is_simulated = jax.default_backend() == "cpu"
    return {mean: averaging(mean) for mean in MEANS}


def _in_order(workload: Workload, function: Callable, collect: Callable) -> Callable[[int], int]:
    """Calls a jitted function with the batches in order, and collects its results."""
    x, y = workload.data()
    _, (params, model_state, _) = new_step(workload, x)
    jitted = jax.jit(functools.partial(function, models.linen(workload)))

    def run(epochs):
        for _ in range(epochs):
            starts = range(0, workload.rows, workload.batch_size)
            collect(jax.device_get([jitted({"params": params, **model_state}, x[start:start + workload.batch_size],
                                           y[start:start + workload.batch_size]) for start in starts]))
        return epochs * workload.steps

    return run


def evaluate(workload: Workload) -> Callable[[int], int]:
    """Averages loss and accuracy over the batches at the end."""
    return _in_order(workload, lambda module, variables, x, y: loss_and_accuracy(module.apply(variables, x), y),
                     lambda logs: np.mean(logs, axis=0))


def predict(workload: Workload) -> Callable[[int], int]:
    """Fetches and joins the outputs at the end."""
    return _in_order(workload, lambda module, variables, x, y: module.apply(variables, x), np.concatenate)
