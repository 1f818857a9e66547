"""The base class of metrics: named variables, an update, a result, and their pure forms.

Owns the protocol that the trainer uses. Must not know any particular metric.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.ambient import state
from trainer.metrics.variable import (
    Variable,
    as_arrays,
    attributes_kept,
    closed_values,
    has_temporary_values,
    temporary_values,
)

Direction = Literal["max", "min"]

_PACKAGE = __name__.partition(".")[0] + "."
_WORD_STARTS = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"


def snake_case(class_name: str) -> str:
    """Returns a class's name in the form of log names.

    >>> snake_case("KLDivergence"), snake_case("R2Score"), snake_case("AUC")
    ('kl_divergence', 'r2_score', 'auc')
    """
    return re.sub(_WORD_STARTS, "_", class_name).lower()


class StepMetrics(Protocol):
    """The methods that replace a metric's methods while a step is traced and the metric cannot store its state."""

    def update_state(self, metric: Metric, *args: Any, **kwargs: Any) -> None:
        """Accumulates a batch in place of `metric.update_state`."""

    def result(self, metric: Metric) -> MetricValue:
        """Returns the stand-in for `metric.result()`."""

    def reset_state(self, metric: Metric) -> None:
        """Raises an error for `metric.reset_state()`."""


@contextlib.contextmanager
def metrics_kept_by(step_metrics: StepMetrics) -> Iterator[None]:
    """Redirects the metrics' methods to `step_metrics`, in this thread and this block."""
    with state.replaced(step_metrics=step_metrics), closed_values():
        yield


def step_metrics() -> StepMetrics | None:
    """Returns the `StepMetrics` of the step that this thread is tracing; None outside a step."""
    metrics: StepMetrics | None = state.current().step_metrics
    return metrics


def _done_by_step(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a metric's method so that, in a step, the step's `StepMetrics` runs instead."""
    @functools.wraps(method)
    def call(metric: Metric, *args: Any, **kwargs: Any) -> Any:
        in_step = step_metrics()
        if in_step is None or has_temporary_values():
            return method(metric, *args, **kwargs)
        return getattr(in_step, name)(metric, *args, **kwargs)

    return call


class Metric:
    """The base class of metrics. A subclass adds variables, and defines `update_state` and `result`.

    Args:
      dtype: dtype of the result; float32 if None. Accumulators are float32 or wider.
      name: the metric's name in logs; the class's name in snake case if None.

    Raises:
      RuntimeError: if a subclass adds a variable before it calls `super().__init__()`.

    The trainer updates fresh accumulators with each batch and adds them up. A metric with another rule, such as a
    maximum, sets `additive = False` and overrides `merge_variables`.

    >>> class TruePositiveCount(Metric):
    ...     def __init__(self, name="true_positive_count", **kwargs):
    ...         super().__init__(name=name, **kwargs)
    ...         self.total = self.add_variable(shape=(), initializer="zeros", name="total")
    ...     def update_state(self, y_true, y_pred, sample_weight=None):
    ...         self.total.assign(self.total + jnp.sum(jnp.logical_and(y_true, y_pred)))
    ...     def result(self):
    ...         return self.total
    >>> float(TruePositiveCount()(jnp.array([1, 1, 0]), jnp.array([1, 0, 0])))
    1.0
    """

    #: Whether a larger ("max") or a smaller ("min") result is better; None if unknown.
    direction: Direction | None = None
    #: Whether `merge_variables` is a sum, so that the accumulators of parts of the data can be added.
    additive: ClassVar[bool] = True
    #: Whether the metric wraps a metric of another library.
    is_adapted: ClassVar[bool] = False

    def __init_subclass__(cls, is_composite: bool = False, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(_PACKAGE) and "__init__" in vars(cls):
            cls.__init__ = arguments.checked(vars(cls)["__init__"])  # type: ignore[method-assign]
        # A composite metric has no state of its own: its component metrics redirect to the step.
        for name in () if is_composite else ("update_state", "result", "reset_state"):
            if name in vars(cls):
                setattr(cls, name, _done_by_step(name, vars(cls)[name]))

    @arguments.checked
    def __init__(self, dtype: DTypeLike | None = None, name: str | None = None):
        self.name = name or snake_case(type(self).__name__)
        self._dtype = "float32" if dtype is None else arguments.as_dtype("dtype", dtype).name
        self._variables: list[Variable] = []

    @property
    def dtype(self) -> str:
        """The name of the result's dtype."""
        return self._dtype

    @property
    def variables(self) -> list[Variable]:
        """The metric's variables, then variables in its attributes and in metrics there, also in lists and dicts."""
        found = dict.fromkeys(map(id, self._variables))
        variables = list(self._variables)
        for item in _tracked(list(vars(self).values())):
            for variable in item.variables if isinstance(item, Metric) else (item,):
                if id(variable) not in found:
                    found[id(variable)] = None
                    variables.append(variable)
        return variables

    def add_variable(
        self,
        shape: Sequence[int] = (),
        initializer: str | Callable[..., Any] | np.ndarray | jax.Array = "zeros",
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ) -> Variable:
        """Adds a variable to the metric.

        Args:
          shape: shape of the variable.
          initializer: "zeros", "ones", a function of `(shape, dtype)`, or an array of this shape.
          dtype: dtype of the variable; if None, the metric's dtype, but at least float32.
          name: name of the variable; "variable" if None.

        Raises:
          TypeError: if a name is given in place of the shape.
        """
        if not hasattr(self, "_variables"):
            raise RuntimeError(f"Call `super().__init__()` first in the `__init__` of {type(self).__name__}.")
        if isinstance(shape, str):
            raise TypeError(f"The first argument of `add_variable` and `add_weight` is `shape`. Received: {shape!r}. "
                            f'Write `name="{shape}"`.')
        variable = Variable(shape, initializer, dtype or jnp.promote_types(self._dtype, "float32"), name or "variable")
        self._variables.append(variable)
        return variable

    add_weight = add_variable

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        """Raises ValueError for invalid shapes. Subclasses may override this method.

        Args:
          y_true: labels: anything with `shape` and `dtype`, such as `jax.ShapeDtypeStruct`.
          y_pred: predictions, likewise.
        """

    def build(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        """Creates the variables whose shapes depend on the data, unless they exist.

        Args:
          y_true: labels: anything with `shape` and `dtype`, such as `jax.ShapeDtypeStruct`.
          y_pred: predictions, likewise.
        """

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Accumulates a batch, usually `(y_true, y_pred, sample_weight=None)`. Subclasses must override this method."""
        raise NotImplementedError(f"{type(self).__name__} must define `update_state`.")

    def result(self) -> Any:
        """Returns the current value: a scalar, an array or a dict of arrays. Subclasses must override this method."""
        raise NotImplementedError(f"{type(self).__name__} must define `result(self)`.")

    def reset_state(self) -> None:
        """Sets every variable to zeros."""
        in_step = step_metrics()
        if in_step is not None and not has_temporary_values():
            in_step.reset_state(self)
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the metric and returns its current value."""
        self.update_state(*args, **kwargs)
        return as_arrays(self.result())

    def stateless_reset_state(self) -> list[jax.Array]:
        """Returns the values of `variables` after `reset_state`, without modifying the metric."""
        variables = self.variables
        with temporary_values(variables, [variable.stored for variable in variables]):
            self.reset_state()
            return [variable.value for variable in variables]

    def stateless_update_state(self, metric_variables: Sequence[Any], *args: Any, **kwargs: Any) -> list[jax.Array]:
        """Returns the accumulators after `update_state`. A pure function, for use in `jax.jit`.

        Args:
          metric_variables: values of `variables`, in the same order.
          *args: arguments of `update_state`.
          **kwargs: keyword arguments of `update_state`.

        Raises:
          ValueError: if the number of values is wrong.
          TypeError: if `update_state` updates a variable that is not among `variables`.
        """
        self._check_count(metric_variables)
        traced = metric_variables, args, kwargs
        with temporary_values(self.variables, metric_variables) as values, attributes_kept(self, traced):
            self.update_state(*args, **kwargs)
            variables = self.variables
            if values.keys() - set(map(id, variables)):
                raise TypeError(f"`{type(self).__name__}.update_state` updates a variable that is not among the "
                                "metric's `variables`, so that its value would be lost. Keep the variable, or the "
                                "metric that has it, in an attribute, which may be a list or a dict of these.")
            return [variable.value for variable in variables]

    def stateless_result(self, metric_variables: Sequence[Any]) -> Any:
        """Returns the result of the accumulators. A pure function, for use in `jax.jit`.

        Args:
          metric_variables: values of `variables`, in the same order.

        Raises:
          ValueError: if the number of values is wrong.
        """
        self._check_count(metric_variables)
        with temporary_values(self.variables, metric_variables):
            return as_arrays(self.result())

    def merge_variables(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        """Merges the accumulators of two parts of the data; by default, adds them.

        A metric with another rule, such as a maximum, overrides this method and sets `additive = False`.
        """
        return [one + other for one, other in zip(first, second, strict=True)]

    def merge_parts(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        """Merges the accumulators of two parts of the same batch; by default, calls `merge_variables`.

        For example, a metric of the last batch keeps the second of two batches, but averages two parts of a batch.
        """
        return self.merge_variables(first, second)

    def _check_count(self, metric_variables: Sequence[Any]) -> None:
        if len(metric_variables) != len(self.variables):
            raise ValueError(f"Argument `metric_variables` must be a list of arrays corresponding 1:1 to "
                             f"{type(self).__name__}().variables. Received list with length {len(metric_variables)}, "
                             f"but expected {len(self.variables)} variables. Where shapes of variables depend on the "
                             f"data, call `build(y_true, y_pred)` before `stateless_reset_state()`.")

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments: each argument of `__init__` that is also an attribute."""
        arguments = inspect.signature(type(self).__init__).parameters
        config = {argument: getattr(self, argument) for argument in arguments if hasattr(self, argument)}
        return {"name": self.name, "dtype": self.dtype, **config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a metric from the result of `get_config`."""
        return cls(**config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"


def _tracked(items: Iterable[Any]) -> Iterator[Metric | Variable]:
    for item in items:
        if isinstance(item, (Metric, Variable)):
            yield item
        elif isinstance(item, (list, tuple, dict)):
            yield from _tracked(item.values() if isinstance(item, dict) else item)


def is_builtin(metric: Metric) -> bool:
    """Returns whether a metric is implemented by this package."""
    return type(metric).__module__.startswith(__name__.rpartition(".")[0]) and not metric.is_adapted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MetricValue:
    """The accumulators of a metric over some rows: the return value of `Metric.result()` in a step.

    It represents the metric over all steps and rows of an epoch, which is known at the end of the epoch. A step can
    only return it as a log.

    Attributes:
      variables: the accumulators, as returned by `Metric.stateless_update_state`.
      metric: the metric that merges the accumulators and computes the result.
    """

    variables: list[jax.Array]
    metric: Metric = dataclasses.field(metadata={"static": True})

    @property
    def result(self) -> Any:
        """The metric's value over these rows."""
        return self.metric.stateless_result(self.variables)

    def _refuse(self, *_: Any) -> Any:
        name = self.metric.name
        raise TypeError(f"`result()` of the metric {name!r} is used as a number in a step. There it stands for the "
                        "metric over the whole epoch, which is known at its end: return it as a log, compute further "
                        f"in `result` of a subclass of {type(self.metric).__name__}, or use the step's own arrays.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __bool__ = __array__ = __jax_array__ = __getitem__ = __format__ = _refuse
