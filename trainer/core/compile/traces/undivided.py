"""Operations that XLA divides over devices with wrong results; their axes stay whole on each device.

Owns the rewrite of a traced program that XLA divides. Seen with jax 0.10 and 0.12, also without this library: XLA
computes wrong results for a strided convolution over a divided axis, for the gradient of overlapping windows, and for
per-row gradients of a convolution (a convolution with a group for each row). On meshes of several axes it loses some
of the rows of a scatter, such as a segment sum or an embedding's gradient, if they do not divide evenly. A Fourier
transform along a divided axis ends the process. A maximum or minimum over a divided axis loses NaN, as collectives do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core.compile.constraints import constrained
from trainer.core.compile.traces.equations import called, rewritten, run

_EXTREMA = ("reduce_max", "reduce_min", "scatter-max", "scatter-min")
_WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_and_pool",
            "select_and_scatter_add", "select_and_gather_add", "select_and_scatter")


def with_undivided_axes(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Returns an equal function whose program XLA can divide over a mesh without changing its value.

    Axes along which an operation must not be divided stay whole on each device. XLA decides about all other axes, as
    before.

    Args:
      function: a compiled, pure function of trees of arrays. It is traced when the returned function is called.
      mesh: the devices.

    Example:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("replica",))
      >>> rows = jax.device_put(jnp.array([1.0, jnp.nan]), NamedSharding(mesh, PartitionSpec("replica")))
      >>> jax.jit(with_undivided_axes(jax.jit(jnp.max), mesh))(rows)
      Array(nan, dtype=float32)
    """

    def replace(equation: Any, program: Sequence[Any]) -> Any:
        name = equation.primitive.name
        axes = _whole_axes(name, equation, mesh)
        loses_nan = name in _EXTREMA and jnp.issubdtype(
            equation.invars[0].aval.dtype, jnp.floating) and not _is_of_softmax(equation, program)
        if not loses_nan and not any(axes):
            return equation
        evaluate = _with_nan if loses_nan else run

        def undivided(*operands: jax.Array) -> Any:
            return _undivided(equation, operands, axes, mesh, evaluate)

        return called(undivided, equation)

    # Computations of single replicas are not divided.
    return rewritten(function, replace, skipped=("shard_map",))


def _undivided(equation: JaxprEqn, operands: Sequence[jax.Array], axes: Any, mesh: Mesh,
               evaluate: Callable[[JaxprEqn, Sequence[jax.Array]], Any]) -> Any:
    arrays = [_whole_along(array, found, mesh) for array, found in zip(operands, axes, strict=False)]
    outputs = evaluate(equation, [*arrays, *operands[len(arrays):]])
    if equation.primitive.multiple_results:
        return outputs
    return _whole_along(outputs[0], axes[-1] if axes else [], mesh)


def _whole_along(array: jax.Array, axes: Collection[int], mesh: Mesh) -> jax.Array:
    spec = (None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(array.ndim))
    return constrained(array, NamedSharding(mesh, PartitionSpec(*spec))) if axes else array


def _whole_axes(name: str, equation: Any, mesh: Mesh) -> list[list[int]]:
    """Returns the axes that must stay whole: a list for each affected operand, and for the output last."""
    params = equation.params
    if name.startswith("scatter"):
        is_plain = sum(size > 1 for size in mesh.shape.values()) <= 1
        return [] if is_plain else _axes_of_scatter(params, equation.invars[2].aval.shape, mesh.size)
    if name == "conv_general_dilated":
        return _axes_of_convolution(params, [operand.aval.shape for operand in equation.invars])
    if name == "fft":
        ndim = equation.invars[0].aval.ndim
        return [list(range(ndim - len(params["fft_lengths"]), ndim))] * 2
    if name == "reduce":  # with a user's function
        return [list(params["dimensions"])] * (len(equation.invars) // 2)
    if name in _WINDOWS:
        windows = [axis for axis, size in enumerate(params["window_dimensions"]) if size > 1]
        return [windows] * 3 if name.startswith("select") else [windows] * 2
    return []


def _axes_of_scatter(params: Any, shape: tuple[int, ...], devices: int) -> list[list[int]]:
    """Returns the axes of the indices and of the updates that number the updates and may not divide evenly."""
    of_updates = [axis for axis in range(len(shape)) if axis not in params["dimension_numbers"].update_window_dims]
    uneven = [place for place, axis in enumerate(of_updates) if shape[axis] % devices]
    return [[], uneven, [of_updates[place] for place in uneven], []]


def _axes_of_convolution(params: Any, shapes: list[Any]) -> list[list[int]]:
    numbers = params["dimension_numbers"]
    axes = []
    for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec):
        axes.append([axis for axis, kernel_axis in zip(spec[2:], numbers.rhs_spec[2:], strict=True)
                     if shapes[1][kernel_axis] > 1])
    for groups, axis in ((params["feature_group_count"], numbers.lhs_spec[1]),
                         (params["batch_group_count"], numbers.lhs_spec[0])):
        if groups > 1:
            axes[0].append(axis)
            axes[1].append(numbers.rhs_spec[0])
            axes[2].append(numbers.out_spec[1])
    return axes


def _with_nan(equation: JaxprEqn, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns a maximum or minimum, as its only output, that is NaN if any operand is NaN."""
    found, = run(equation, operands)
    params = equation.params
    if equation.primitive.name.startswith("reduce"):
        has_nan = jnp.isnan(operands[0]).any(params["axes"])
    else:
        array, indices, updates = operands
        has_nan = jax.lax.scatter_max(
            jnp.isnan(array).astype(jnp.int32), indices, jnp.isnan(updates).astype(jnp.int32),
            params["dimension_numbers"], indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"], mode=params["mode"]) > 0
    return [jnp.where(has_nan, jnp.nan, found)]


def _is_of_softmax(equation: JaxprEqn, program: Sequence[Any]) -> bool:
    """Returns whether a maximum is subtracted from its operand before an exponential, as in a softmax."""
    # The sum of the exponentials keeps NaN, and compilers recognize a softmax by its unchanged operations.
    numbers, found, differences = equation.invars[0], set(equation.outvars), set()
    for other in program:
        inputs = [variable for variable in other.invars if not isinstance(variable, Literal)]
        if other.primitive.name == "sub" and other.invars[0] is numbers and found.intersection(inputs):
            differences.update(other.outvars)
        elif other.primitive.name == "exp" and differences.intersection(inputs):
            return True
        elif found.intersection(inputs):
            found.update(other.outvars)
    return False
