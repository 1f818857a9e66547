"""Searches for a learning rate and for a batch size, which leave the model unchanged.

Owns the choice of trials and their evaluation. A model is used as by a user: it trains by `fit`, and its state is
restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from trainer.callbacks import Callback
from trainer.callbacks.base.callback import Logs
from trainer.core import arguments, errors
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.calls.tracebacks import is_out_of_memory
from trainer.core.train_state import TrainState
from trainer.core.types import ArrayTree, Data
from trainer.core.units import readable_bytes
from trainer.data.adapt import DEFAULT_BATCH_SIZE
from trainer.data.sources.arrays import are_rows, is_leaf
from trainer.distribute.placement.devices import memory_bytes as memory_of
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.inputs import number_of_rows
from trainer.engine.model.model import Model
from trainer.tools.plan.planned_phase import train_phase

_PLOT = "pip install 'trainer-jax[plot]'"
_WINDOWS = 20  # a window of averages has twice this fraction of the steps, plus 1
_MIN_STEPS = 3


# --- the learning rate -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LearningRateSearch:
    """The losses at growing learning rates; `find_learning_rate` returns it.

    Attributes:
      learning_rates: the rate of each step, shape `(steps,)`.
      losses: the loss of each step's batch, before its update.
      smoothed: exponential moving average of the losses, with bias correction.
      diverged: whether the search ended early, because the loss grew.
    """

    learning_rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    diverged: bool

    @property
    def suggestion(self) -> float:
        """The rate at which the loss falls fastest, per logarithm of the rate.

        The losses are averaged over windows around each step, because `smoothed` lags behind by some steps.

        Raises:
          ValueError: if the loss never fell.
        """
        end = int(np.argmin(self.smoothed)) + 1  # the loss rises after its minimum
        width = max(len(self.losses) // _WINDOWS, 1) * 2 + 1
        averages = _centred_averages(_centred_averages(self.losses[:end], width), width)
        slopes = np.gradient(averages, np.log(self.learning_rates[:end])) if end > 1 else np.zeros(1)
        steepest = int(np.argmin(slopes))
        if end < _MIN_STEPS or not slopes[steepest] < 0:
            first, last = self.learning_rates[[0, -1]]
            raise ValueError(f"The loss did not fall at any learning rate from {first:g} to {last:g}. Search lower "
                             "rates with more steps, and check the loss and the targets.")
        return float(self.learning_rates[steepest])

    def __repr__(self) -> str:
        try:
            found = f"suggestion={self.suggestion:.3g}"
        except ValueError:  # there is no suggestion
            found = "no suggestion, as the loss never fell"
        first, last = self.learning_rates[[0, -1]]
        end = ", where the loss grew" if self.diverged else ""
        return f"LearningRateSearch({found}, {len(self.losses)} rates from {first:.3g} to {last:.3g}{end})"

    def plot(self, ax: Any = None) -> Any:
        """Plots the losses and the suggestion against the rates; returns matplotlib's axes.

        Args:
          ax: the axes to draw on; by default new axes.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(f"`plot` draws with matplotlib, which is not installed: {_PLOT}") from error
            ax = pyplot.figure(layout="constrained").add_subplot()
        ax.plot(self.learning_rates, self.losses, alpha=0.3, label="loss")
        ax.plot(self.learning_rates, self.smoothed, label="smoothed")
        with contextlib.suppress(ValueError):  # there is no suggestion
            ax.axvline(self.suggestion, linestyle="--", color="gray", label=f"suggestion: {self.suggestion:.2g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
        ax.legend()
        return ax


def _centred_averages(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of `width` values around each value, with repeated edge values; `width` is odd."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


@explains_arguments
def find_learning_rate(
    model: Model, x: Data, y: ArrayTree | None = None, *, batch_size: int | None = None,
    sample_weight: ArrayTree | None = None, min_rate: float = 1e-7, max_rate: float = 10.0, steps: int = 100,
    smoothing: float = 0.9, stop_factor: float = 4.0,
) -> LearningRateSearch:
    """Trains for some steps with a learning rate that grows in each step, and returns the losses.

    The model is restored completely: weights, optimizer, step and thus all random streams, and history. An unbuilt
    model is built, as by `fit`. Each batch is read once; data that can be read only once, such as a generator, are
    consumed.

    Args:
      model: a compiled model with a single optimizer. With a schedule, the rate is its initial rate.
      x, y, batch_size, sample_weight: the training data, as in `fit`.
      min_rate, max_rate: the first and the last rate; rates grow by a constant factor.
      steps: number of rates.
      smoothing: the weight of the average in the smoothed loss, in [0, 1).
      stop_factor: the search ends when the smoothed loss exceeds this multiple of its minimum, or the loss is not
        finite.

    Raises:
      RuntimeError: if the model is not compiled.
      ValueError: for numbers out of range, several optimizers, or an optimizer with an unknown rate; or if the loss is
        not finite from the start.
      TypeError: for arguments of a wrong type.

    Example:
      >>> from flax import linen as nn
      >>> model = Model(nn.Dense(1))
      >>> model.compile("sgd", "mse")
      >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
      >>> search = find_learning_rate(model, x, x.sum(1, keepdims=True), batch_size=8)
      >>> 1e-3 < search.suggestion < 1
      True

    Source: Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", https://arxiv.org/abs/1506.01186,
    section 3.3; Smith and Topin, "Super-Convergence", https://arxiv.org/abs/1708.07120.
    """
    _check_model(model, "find_learning_rate")
    arguments.require_positive(min_rate=min_rate, max_rate=max_rate)
    arguments.require({"stop_factor": stop_factor}, "a number above 1", lambda number: number > 1)
    arguments.require_decay_rate(smoothing=smoothing)
    arguments.check_count("steps", steps, _MIN_STEPS)
    if not min_rate < max_rate:
        raise ValueError(f"`min_rate` must be less than `max_rate`. Received: min_rate={min_rate:g}, "
                         f"max_rate={max_rate:g}.")
    if isinstance(model.optimizer, dict):
        raise ValueError("`find_learning_rate` searches one rate, but the model has the optimizers "
                         f"{', '.join(map(repr, model.optimizer))}. Search with a model that is compiled with one.")
    rates = np.geomspace(min_rate, max_rate, steps)
    test = _RangeTest(rates, smoothing, stop_factor)
    if batch_size is None and are_rows(x):
        batch_size = DEFAULT_BATCH_SIZE  # otherwise all rows would form the only batch of an epoch
    with _put_back(model, test), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The training has ended with", RuntimeWarning)  # divergence is expected
        # Epochs of a single batch, so that the log of an epoch is the log of its batch.
        model.fit(x, y, batch_size=batch_size, sample_weight=sample_weight, epochs=steps, steps_per_epoch=1, verbose=0,
                  callbacks=[test])
    losses = np.array(test.losses)
    if len(losses) < _MIN_STEPS and not np.isfinite(losses).all():
        raise ValueError(f"The loss is not finite at the learning rate {rates[len(losses) - 1]:g}. Search from a lower "
                         "`min_rate`, and check the data for numbers that are not finite.")
    if len(losses) < _MIN_STEPS:
        raise ValueError(f"The search ended after {len(losses)} steps, and needs at least {_MIN_STEPS}. Pass data with "
                         "more batches, or a greater `stop_factor`.")
    return LearningRateSearch(rates[:len(losses)], losses, np.array(test.smoothed), test.diverged)


class _RangeTest(Callback):
    """Sets the rate of each epoch, and collects its loss."""

    def __init__(self, rates: np.ndarray, smoothing: float, stop_factor: float):
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.diverged = False
        self.state: TrainState | None = None  # before the first step
        self._rates, self._smoothing, self._stop_factor = rates, smoothing, stop_factor
        self._average = 0.0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.state = _model_of(self).state

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if len(self.losses) < len(self._rates):
            self.model.optimizer.learning_rate = float(self._rates[len(self.losses)])

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            self.diverged = True
            self.model.stop_training = True
            if len(self.losses) < 2:
                self.losses.append(loss)
            return
        self.losses.append(loss)
        self._average = self._smoothing * self._average + (1 - self._smoothing) * loss
        self.smoothed.append(self._average / (1 - self._smoothing ** len(self.losses)))
        least = min(self.smoothed)
        if least > 0 and self.smoothed[-1] > self._stop_factor * least:
            self.diverged = True
            self.model.stop_training = True


# --- the batch size --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchSizeTrial:
    """A trial of a batch size.

    Attributes:
      batch_size: rows over all replicas.
      fits: whether a train step of this size fits.
      peak_bytes: peak memory of a device according to the compiler; None if the step was run.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class BatchSizeSearch:
    """The trials of batch sizes; `find_batch_size` returns it.

    Attributes:
      batch_size: the largest size that fits.
      trials: all trials, in order.
      memory_bytes: the memory of a device for the comparison; None if steps were run.
    """

    batch_size: int
    trials: tuple[BatchSizeTrial, ...]
    memory_bytes: int | None

    def __repr__(self) -> str:
        too_large = min((trial.batch_size for trial in self.trials if not trial.fits), default=None)
        end = "the limit: larger sizes were not tried" if too_large is None else f"{too_large} does not fit"
        return f"BatchSizeSearch(batch_size={self.batch_size}, {end})"


@explains_arguments
def find_batch_size(
    model: Model, x: ArrayTree, y: ArrayTree | None = None, *, sample_weight: ArrayTree | None = None, start: int = 32,
    limit: int = 65536, refine: int = 2, run: bool = False, memory_bytes: int | None = None,
    memory_fraction: float = 0.9,
) -> BatchSizeSearch:
    """Returns the largest batch size whose train step fits into the memory of the devices.

    It compiles the step for doubling sizes, and compares its peak memory, as in `strategy.explain`, with the memory of
    a device; then for sizes between the largest that fits and the smallest that does not. With `run`, it executes a
    step of each size instead, until memory runs out. The model is not changed.

    Args:
      model: a compiled model.
      x, y, sample_weight: some rows of the training data, as arrays for `fit`; a single row is sufficient.
      start: the first size, over all replicas.
      limit: the largest size to try.
      refine: number of sizes to try between the largest power of two times `start` that fits, and the next.
      run: whether to execute steps, if the compiler's numbers are not trusted. On CPUs, a step without enough memory
        can end the process.
      memory_bytes: the memory of a device; by default the memory that JAX may allocate. Not with `run`.
      memory_fraction: the usable fraction of it: fragmentation and other data on a device take some.

    Raises:
      RuntimeError: if the model is not compiled.
      ValueError: if not even `start` fits; for numbers out of range; or if a device does not report its memory, and
        `memory_bytes` is not given.
      TypeError: for data that are not arrays, and arguments of a wrong type.

    Example:
      >>> from flax import linen as nn
      >>> model = Model(nn.Dense(1024))
      >>> model.compile("sgd", "mse")
      >>> row = np.zeros((1, 1024), np.float32)
      >>> find_batch_size(model, row, row, memory_bytes=32 * 2**20, refine=0).batch_size
      1024
    """
    _check_model(model, "find_batch_size")
    for name, count, least in (("start", start, 1), ("limit", limit, 1), ("refine", refine, 0)):
        arguments.check_count(name, count, least)
    arguments.check_count("memory_bytes", memory_bytes, 1, optional=True)
    arguments.require(
        {"memory_fraction": memory_fraction}, "a number above 0 and at most 1", lambda number: 0 < number <= 1)
    if limit < start:
        raise ValueError(f"`limit` must be at least `start`. Received: start={start}, limit={limit}.")
    rows = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    number_of_rows(x)  # rejects data that are not arrays
    if run and memory_bytes is not None:
        raise ValueError("`memory_bytes` is compared with what the compiler says, and `run` executes steps instead. "
                         "Pass one of them.")
    budget = None if run else int(memory_fraction * (memory_bytes or _least_memory(model)))
    trials: list[BatchSizeTrial] = []

    def fits(size: int) -> bool:
        trials.append(_run(model, rows, size) if budget is None else _compiled(model, rows, size, budget))
        return trials[-1].fits

    if not fits(start):
        peak = trials[-1].peak_bytes
        needed = "" if peak is None or budget is None else (
            f" A step of it holds {readable_bytes(peak)}, and {readable_bytes(budget)} may be used.")
        raise ValueError(f"Not even a batch of {start} rows fits.{needed} Pass a smaller `start`, or compile the model "
                         "with `microbatches`, `remat` or `precision`.")
    size = start
    too_large: int | None = None
    while size < limit and too_large is None:
        larger = min(2 * size, limit)
        if fits(larger):
            size = larger
        else:
            too_large = larger
    replicas = model.strategy.num_replicas_in_sync
    for _ in range(refine if too_large is not None else 0):
        assert too_large is not None
        middle = (size + too_large) // 2 // replicas * replicas
        if not size < middle < too_large:
            break
        if fits(middle):
            size = middle
        else:
            too_large = middle
    return BatchSizeSearch(size, tuple(trials), budget)


def _compiled(model: Model, rows: tuple[Any, ...], size: int, budget: int) -> BatchSizeTrial:
    peak = train_phase(model, model.strategy, _repeated(rows, size)).peak_bytes
    return BatchSizeTrial(size, peak <= budget, peak)


def _run(model: Model, rows: tuple[Any, ...], size: int) -> BatchSizeTrial:
    keeper, arrays = _Keeper(), dict(zip(("x", "y", "sample_weight"), _repeated(rows, size), strict=False))
    try:
        with _put_back(model, keeper):
            model.fit(**arrays, batch_size=size, epochs=1, verbose=0, callbacks=[keeper])
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return BatchSizeTrial(size, False)
    return BatchSizeTrial(size, True)


def _repeated(rows: tuple[Any, ...], size: int) -> Any:
    """Returns `size` copies of the first row, which take no memory."""
    def repeated(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.ndim == 0 or len(array) == 0:
            raise ValueError(f"`x` and `y` must have rows. Received: {errors.describe(array)}.")
        return np.broadcast_to(array[:1], (size, *array.shape[1:]))

    return jax.tree.map(repeated, rows, is_leaf=is_leaf)


def _least_memory(model: Model) -> int:
    least = min(memory_of(device) for device in model.strategy.mesh.local_devices)
    if least <= 0:
        raise ValueError("The devices do not say how much memory they have. Pass `memory_bytes`, for one device, "
                         "or `run=True`.")
    return least


# --- a model as it was -----------------------------------------------------------------------------------------------


class _Keeper(Callback):
    """Keeps the initial state of a `fit`."""

    state: TrainState | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.state = _model_of(self).state


@contextlib.contextmanager
def _put_back(model: Model, keeper: _Keeper | _RangeTest) -> Iterator[None]:
    """Restores the changes that a `fit` in the block, with the callback `keeper`, makes to a model."""
    stops = model.stop_training, model.stop_evaluating, model.stop_predicting
    history = model.history
    rate = None if model.built else model.optimizer.learning_rate
    try:
        yield
    finally:
        if keeper.state is not None:
            model.state = keeper.state
            core_of(model).state.end_fit()  # also restores the weights of a user's NNX object
        elif rate is not None and not model.built:
            model.optimizer.learning_rate = rate
        model.stop_training, model.stop_evaluating, model.stop_predicting = stops
        model.history = history


def _model_of(callback: Callback) -> Any:
    return callback.model  # callbacks know it only as a `Run`


def _check_model(model: object, function: str) -> None:
    if not isinstance(model, Model):
        raise errors.wrong_type("model", model, "a `trainer.Model`")
    core_of(model).checked(function)
