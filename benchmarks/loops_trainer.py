"""The trainer itself, with its default settings unless said otherwise."""

from __future__ import annotations

import inspect
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence

from cases import Unavailable, Workload

import models
import trainer
from trainer import distribute


class EveryBatch(trainer.callbacks.Callback):
    """Listens to each batch and does nothing with it."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def _bar() -> trainer.callbacks.Callback:
    from rich.console import Console

    os.environ.pop("CI", None)  # where it is set the bar prints lines
    return trainer.callbacks.ProgbarLogger(Console(
        file=open(os.devnull, "w"), force_terminal=True, force_interactive=True, width=100))


def _tensorboard() -> trainer.callbacks.Callback:
    if not hasattr(trainer.callbacks, "TensorBoard"):
        raise Unavailable("there is no `callbacks.TensorBoard`")
    return trainer.callbacks.TensorBoard(tempfile.mkdtemp())


_CALLBACKS: dict[str, Callable[[], trainer.callbacks.Callback]] = {
    "bar": _bar, "batch": EveryBatch, "tensorboard": _tensorboard,
    "csv": lambda: trainer.callbacks.CSVLogger(str(pathlib.Path(tempfile.mkdtemp(), "log.csv")))}


def new_model(workload: Workload, module: str = "linen", mirrored: bool = False, **options) -> trainer.Model:
    """Returns a compiled model; `options` are those of `compile`."""
    if missing := set(options) - set(inspect.signature(trainer.Model.compile).parameters):
        raise Unavailable(f"`compile` has no {', '.join(sorted(missing))}")
    strategy = distribute.MirroredStrategy() if mirrored or workload.replicas > 1 else distribute.get_strategy()
    with strategy.scope():
        model = trainer.Model(models.new_nnx(workload) if module == "nnx" else models.linen(workload))
        model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                      **options)
    return model


def fit(
    workload: Workload, callbacks: Sequence[str] = (), new_arrays: bool = False, **options
) -> Callable[[int], int]:
    """Calls `fit` once for all epochs; with `new_arrays` it has to place them on the device again each time."""
    x, y = workload.data()
    model = new_model(workload, **options)
    made = [_CALLBACKS[name]() for name in callbacks]

    def run(epochs):
        if new_arrays:
            x[0] += 1
        model.fit(x, y, batch_size=workload.batch_size, epochs=epochs, callbacks=made, verbose=int("bar" in callbacks))
        return epochs * workload.steps

    return run


def evaluate(workload: Workload) -> Callable[[int], int]:
    """Calls `evaluate` for each epoch."""
    return _each_epoch(workload, lambda model, x, y: model.evaluate(x, y, batch_size=workload.batch_size, verbose=0))


def predict(workload: Workload) -> Callable[[int], int]:
    """Calls `predict` for each epoch."""
    return _each_epoch(workload, lambda model, x, y: model.predict(x, batch_size=workload.batch_size, verbose=0))


def _each_epoch(workload: Workload, call: Callable) -> Callable[[int], int]:
    x, y = workload.data()
    model = new_model(workload)

    def run(epochs):
        for _ in range(epochs):
            call(model, x, y)
        return epochs * workload.steps

    return run
