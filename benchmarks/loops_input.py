"""Pipelines, and loops over them."""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from cases import Workload
from loops_hand import new_step, orders, train
from loops_trainer import new_model

GROUP = 128  # steps that run at once beside a pipeline, as those of `fit` do
WAIT_SECS = 0.002

Pipeline = Callable[[int], Iterable]  # makes a pipeline of so many epochs


def _waiting(workload: Workload, x, y) -> Pipeline:
    batch = x[:workload.batch_size], y[:workload.batch_size]

    def batches(epochs: int) -> Iterator:
        for _ in range(epochs * workload.steps):
            time.sleep(WAIT_SECS)
            yield batch

    return batches


def _indexing(workload: Workload, x, y) -> Pipeline:
    return lambda epochs: ((x[rows], y[rows]) for order in orders(workload, epochs) for rows in order)


def _grain(workload: Workload, x, y) -> Pipeline:
    return lambda epochs: _batched(_shuffled(workload, epochs).map(lambda row: (x[row], y[row])), workload)


def _decoding(workload: Workload, x, y) -> Pipeline:
    from PIL import Image

    def encoded(values: np.ndarray) -> bytes:
        pixels, file = (values.reshape(28, 28) * 64 + 128).clip(0, 255), io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "png")
        return file.getvalue()

    files = [encoded(values) for values in x]

    def augmented(row: int, rng: np.random.Generator):
        pixels = np.asarray(Image.open(io.BytesIO(files[row])), np.float32)
        shifted = np.roll(pixels, rng.integers(-2, 3, 2).tolist(), (0, 1))
        mirrored = shifted[:, ::-1] if rng.random() < 0.5 else shifted
        return (mirrored.reshape(784) - 128) / 64, y[row]

    return lambda epochs: _batched(_shuffled(workload, epochs).seed(1).random_map(augmented), workload)


def _shuffled(workload: Workload, epochs: int):
    import grain

    return grain.MapDataset.range(workload.rows).shuffle(seed=0).repeat(epochs)


def _batched(rows, workload: Workload) -> Iterable:
    import grain

    # In the caller's thread: work that Grain's own threads would do ahead counts for none of the contestants.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return rows.batch(workload.batch_size).to_iter_dataset(options)


_SOURCES: dict[str, Callable[..., Pipeline]] = {
    "waiting": _waiting, "indexing": _indexing, "grain": _grain, "decoding": _decoding}


def _pipeline(workload: Workload, source: str) -> Pipeline:
    return _SOURCES[source](workload, *workload.data())


def drain(workload: Workload, source: str) -> Callable[[int], int]:
    """Reads the pipeline."""
    pipeline = _pipeline(workload, source)
    return lambda epochs: sum(1 for _ in pipeline(epochs))


def drain_beside(workload: Workload, source: str) -> Callable[[int], int]:
    """Reads the pipeline in a thread and copies each batch, whose memory the pipeline may use again, beside the steps.

    These are as many, but for less than a group, on batches that are on the device. No loop can do less.
    """
    rows = workload.data()
    pipeline = _SOURCES[source](workload, *rows)
    kept = [np.empty((GROUP, workload.batch_size, *array.shape[1:]), array.dtype) for array in rows]
    step, state = new_step(workload, rows[0])
    steps = jax.jit(lambda state, batches: jax.lax.scan(
        lambda state, batch: (step(state, *batch)[0], None), state, batches)[0], donate_argnums=0)
    batches = jax.device_put([array[:GROUP * workload.batch_size].reshape(memory.shape)
                              for array, memory in zip(rows, kept, strict=True)])
    carry = [steps(state, batches)]

    def run(epochs):
        groups = queue.SimpleQueue()

        def copy():
            for number, batch in enumerate(pipeline(epochs), 1):
                for memory, leaf in zip(kept, batch, strict=True):
                    memory[number % GROUP] = leaf
                if number % GROUP == 0:
                    groups.put("read")
            groups.put("end")

        threading.Thread(target=copy).start()
        while groups.get() == "read":
            carry[0] = jax.block_until_ready(steps(carry[0], batches))
        return epochs * workload.steps

    return run


def fit(workload: Workload, source: str) -> Callable[[int], int]:
    """Calls `fit` once over the pipeline."""
    pipeline, model = _pipeline(workload, source), new_model(workload)

    def run(epochs):
        model.fit(pipeline(epochs), verbose=0)
        return epochs * workload.steps

    return run


def by_hand(workload: Workload, source: str) -> Callable[[int], int]:
    """Calls the jitted step with each batch of the pipeline."""
    pipeline = _pipeline(workload, source)
    step, state = new_step(workload, workload.data()[0])
    jitted, carry = jax.jit(step, donate_argnums=0), [state]

    def run(epochs):
        carry[0], count = train(jitted, carry[0], pipeline(epochs))
        return count

    return run


def step(workload: Workload, source: str) -> Callable[[int], int]:
    """Calls the jitted step with the same batch, on the device, again and again."""
    x, y = (array[:workload.batch_size] for array in workload.data())
    step, state = new_step(workload, np.asarray(x))
    jitted, carry, batch = jax.jit(step, donate_argnums=0), [state], jax.device_put((x, y))

    def run(epochs):
        carry[0], count = train(jitted, carry[0], (batch for _ in range(epochs * workload.steps)))
        return count

    return run
