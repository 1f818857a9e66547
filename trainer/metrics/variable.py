"""The variables of metrics, and the scope that makes their updates pure.

Owns reads and writes of a variable's value, and the check that a traced update stores no value elsewhere. Must not
know the meaning of the values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import trace_purity
from trainer.core.ambient import state
from trainer.core.errors import see, unknown_name, wrong_type
from trainer.core.types import ArrayLike, PyTree
from trainer.losses.shapes import in_dtype

# NumPy on the host, because JAX would compile a program for each shape.
INITIALIZERS: dict[str, Callable[..., Any]] = {"zeros": np.zeros, "ones": np.ones}

#: JAX's errors for code of a step that asks for the value of an array.
VALUE_OF_TRACER = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError,
                   jax.errors.TracerIntegerConversionError, jax.errors.TracerBoolConversionError)


_OF_TRACER = re.compile(r"Tracer(\.__format__| has no attribute numpy)")  # errors of Python's, which JAX does not raise


def asks_for_value(error: Exception) -> bool:
    """Returns whether an error is about code that asks for the value of a traced array, as `f"{loss:.3f}"` does."""
    return isinstance(error, VALUE_OF_TRACER) or (
        isinstance(error, (TypeError, AttributeError)) and _OF_TRACER.search(str(error)) is not None)


def closed_values() -> contextlib.AbstractContextManager[None]:
    """Forbids, in a block that traces a step, uses of a variable's stored value, which would be a constant."""
    return state.replaced(metric_values_are_closed=True)


def has_temporary_values() -> bool:
    """Returns whether the caller is in a `temporary_values` block."""
    return state.current().metric_values is not None


def _copy(array: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    return np.array(array, dtype)


def _forwarded(operator: str) -> Callable[..., Any]:
    def method(variable: Variable, *operands: Any) -> Any:
        return getattr(variable.value, operator)(*as_arrays(operands))

    method.__name__ = operator
    return method


class Variable:
    """A named array in which a metric accumulates. Arithmetic and `jnp` functions use its value.

    Args:
      shape: shape of the value.
      initializer: "zeros", "ones", a function of `(shape, dtype)`, or an array of this shape.
      dtype: dtype of the value.
      name: name of the variable.

    Raises:
      ValueError: if the name of the initializer is unknown.
      TypeError: if the initializer is neither a name nor a function.

    >>> total = Variable((), name="total")
    >>> _ = total.assign_add(2)
    >>> float(total * 3)
    6.0
    """

    # Makes `array + variable` call the variable, which returns a JAX array.
    __array_priority__ = 200

    def __init__(
        self,
        shape: Sequence[int] = (),
        initializer: str | Callable[..., Any] | np.ndarray | jax.Array = "zeros",
        dtype: DTypeLike | None = "float32",
        name: str = "variable",
    ):
        if isinstance(initializer, str):
            if initializer not in INITIALIZERS:
                raise unknown_name("initializer", initializer, INITIALIZERS)
            initializer = INITIALIZERS[initializer]
        if isinstance(initializer, (np.ndarray, jax.Array)):
            if initializer.shape != tuple(shape):
                raise ValueError(f"The `initializer` of the variable {name!r} is an array of shape "
                                 f"{initializer.shape}, and its `shape` is {tuple(shape)}. Give one of this shape.")
            initializer = functools.partial(_copy, initializer)
        if not callable(initializer):
            raise wrong_type("initializer", initializer, "a name, a function of (shape, dtype) or an array")
        self.name = name
        # A metric may create its variables while it is traced; the stored value must outlive the trace.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            value = initializer(tuple(shape), dtype=jnp.dtype(dtype))
            self._value = jnp.asarray(jax.device_put(value) if isinstance(value, np.ndarray) else value)

    @property
    def value(self) -> jax.Array:
        """The current value."""
        values = state.current().metric_values
        if values is not None:
            return values.get(id(self), self._value)
        self._check_is_open()
        return self._value

    @property
    def stored(self) -> jax.Array:
        """The value outside all `temporary_values` blocks."""
        return self._value

    def _check_is_open(self) -> None:
        if state.current().metric_values_are_closed:
            raise TypeError(f"The variable {self.name!r} of a metric is used by itself in a step, which is compiled: "
                            "its value would be a constant there. Change it in the metric's `update_state`, use it in "
                            "`result`, and call these in the step.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return self._value.shape

    @property
    def ndim(self) -> int:
        """The value's rank."""
        return self._value.ndim

    @property
    def dtype(self) -> np.dtype:
        """The value's dtype."""
        return self._value.dtype

    def assign(self, value: ArrayLike) -> jax.Array:
        """Replaces the value and returns the new value, cast to the variable's dtype.

        Raises:
          ValueError: if the value has another shape.
          TypeError: if a complex value would be cast to real numbers.
        """
        array = in_dtype(f"Values of the variable {self.name!r}", value, self.dtype)
        if array.shape != self.shape:
            raise ValueError(f"The variable {self.name!r} has shape {self.shape}. Received: a value of shape "
                             f"{array.shape}. Assign one of the same shape.")
        values = state.current().metric_values
        if values is None:
            self._check_is_open()
            self._value = array
        else:
            values[id(self)] = array
        return array

    def assign_add(self, value: ArrayLike) -> jax.Array:
        """Adds to the value and returns the new value; see `assign`."""
        return self.assign(self.value + in_dtype(f"Values of the variable {self.name!r}", value, self.dtype))

    def assign_sub(self, value: ArrayLike) -> jax.Array:
        """Subtracts from the value and returns the new value; see `assign`."""
        return self.assign(self.value - in_dtype(f"Values of the variable {self.name!r}", value, self.dtype))

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array."""
        return np.asarray(self.value)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        return f"<Variable name={self.name} shape={self.shape} dtype={self.dtype}>"

    # `==` compares values, as for arrays, so Python would otherwise set `__hash__` to None.
    __hash__ = object.__hash__

    __add__ = _forwarded("__add__")
    __sub__ = _forwarded("__sub__")
    __mul__ = _forwarded("__mul__")
    __truediv__ = _forwarded("__truediv__")
    __floordiv__ = _forwarded("__floordiv__")
    __mod__ = _forwarded("__mod__")
    __pow__ = _forwarded("__pow__")
    __matmul__ = _forwarded("__matmul__")
    __radd__ = _forwarded("__radd__")
    __rsub__ = _forwarded("__rsub__")
    __rmul__ = _forwarded("__rmul__")
    __rtruediv__ = _forwarded("__rtruediv__")
    __rfloordiv__ = _forwarded("__rfloordiv__")
    __rmod__ = _forwarded("__rmod__")
    __rpow__ = _forwarded("__rpow__")
    __rmatmul__ = _forwarded("__rmatmul__")
    __eq__ = _forwarded("__eq__")
    __ne__ = _forwarded("__ne__")
    __lt__ = _forwarded("__lt__")
    __le__ = _forwarded("__le__")
    __gt__ = _forwarded("__gt__")
    __ge__ = _forwarded("__ge__")
    __neg__ = _forwarded("__neg__")
    __abs__ = _forwarded("__abs__")
    __getitem__ = _forwarded("__getitem__")
    __float__ = _forwarded("__float__")
    __int__ = _forwarded("__int__")
    __bool__ = _forwarded("__bool__")
    __len__ = _forwarded("__len__")


# Lets compiled functions, such as the functions of `jax.numpy`, take a variable, which is a plain array inside them.
jax.tree_util.register_pytree_node(Variable, lambda variable: ((variable.value,), None), lambda _, leaves: leaves[0])


def as_arrays(tree: PyTree) -> Any:
    """Returns `tree` with every variable replaced by its current value."""
    return jax.tree.map(lambda leaf: leaf, tree)


@contextlib.contextmanager
def temporary_values(variables: Sequence[Variable], values: Sequence[Any]) -> Iterator[dict[int, jax.Array]]:
    """Sets other values of variables in this thread and this block. Assignments in the block are then discarded.

    Yields the values by the `id` of each variable, to which assignments add other variables.
    """
    by_id = {id(variable): jnp.asarray(value) for variable, value in zip(variables, values, strict=True)}
    with state.replaced(metric_values=by_id):
        yield by_id


@contextlib.contextmanager
def attributes_kept(metric: Any, arguments: Any) -> Iterator[None]:
    """Raises TypeError if a traced update, run in the block, changes a number or keeps an array in an attribute.

    Only numbers, arrays and containers of arrays are checked. The first assignment of a number is allowed, because it
    may record the shapes of the data. JAX's errors about values of traced arrays get a note with the metric's name.

    Args:
      metric: the metric; the block runs its `update_state`.
      arguments: the arguments of the update, a tree of arrays.
    """
    if not trace_purity.has_tracers(jax.tree.leaves(arguments)):
        yield
        return
    # Lists and the like change in place.
    before = {name: copy.copy(value) if isinstance(value, (list, dict)) else value
              for name, value in vars(metric).items()}
    try:
        yield
    except Exception as error:
        if not asks_for_value(error):
            raise
        error.add_note(f"It was raised in `update_state` of the metric {metric.name!r}, which is compiled: it asks for "
                       "the value of an array. Use `jnp` in place of `np`, `float` and `if`. A function of NumPy, such "
                       "as scikit-learn's, takes the outputs of `model.predict(x)`, after training or in a callback. "
                       f"{see('traced-value')}")
        raise
    changed = [name for name, value in vars(metric).items() if _counts(before.get(name), value)]
    for name in changed:
        if name in before:  # the next trace must not see a tracer
            setattr(metric, name, before[name])
        else:
            delattr(metric, name)
    if changed:
        name, kind = changed[0], type(metric).__name__
        raise TypeError(f"`{kind}.update_state` set `self.{name}`, which is no variable of the metric. It is compiled: "
                        "it runs once, to be traced, and what it sets is not accumulated. Make a variable in "
                        f"`__init__`, `self.{name} = self.add_weight(name=\"{name}\")`, and update it by "
                        f"`self.{name}.assign_add(...)`.")


def _counts(before: Any, after: Any) -> bool:
    # Variables may be created once shapes are known.
    if isinstance(after, (list, dict)):
        after = [item for item in (after.values() if isinstance(after, dict) else after)
                 if not isinstance(item, Variable)]
    if after is before or isinstance(after, Variable):
        return False
    if trace_purity.has_tracers(after) and not trace_purity.has_tracers(before):
        return True
    return _is_number(before) and _is_number(after) and not np.array_equal(before, after)


def _is_number(value: object) -> bool:
    return isinstance(value, (numbers.Number, np.ndarray)) and not isinstance(value, bool)
