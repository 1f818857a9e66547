"""Adapters for metrics of clu, metrax and Flax's `nnx.metrics`.

Owns their detection, the arguments they receive, and the merge of partial results by their own rules. Detection is
by their methods, so that clu and metrax need not be installed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_arguments, in_dtype
from trainer.metrics.base import Metric, MetricValue, snake_case

_LABELS = ("labels", "targets", "y_true")
_PREDICTIONS = ("logits", "predictions", "y_pred")
_WEIGHTS = ("sample_weights", "sample_weight", "weights")


class _Varies(enum.Enum):
    VALUE = enum.auto()


# An enum member is the same object in every process.
_VARIES = _Varies.VALUE
# Metrics for which larger is better.
_BETTER_IF_LARGER = ("Accuracy", "AUCPR", "AUCROC", "FBetaScore", "Precision", "Recall")


def is_of_another_library(value: object) -> bool:
    """Returns whether a value is a metric, or a collection of metrics, of clu, metrax or `nnx.metrics`.

    >>> from flax import nnx
    >>> is_of_another_library(nnx.metrics.Accuracy()), is_of_another_library(max)
    (True, False)
    """
    if isinstance(value, Metric) or (isinstance(value, type) and issubclass(value, Metric)):
        return False
    return _is_merged(value) or _is_collection(value) or _is_updated(value)


def check_is_object(value: type) -> None:
    """Raises TypeError for a class of `nnx.metrics`, because only instances are supported."""
    if "flax.nnx" in sys.modules and issubclass(value, sys.modules["flax.nnx"].metrics.Metric):
        prefix = "nnx.metrics." if value.__module__.startswith("flax.") else ""
        raise TypeError("`metrics` takes objects of the metrics of NNX, not their classes. Received: the class "
                        f"{value.__name__}. Pass an instance: `{prefix}{value.__name__}()`.")


def parts(value: Any) -> Iterator[Any]:
    """Yields a metric, or each metric of a clu `Collection` or an `nnx.MultiMetric`, under its name there.

    >>> from flax import nnx
    >>> [metric.name for metric in parts(nnx.MultiMetric(hits=nnx.metrics.Accuracy()))]
    ['hits']
    """
    if _is_collection(value):
        for name, metric in _annotations(value).items():
            yield MergedMetric(metric, name)
    elif _is_updated(value) and isinstance(getattr(value, "_metric_names", None), tuple):
        for name in value._metric_names:
            for part in parts(getattr(value, name)):
                yield part if isinstance(part, Metric) else adapted(part, name)
    else:
        yield value


def adapted(value: object, name: str | None = None) -> Metric:
    """Wraps a metric of another library as a `Metric`.

    Args:
      value: a class or an object with the methods `from_model_output`, `merge` and `compute`, as in clu and metrax; or
        an object of `nnx.metrics`, which is not modified.
      name: the metric's name in logs; its class's name in snake case if None.

    Raises:
      ValueError: if `value` is a collection of metrics, or a metric of `nnx.metrics` whose initial state is not zeros.

    >>> from flax import nnx
    >>> accuracy = adapted(nnx.metrics.Accuracy())
    >>> float(accuracy(jnp.array([0, 1]), jnp.array([[2.0, 1.0], [2.0, 1.0]])))
    0.5
    """
    if hasattr(value, "clu_metric"):  # metrax's wrapper for NNX
        return MergedMetric(type(value.clu_metric), name or snake_case(type(value).__name__))
    if _is_merged(value):
        return MergedMetric(value if isinstance(value, type) else type(value), name)
    if _is_collection(value) or isinstance(getattr(value, "_metric_names", None), tuple):
        raise ValueError("Several metrics in one have several results. Give it to `compile(metrics=[...])`, which "
                         f"takes each, or give single metrics. Received: {_class_of(value).__name__}.")
    from flax import nnx

    return (WelfordMetric if isinstance(value, nnx.metrics.Welford) else UpdatedMetric)(value, name)


def logged_value(value: Any) -> Any:
    """Returns a clu or metrax object, as a step may log it, as a `MetricValue`; returns other values unchanged.

    A collection becomes a dict of `MetricValue` objects.
    """
    if isinstance(value, type):
        return value
    if _is_collection(value):
        return {name: logged_value(getattr(value, name)) for name in _annotations(value)}
    if not _is_merged(value):
        return value
    one, both = (tuple(jax.tree.leaves(_specs(each))) for each in (value, value.merge(value)))
    metric = _metric_of_values(jax.tree.structure(value), one, both)
    return MetricValue(metric.values_of(value), metric)


@functools.lru_cache(maxsize=256)  # returns the same object for each trace of a step, because programs compare it
def _metric_of_values(structure: Any, one: tuple[Any, ...], both: tuple[Any, ...]) -> MergedMetric:
    metric = MergedMetric(type(jax.tree.unflatten(structure, one)))
    metric.hold(structure, one, both)
    return metric


class AdaptedMetric(Metric):
    """The base class of adapters for metrics of other libraries.

    Args:
      cls: the class in the other library.
      name: see `adapted`.
    """

    is_adapted = True

    def __init__(self, cls: type, name: str | None):
        super().__init__(name=name or snake_case(cls.__name__))
        if cls.__name__ in _BETTER_IF_LARGER:
            self.direction = "max"

    def given(
        self, function: Callable[..., Any], y_true: ArrayLike, y_pred: ArrayLike,
        sample_weight: ArrayLike | None, argument: str | None = None,
    ) -> dict[str, Any]:
        """Returns the keyword arguments for a function of the other library.

        Args:
          function: the function.
          y_true: labels.
          y_pred: predictions.
          sample_weight: weights, or None.
          argument: name of the single argument that the function needs, if its signature does not show it.

        Raises:
          ValueError: if the function needs other arguments, or takes no weights.
        """
        labels, predictions = as_arguments(y_true, y_pred)
        if predictions.ndim > 1 and predictions.shape[-1] == 1:
            # These libraries expect one number per row without a last axis; they would read it as a single class.
            labels, predictions = (
                each[..., 0] if each.ndim == predictions.ndim else each for each in (labels, predictions))
        parameters = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        names = {name: each for name, each in parameters.items()
                 if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
        offered = {**dict.fromkeys(_LABELS, labels), **dict.fromkeys(_PREDICTIONS, predictions)}
        needed = [argument] if argument else [name for name, each in names.items() if each.default is each.empty]
        lacking = [name for name in needed if name not in offered]
        if lacking:
            raise self._lacks(lacking)
        if "logits" in needed and labels.ndim == predictions.ndim and labels.shape[-1] == 1 < predictions.shape[-1]:
            offered.update(dict.fromkeys(_LABELS, labels[..., 0]))
        wanted = set(needed) if needed else names.keys() & offered.keys() or (set(offered) if takes_any else set())
        arguments = {name: value for name, value in offered.items() if name in wanted}
        if sample_weight is None:
            return arguments
        for name in _WEIGHTS:
            if name in names:
                return {**arguments, name: jnp.asarray(sample_weight)}
        raise ValueError(f"The metric {self.name!r} takes no sample weights. Give it as one of `metrics`, or a "
                         "metric of `trainer.metrics` as one of `weighted_metrics`.")

    def _lacks(self, names: Sequence[str]) -> ValueError:
        return ValueError(
            f"The metric {self.name!r} is computed from {', '.join(map(repr, names))}. Received: labels and "
            f"predictions, which it may call {', '.join(map(repr, (*_LABELS, *_PREDICTIONS)))}. Give a metric of "
            "these, such as one made by clu's `from_fun`; the loss is logged in any case.")


class MergedMetric(AdaptedMetric):
    """A metric of clu or metrax: an immutable object per part of the data, with its own merge rule.

    Args:
      cls: the class in the other library.
      name: see `adapted`.
    """

    additive = False

    def __init__(self, cls: type, name: str | None = None):
        super().__init__(cls, name or _function_name(cls))
        self._class: Any = cls
        # Holds shapes and dtypes for arrays. A tree structure could not be sent to other processes.
        self._example: Any = None
        # Leaves that are equal in all objects, such as the number of thresholds; `_VARIES` for other leaves.
        self._constants: list[Any] = []

    def build(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        """Creates the variables.

        Raises:
          ValueError: if the metric keeps all rows, or needs other arguments than labels and predictions.
        """
        if self._example is not None:
            return
        def look(more: int, merges: bool) -> Any:
            def make(y_true: jax.Array, y_pred: jax.Array) -> None:
                made = self._of_rows(y_true, y_pred)
                found.append(_specs(made.merge(made) if merges else made))

            found: list[Any] = []
            jax.eval_shape(make, *(_with_rows(each, more) for each in (y_true, y_pred)))
            return found[0]

        one, longer = look(0, False), look(1, False)
        if [jnp.shape(leaf) for leaf in jax.tree.leaves(one)] != [jnp.shape(leaf) for leaf in jax.tree.leaves(longer)]:
            raise ValueError(f"The metric {self.name!r} keeps all rows, which a compiled step cannot. Compute it from "
                             "`model.predict(x)` and the labels.")
        leaves = [tuple(jax.tree.leaves(each)) for each in (one, look(0, True), longer)]
        self.hold(jax.tree.structure(one), *leaves)

    def hold(
        self, structure: Any, one: tuple[Any, ...], both: tuple[Any, ...], longer: tuple[Any, ...] | None = None
    ) -> None:
        """Creates the variables for the objects of this metric.

        Args:
          structure: tree structure of an object.
          one: leaves of an object, or their shapes and dtypes.
          both: leaves of two merged objects.
          longer: leaves of an object of more rows; `one` if None.
        """
        self._example = jax.tree.unflatten(structure, one)
        self._constants = [
            part if _is_plain(part) and part == merged == more else _VARIES
            for part, merged, more in zip(one, both, longer or one, strict=True)]
        for number, (part, merged) in enumerate(zip(one, both, strict=True)):
            if self._constants[number] is _VARIES:
                dtype = functools.reduce(jnp.promote_types, map(jnp.result_type, (part, merged)), jnp.dtype("int32"))
                self.add_variable(jnp.shape(part), dtype=dtype, name=f"part_{number}")
        # An object before the first update is not merged, because it may have other shapes.
        self.is_filled = self.add_variable((), dtype=jnp.int32, name="is_filled")

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Merges a batch into the state.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: weights, if the metric supports them.

        Raises:
          ValueError: see `build`.
        """
        self.build(jnp.asarray(y_true), jnp.asarray(y_pred))
        batch = self.values_of(self._of_rows(y_true, y_pred, sample_weight))
        before = [variable.value for variable in self.variables]
        for variable, value in zip(self.variables, self.merge_variables(before, batch), strict=True):
            variable.assign(value)

    def values_of(self, made: Any) -> list[Any]:
        """Returns the values of the variables for an object of the other library."""
        return [*self._varying(made), jnp.ones((), jnp.int32)]

    def _varying(self, made: Any) -> list[jax.Array]:
        return [jnp.asarray(leaf) for leaf, constant in zip(jax.tree.leaves(made), self._constants, strict=True)
                if constant is _VARIES]

    def _of_rows(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> Any:
        make = self._class.from_model_output
        given = self.given(make, y_true, y_pred, sample_weight)
        try:
            return make(**given)
        except KeyError as error:  # from clu's `from_output`, whose signature does not show the keys it reads
            name = error.args[0] if len(error.args) == 1 else None
            if not isinstance(name, str) or name in given:
                raise
            raise self._lacks([name]) from None

    def result(self) -> Any:
        """Returns the value that the object computes."""
        return _as_logs(self.name, self._object([variable.value for variable in self.variables]).compute())

    def merge_variables(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        return self._merged(first, second, "merge")

    def merge_parts(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        return self._merged(first, second, "_reduce_merge" if hasattr(self._class, "_reduce_merge") else "merge")

    def _merged(self, first: Sequence[Any], second: Sequence[Any], rule: str) -> list[Any]:
        merged = self._varying(getattr(self._object(first), rule)(self._object(second)))
        (*ones, one_is_filled), (*others, other_is_filled) = first, second
        dtypes = [variable.dtype for variable in self.variables]
        return [*(
            jnp.where(one_is_filled == 0, other, jnp.where(other_is_filled == 0, one, both)).astype(dtype)
            for one, other, both, dtype in zip(ones, others, merged, dtypes[:-1], strict=True)
        ), jnp.maximum(one_is_filled, other_is_filled)]

    def _object(self, values: Sequence[Any]) -> Any:
        varying = iter([jnp.asarray(value, variable.dtype)
                        for value, variable in zip(values[:-1], self.variables[:-1], strict=True)])
        return jax.tree.unflatten(
            jax.tree.structure(self._example),
            [next(varying) if constant is _VARIES else constant for constant in self._constants])


class UpdatedMetric(AdaptedMetric):
    """A metric of `nnx.metrics` whose variables are sums that start at zero, such as `Average` and `Accuracy`.

    Args:
      metric: the metric, which is not modified.
      name: see `adapted`.

    Raises:
      ValueError: if the initial state is not zeros.
    """

    def __init__(self, metric: object, name: str | None = None):
        from flax import nnx

        super().__init__(type(metric), name)
        self._metric = nnx.clone(metric)
        leaves = jax.tree.leaves(nnx.state(self._metric))
        self._argument = getattr(metric, "argname", None) if not isinstance(metric, nnx.metrics.Accuracy) else None
        fresh = self._object(leaves)
        fresh.reset()
        if any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(nnx.state(fresh))):
            raise ValueError(f"The metric {self.name!r} does not begin with zeros, so that the values of several steps "
                             "cannot be summed. Write it as a `trainer.metrics.Metric` with `additive = False` and "
                             "`merge_variables`.")
        for number, leaf in enumerate(leaves):
            self.add_variable(leaf.shape, dtype=leaf.dtype, name=f"part_{number}")

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Updates a copy of the metric with a batch.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: weights, if the metric supports them.

        Raises:
          ValueError: see `AdaptedMetric.given`.
        """
        from flax import nnx

        metric = self._object([variable.value for variable in self.variables])
        metric.update(**self.given(metric.update, y_true, y_pred, sample_weight, self._argument))
        for variable, leaf in zip(self.variables, jax.tree.leaves(nnx.state(metric)), strict=True):
            variable.assign(in_dtype(f"Values of the metric {self.name!r}", leaf, variable.dtype))

    def result(self) -> Any:
        """Returns the value that the metric computes."""
        return _as_logs(self.name, self._object([variable.value for variable in self.variables]).compute())

    def _object(self, values: Sequence[Any]) -> Any:
        from flax import nnx

        graphdef, state = nnx.split(self._metric)
        structure = jax.tree.structure(state)
        return nnx.merge(graphdef, jax.tree.unflatten(structure, [jnp.asarray(value) for value in values]))


class WelfordMetric(UpdatedMetric):
    """`nnx.metrics.Welford`, with a merge of means and variances.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """

    additive = False

    def merge_variables(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        from flax import nnx

        one, other = self._object(first), self._object(second)
        counts = one.count[...], other.count[...]
        number = sum(counts)
        divisor = jnp.maximum(number, 1)
        between = other.mean[...] - one.mean[...]
        one.m2[...] = one.m2[...] + other.m2[...] + between**2 * counts[0] * counts[1] / divisor
        one.mean[...] = one.mean[...] + between * counts[1] / divisor
        one.count[...] = number
        leaves: list[Any] = jax.tree.leaves(nnx.state(one))
        return leaves


def _is_merged(value: object) -> bool:
    return _has(value, "from_model_output", "merge", "compute", "empty") or hasattr(value, "clu_metric")


def _is_collection(value: object) -> bool:
    return _has(value, "single_from_model_output", "merge", "compute", "empty")


def _is_updated(value: object) -> bool:
    # Avoids the import of NNX, which takes time in a process that only loads an exported model.
    return "flax.nnx" in sys.modules and isinstance(value, sys.modules["flax.nnx"].metrics.Metric)


def _has(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


def _class_of(value: object) -> type:
    return value if isinstance(value, type) else type(value)


def _function_name(cls: Any) -> str | None:
    """Returns the name of the function behind a class from clu's `from_fun`; None for lambdas and other classes."""
    if cls.__name__ != "FromFun":
        return None
    make = inspect.unwrap(getattr(cls.from_model_output, "__func__", cls.from_model_output))
    name = getattr(inspect.getclosurevars(make).nonlocals.get("fun"), "__name__", "")
    return name if name.isidentifier() else None


def _annotations(collection: Any) -> dict[str, Any]:
    return dict(_class_of(collection).__annotations__)


def _specs(made: Any) -> Any:
    """Returns an object with its arrays replaced by shapes and dtypes."""
    return jax.tree.map(lambda leaf: leaf if _is_plain(leaf) else jax.ShapeDtypeStruct(
        jnp.shape(leaf), jnp.result_type(leaf)), made)


def _is_plain(leaf: object) -> bool:
    return type(leaf) in (bool, int, float, str)


def _with_rows(value: Any, more: int) -> jax.ShapeDtypeStruct:
    rows, *rest = value.shape
    return jax.ShapeDtypeStruct((rows + more, *rest), jax.dtypes.canonicalize_dtype(value.dtype))


def _as_logs(name: str, result: object) -> Any:
    """Returns a result as an array, or as a dict of arrays by log name."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        return {f"{name}_{part}": jnp.asarray(value) for part, value in result.items()}
    return jnp.asarray(result)
