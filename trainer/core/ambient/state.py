"""The trainer's single context variable: a frozen object, whose fields belong to different rooms."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol


class Stoppable(Protocol):
    """A reader of data ahead of their use, which may be stopped."""

    @property
    def is_stopped(self) -> bool:
        """Whether the data are no longer needed."""


@dataclasses.dataclass(frozen=True)
class Ambient:
    """The context of the running code.

    The first four fields are the user's context. They hold in each thread that runs user code, see `threads.py`; other
    processes get the part that can be sent, see `processes.py`. All other fields belong to a single trace and its
    thread, because tracers must not leave it; other threads have the defaults.

    Types of higher rooms are `Any` here; the file that owns a field declares its type.

    Attributes:
      strategy: the `Strategy` in scope (`distribute/strategies/strategy.py`).
      strategy_elsewhere: name of the strategy in scope in the process that this process works for.
      custom_objects: the user's classes and functions by name (`core/configs.py`).
      reader: the reader that the code reads data for, ahead of their use (`data/prefetch.py`).
      replica: the `ReplicaContext` of the step that is traced or run (`core/replica_context.py`).
      traced_function: the function being traced that must receive its values as arguments (`core/trace_purity.py`).
      traced_owner: the object whose own values that function must receive as arguments; None for the values of all
        objects.
      read_constants: the `Constants` that the code being compiled has read.
      constrain: function that replaces JAX's sharding constraints (`core/compile/constraints.py`).
      layer_observer: object that calls layers, to rematerialize them or to plan it (`core/modules/remat.py`).
      metric_values: temporary values of metric variables by `id`, a dict that assignments update
        (`metrics/variable.py`).
      metric_values_are_closed: whether stored values of metric variables must not be used.
      step_metrics: the `StepMetrics` of the step being traced (`metrics/base.py`).
      loss_terms: list to which losses append their sums (`engine/step/loss_terms.py`).
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
    loss_terms: list[Any] | None = None

    def outside_of_traces(self) -> Ambient:
        """Returns only the user's context."""
        return Ambient(self.strategy, self.strategy_elsewhere, self.custom_objects, self.reader)


_NOTHING = Ambient()
_current: contextvars.ContextVar[Ambient] = contextvars.ContextVar("trainer", default=_NOTHING)


current: Callable[[], Ambient] = _current.get
"""Returns the context of the caller."""


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
    """Returns a copy of the caller's context variables, including the user's own, outside of any trace."""
    context = contextvars.copy_context()
    context.run(_current.set, _current.get().outside_of_traces())
    return context
