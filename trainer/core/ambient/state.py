"""The one context variable of the trainer: a frozen object, of which each room reads and replaces its own fields."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol


class Stoppable(Protocol):
    """What reads data ahead, for a reader that may not want them any more."""

    @property
    def is_stopped(self) -> bool:
        """Whether the data are not needed any more."""


@dataclasses.dataclass(frozen=True)
class Ambient:
    """What surrounds the code that runs.

    The first four fields are the user's surroundings. They hold in each thread that runs user code, see `threads.py`;
    other processes get what can be sent, see `processes.py`. All others belong to one trace: they are of the thread
    that traces, as a tracer may be used nowhere else, and other threads find the defaults.

    Types of higher rooms are `Any` here; the file that owns a field declares its type.

    Attributes:
      strategy: the `Strategy` in scope (`distribute/strategies/strategy.py`).
      strategy_elsewhere: the name of the strategy in scope in the process that this one works for.
      custom_objects: the user's classes and functions by name (`core/configs.py`).
      reader: what the code reads data for, ahead of their use (`data/prefetch.py`).
      replica: the `ReplicaContext` of the step that is traced or run (`core/replica_context.py`).
      traced_function: the function being traced that must be given what it reads (`core/trace_purity.py`).
      traced_owner: the object whose own values that function must be given; None for those of all.
      read_constants: the `Constants` that the code being compiled has read.
      constrain: what splits arrays in the place of JAX's functions (`compile/constraints.py`).
      layer_observer: what calls layers, to rematerialise them or to plan that (`modules/remat.py`).
      metric_values: temporary values of metrics' variables by `id`; a dict that assignments change
        (`metrics/variable.py`).
      metric_values_are_closed: whether stored values of these variables may not be used.
      step_metrics: the `StepMetrics` of the step being traced (`metrics/base.py`).
      loss_parts: a list that losses add their sums to (`step/loss_parts.py`).
    """

    strategy: Any = None
    strategy_elsewhere: str | None = None
    custom_objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reader: Stoppable | None = None

    replica: Any = None
    traced_function: Callable[..., Any] | None = None
    traced_owner: Any = None
    read_constants: Any = None
    constrain: Callable[[Any, Any], Any] | None = None
    layer_observer: Any = None
    metric_values: dict[int, Any] | None = None
    metric_values_are_closed: bool = False
    step_metrics: Any = None
    loss_parts: list[Any] | None = None

    def outside_of_traces(self) -> Ambient:
        """Returns the user's surroundings alone."""
        return Ambient(self.strategy, self.strategy_elsewhere, self.custom_objects, self.reader)


_NOTHING = Ambient()
_current: contextvars.ContextVar[Ambient] = contextvars.ContextVar("trainer", default=_NOTHING)


def current() -> Ambient:
    """Returns what surrounds the caller."""
    return _current.get()


@contextlib.contextmanager
def replaced(**fields: Any) -> Iterator[None]:
    """Runs the block with other values in some fields of `Ambient`.

    >>> with replaced(custom_objects={"largest": max}):
    ...     list(current().custom_objects)
    ['largest']
    >>> list(current().custom_objects)
    []
    """
    token = _current.set(dataclasses.replace(_current.get(), **fields))
    try:
        yield
    finally:
        _current.reset(token)


def surroundings() -> contextvars.Context:
    """Returns a copy of the caller's context variables, the user's own included, outside of any trace."""
    context = contextvars.copy_context()
    context.run(_current.set, _current.get().outside_of_traces())
    return context
