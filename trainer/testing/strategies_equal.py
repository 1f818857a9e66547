"""The comparison of strategies: whether a model trains to the same numbers under each.

Owns the compared quantities and the messages about differences. It uses a model as its users do, and must not know how
strategies work.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.callbacks import Callback
from trainer.callbacks.base.callback import Logs
from trainer.core import arguments, errors, precision
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.tree_paths import named_leaves
from trainer.core.types import Data
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.arrays import is_array_tree
from trainer.distribute import OneDeviceStrategy, Strategy
from trainer.distribute.cluster import ProcessGroup
from trainer.distribute.placement.placement import to_host
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.model import Model

__all__ = ["assert_strategies_equal"]

Numbers = dict[str, np.ndarray]
"""Numbers of a training by quantity, such as `weight "Dense_0/kernel"`."""


@explains_arguments
def assert_strategies_equal(
    build: Callable[[], Model],
    data: Data,
    strategies: Sequence[Strategy | Callable[[], Strategy]],
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    train: Callable[[Strategy, Model, Any], Mapping[str, Any]] | None = None,
    evaluate: bool | None = None,
    predict: bool | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    reference: Strategy | Callable[[], Strategy] | None = None,
) -> None:
    """Asserts that a model trains to the same numbers under each of several strategies as on a single device.

    The model is trained under the reference and under each strategy, on the same data in the same order. The comparison
    covers its weights before and after, its logs in each epoch and, if it has a loss, the results of `evaluate` and
    `predict` afterwards. Devices with copies of an array must hold the same bits. A loop of `strategy.run` that draws
    random numbers draws others on more replicas: disable such draws.

    Rows that leave an uneven last batch find the most errors, and so does SGD with momentum: Adam's updates do not
    depend on the scale of gradients, so it hides a sum in place of a mean, and it amplifies gradients that are zero
    except for rounding. On a machine without accelerators, start the test process with
    `XLA_FLAGS=--xla_force_host_platform_device_count=8` to have eight devices.

    If several processes train together, all call this function with the same arguments, for example in a function that
    a `LocalCluster` runs. Each compares with a single device of its own.

    Args:
      build: makes and compiles a model. It is called in the scope of each strategy, and must make the same weights each
        time, so it needs fixed seeds.
      data: `(x, y)`, `(x, y, sample_weight)` or `x` alone, of arrays or trees of arrays, rows first. If the inputs are
        a tuple without targets, write `(x,)`.
      strategies: strategies, or functions without arguments that return a strategy, such as the class
        `MirroredStrategy`.
      batch_size: rows per batch; 32 by default.
      epochs: number of epochs to train.
      train: replaces `model.fit`, for custom training loops: a function `(strategy, model, data)` that leaves the
        trained state in the model, for example by `model.state = state`, and returns logs by name, each a number or a
        list with a value per epoch. It receives `data` as given; `batch_size` and `epochs` do not apply.
      evaluate: whether to compare the results of `evaluate`; by default if the model has a loss, or overrides
        `compute_loss`.
      predict: the same for `predict`.
      rtol: relative tolerance. Rounding differs because sums are taken in another order; long runs and 16-bit
        arithmetic need a larger tolerance. By default 1e-4 on CPUs and for models compiled with
        `matmul_precision="highest"`; 5e-3 elsewhere, where float32 products are rounded to TF32 before they are added,
        so that another order of sums can change the tenth bit.
      atol: absolute tolerance, in addition; by default 1e-5 or 1e-3, in the same cases.
      reference: the strategy to compare with; `OneDeviceStrategy()` by default.

    Raises:
      AssertionError: if a number differs by more; the message names the strategies, the quantities (weights by path,
        logs by name and epoch, predictions), and the largest difference of each. Also for weights that are not finite,
        which cannot be compared.
      ValueError: if there is no strategy; if a tolerance is negative; if `build` returns a model of another strategy's
        scope, or a model that it returned before; if `train` changes no weights.
      TypeError: if an argument, or the return value of a function, has a wrong type.
      RuntimeError: if `build` does not compile the model.

    Example:
      >>> import numpy as np, optax
      >>> from flax import linen as nn
      >>> from trainer import Sequential
      >>> from trainer.distribute import FullyShardedStrategy, MirroredStrategy
      >>> from trainer.testing import assert_strategies_equal
      >>> def build():
      ...     model = Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)])
      ...     model.compile(optax.sgd(0.1, momentum=0.9), "mse", metrics=["mae"])
      ...     return model
      >>> x = np.random.default_rng(0).normal(size=(21, 4))
      >>> data = x, x.sum(axis=1, keepdims=True)
      >>> assert_strategies_equal(build, data, [MirroredStrategy, FullyShardedStrategy(["cpu:0"])], batch_size=8)

    Source: `keras_correctness_test_base`, TensorFlow's test of its own strategies.
    """
    __tracebackhide__ = True  # pytest then shows the line of the user's test
    if not callable(build) or isinstance(build, Model):
        raise errors.wrong_type("build", build, "a function that makes and compiles a model")
    if isinstance(strategies, str) or not isinstance(strategies, Sequence):
        raise errors.wrong_type("strategies", strategies, "a list of strategies, or of functions that return one")
    if not strategies:
        raise ValueError("`strategies` is empty. Give at least one to compare with the reference.")
    arguments.require_non_negative(**{name: tolerance for name, tolerance in (("rtol", rtol), ("atol", atol))
                                      if tolerance is not None})
    arguments.check_count("epochs", epochs, 1)
    run = _Run(build, data, batch_size, epochs, train, evaluate, predict)
    one_device = _strategy("reference", OneDeviceStrategy() if reference is None else reference)
    expected = run.under(one_device)
    _check_finite(one_device, expected)
    failures = []
    for number, choice in enumerate(strategies):
        strategy = _strategy(f"strategies[{number}]", choice)
        received = run.under(strategy)
        default = EXACT if expected.multiplies_float32 and received.multiplies_float32 else ROUNDED
        failure = _failure(expected, received, default.rtol if rtol is None else rtol,
                           default.atol if atol is None else atol)
        if failure:
            failures.append(f"{strategy!r} does not give the numbers of {one_device!r}.{failure}")
    if failures:
        raise AssertionError("\n".join(failures))


class Tolerance(NamedTuple):
    """The tolerance of a number: `atol + rtol * abs(number)`."""

    rtol: float
    atol: float


EXACT = Tolerance(1e-4, 1e-5)
ROUNDED = Tolerance(5e-3, 1e-3)  # for float32 rounded to TF32


@dataclasses.dataclass(frozen=True)
class _Result:
    """The results of a training; `apart` are the names of state arrays whose copies differ between devices."""

    initial: Numbers
    weights: Numbers
    outcome: Numbers
    apart: list[str]
    multiplies_float32: bool = True


@dataclasses.dataclass
class _Run:
    """A training to repeat under several strategies; the fields are arguments of `assert_strategies_equal`."""

    build: Callable[[], Model]
    data: Any
    batch_size: int | None
    epochs: int
    train: Callable[[Strategy, Model, Any], Mapping[str, Any]] | None
    evaluate: bool | None
    predict: bool | None
    models: weakref.WeakSet[Model] = dataclasses.field(default_factory=weakref.WeakSet)

    def under(self, strategy: Strategy) -> _Result:
        """Returns the results of a training under a strategy."""
        try:
            with strategy.scope():
                return self._numbers(strategy, self._built(strategy))
        except Exception as error:
            error.add_note(f"In `assert_strategies_equal`, for the model that `build` makes under {strategy!r}.")
            raise

    def _built(self, strategy: Strategy) -> Model:
        model = self.build()
        if not isinstance(model, Model):
            raise TypeError("`build` must return a `trainer.Model`. "
                            f"Received: a value of type {type(model).__name__}.")
        if model.strategy is not strategy:
            raise ValueError(f"`build` returned a model that was made under {model.strategy!r}, not under "
                             f"{strategy!r}. Make it inside of `build`, which is called in the scope of each strategy.")
        if model in self.models:
            raise ValueError("`build` returned a model that it returned before, which is trained already. Make a new "
                             "one in each call.")
        self.models.add(model)
        return model

    def _numbers(self, strategy: Strategy, model: Model) -> _Result:
        if self.train is None:
            initial, logs = self._fitted(model)
        else:
            initial = _weights(model) if model.built else {}
            logs = self.train(strategy, model, self.data)
            if not isinstance(logs, Mapping):
                raise errors.wrong_type("train", logs, "a function that returns a dict of logs by name")
            if not model.built or (initial and _same_bits(initial, _weights(model))):
                raise ValueError("`train` left the model without changed weights, so there is nothing to compare. "
                                 "Leave in it what was trained, as by `model.state = state`.")
        weights, outcome, apart = _weights(model), _by_epoch(logs), _names_of_copies_apart(model)
        has_loss = core_of(model).configuration.loss.is_given or type(model).compute_loss is not Model.compute_loss
        if has_loss if self.evaluate is None else self.evaluate:
            x, y, sample_weight = self._arrays()
            evaluated = model.evaluate(x, y, sample_weight=sample_weight, batch_size=self.batch_size, verbose=0)
            outcome.update({f"evaluated {name!r}": _as_numbers(value) for name, value in evaluated.items()})
        if has_loss if self.predict is None else self.predict:
            predictions = named_leaves(model.predict(self._arrays()[0], batch_size=self.batch_size, verbose=0))
            outcome.update({f"prediction {path!r}" if path else "prediction": _as_numbers(leaf)
                            for path, leaf in predictions.items()})
        platform, name = strategy.mesh.devices.flat[0].platform, core_of(model).configuration.options.matmul_precision
        return _Result(initial, weights, outcome, apart, precision.multiplies_float32(platform, name))

    def _fitted(self, model: Model) -> tuple[Numbers, Mapping[str, Any]]:
        """Returns the weights before the first step, and the history."""
        seen = _InitialWeights()
        x, y, sample_weight = self._arrays()
        history = model.fit(x, y, sample_weight=sample_weight, batch_size=self.batch_size, epochs=self.epochs,
                            callbacks=[seen], verbose=0)
        return seen.weights, history.history

    def _arrays(self) -> tuple[Any, Any, Any]:
        parts = unpack_x_y_sample_weight(self.data)
        if not is_array_tree(parts):
            raise TypeError("`data` must be `(x, y)`, `(x, y, sample_weight)` or `x`, of arrays or trees of arrays. "
                            f"Received: {errors.describe(self.data)}. For other data, give `train`, and "
                            "`evaluate=False` and `predict=False`.")
        return parts


class _InitialWeights(Callback):
    """Keeps the weights that a training starts from."""

    weights: Numbers

    def on_train_begin(self, logs: Logs | None = None) -> None:
        assert isinstance(self.model, Model), "the model that `fit` was called on"
        self.weights = _weights(self.model)


def _strategy(argument: str, choice: object) -> Strategy:
    strategy = choice() if callable(choice) else choice
    if not isinstance(strategy, Strategy):
        raise errors.wrong_type(argument, strategy, "a strategy, or a function without arguments that returns one")
    return strategy


def _weights(model: Model) -> Numbers:
    state = model.current_run.state
    trees = {"weight": state.params, "model state": state.model_state}
    return {f"{kind} {path!r}": _as_numbers(to_host(leaf))
            for kind, tree in trees.items() for path, leaf in named_leaves(tree).items()}


def _names_of_copies_apart(model: Model) -> list[str]:
    """Returns the names of arrays whose copies differ between devices; compiled code assumes equal copies."""
    state = model.current_run.state
    trees = {"weight": state.params, "model state": state.model_state, "optimizer state": state.opt_state}
    arrays = {f"{kind} {path!r}": leaf for kind, tree in trees.items() for path, leaf in named_leaves(tree).items()}
    names = [name for name, array in arrays.items() for _ in _parts(array)]
    bounds = np.array([pair for array in arrays.values() for pair in _checksum_bounds(array)], np.uint32).reshape(-1, 2)
    least, greatest = bounds[:, 0], bounds[:, 1]
    if not all(array.is_fully_addressable for array in arrays.values()):
        texts = ProcessGroup.of_all().all_gather(json.dumps(bounds.tolist()), "checksums")
        of_processes = np.array([json.loads(text) for text in texts], np.uint32)
        least, greatest = of_processes[..., 0].min(0), of_processes[..., 1].max(0)
    apart = {name for name, differ in zip(names, least != greatest, strict=True) if differ}
    return [name for name in arrays if name in apart]


def _parts(array: jax.Array) -> list[str]:
    """Returns the shards of an array on the devices of all processes, in an order that the processes share."""
    return sorted({str(index) for index in array.sharding.devices_indices_map(array.shape).values()})


def _checksum_bounds(array: jax.Array) -> list[tuple[int, int]]:
    """Returns the minimum and maximum checksum of the local copies of each shard; neutral values without copies."""
    indices = array.sharding.devices_indices_map(array.shape)
    checksums: dict[str, list[int]] = {part: [] for part in _parts(array)}
    for shard in array.addressable_shards:
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)  # of an optimizer that adds noise
        values = jax.random.key_data(shard.data) if is_key else shard.data
        checksums[str(indices[shard.device])].append(zlib.crc32(np.asarray(values).tobytes()))
    return [(min(found, default=2**32 - 1), max(found, default=0)) for found in checksums.values()]


def _by_epoch(logs: Mapping[str, Any]) -> Numbers:
    numbers = {}
    for name, value in logs.items():
        entries = {f"log {name!r}": value}
        if isinstance(value, (list, tuple)):
            entries = {f"log {name!r} of epoch {epoch}": entry for epoch, entry in enumerate(value, start=1)}
        for quantity, entry in entries.items():
            try:
                numbers[quantity] = _as_numbers(entry)
            except (TypeError, ValueError):
                raise TypeError(f"`train` must return logs of numbers, or lists of them. Received: {name!r} of type "
                                f"{type(entry).__name__}. Reduce values of replicas by `strategy.reduce`.") from None
    return numbers


def _as_numbers(value: object) -> np.ndarray:
    array = np.asarray(value)
    return array if np.iscomplexobj(array) else array.astype(np.float64)


def _same_bits(one: Numbers, other: Numbers) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _check_finite(strategy: Strategy, result: _Result) -> None:
    for name, values in result.weights.items():
        if not np.isfinite(values).all():
            raise AssertionError(f"Under {strategy!r}, {name} is not finite after training, so it compares with "
                                 "nothing. Lower the learning rate, or train for fewer epochs.")


def _failure(expected: _Result, received: _Result, rtol: float, atol: float) -> str:
    """Returns the differences, a line per quantity; empty if there are none."""
    heading, lines = "", _differences(expected.initial, received.initial, rtol, atol)
    if lines:
        heading = (" They differ before training already: `build` must make the same weights each time. Give `Model` a "
                   "fixed seed, and the `nnx.Rngs` of an NNX module too.")
    else:
        lines = [line for first, second in ((expected.weights, received.weights), (expected.outcome, received.outcome))
                 for line in _differences(first, second, rtol, atol)]
        lines += [f"{name} differs between devices that should hold copies of it." for name in received.apart]
    shown = lines[:errors.MAX_ITEMS]
    if len(shown) < len(lines):
        shown.append(f"... ({len(lines)} in all)")
    return heading + "".join(f"\n  {line}" for line in shown)


def _differences(expected: Numbers, received: Numbers, rtol: float, atol: float) -> list[str]:
    lines = [f"{name} is missing." for name in expected if name not in received]
    lines += [f"{name} is not there under the reference." for name in received if name not in expected]
    for name, values in expected.items():
        if name in received:
            lines += _difference(name, values, received[name], rtol, atol)
    return lines


def _difference(name: str, expected: np.ndarray, received: np.ndarray, rtol: float, atol: float) -> list[str]:
    """Returns a line with the largest difference; an empty list if all are tolerated."""
    if expected.shape != received.shape:
        return [f"{name} has shape {received.shape} instead of {expected.shape}."]
    if not expected.size:
        return []
    equal = (received == expected) | (np.isnan(received) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        distance = np.abs(received - expected)
    distance = np.where(equal, 0.0, np.where(np.isnan(distance), np.inf, distance))
    tolerated = atol + rtol * np.where(np.isfinite(expected), np.abs(expected), 0.0)
    worst = np.unravel_index(np.argmax(distance - tolerated), expected.shape)
    if distance[worst] <= tolerated[worst]:
        return []
    place = f" at {tuple(map(int, worst))}" if worst else ""
    return [f"{name} differs by up to {distance[worst]:.3g}{place}, where {tolerated[worst]:.3g} is tolerated."]
