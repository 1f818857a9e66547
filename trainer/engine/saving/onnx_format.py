"""A prediction as an ONNX program.

Owns the conversion, by jax2onnx from traced JAX operations, and the comparison with the model before a file is written,
because a converter implements many operations itself.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.typing import DTypeLike

from trainer.core.compile.traces import equations
from trainer.core.files import replace_file
from trainer.engine.saving.prediction import Prediction, check_names, named, with_rows

# Tolerance between program and model: runtimes round differently, and wrong conversions deviate far more.
_RTOL, _ATOL = 1e-3, 1e-3
_CHECKED_ROWS = 3
_POOLS = ("reduce_window_max", "reduce_window_sum", "reduce_window_min")


def save(path: str, prediction: Prediction, batch_size: int | None, platforms: Sequence[str],
         jax2onnx: Any, onnx: Any, onnxruntime: Any) -> None:
    """Writes a prediction to a file, in one step.

    Args:
      path: path of the file.
      prediction: prediction to write.
      batch_size: rows of each batch; None for any number.
      platforms: not used, because ONNX's runtimes have their own platforms.
      jax2onnx, onnx, onnxruntime: these packages.

    Raises:
      ValueError: if the converter does not support an operation, or the program's results differ from the model's.
    """
    check_names(prediction)
    weights = [jax.numpy.asarray(array) for array in prediction.host_weights().values()]
    names = {argument: [name for name, _ in named(tree, what)] for argument, tree, what in (
        ("input_names", prediction.inputs, "x"), ("output_names", prediction.outputs, "outputs"))}

    def converted(rows: Any) -> Any:
        specs = prediction.input_specs(rows)
        # Traced beforehand, because the converter would replace functions of Flax during the trace.
        program = jax.make_jaxpr(lambda *inputs: prediction.function(weights, list(inputs)))(*specs)
        with quiet():
            return jax2onnx.to_onnx(lambda *inputs: tuple(_evaluated(program, inputs)), specs, model_name="predict",
                                    **names)

    model = with_rows(converted, batch_size, "ONNX")
    onnx.checker.check_model(model)
    content = model.SerializeToString()
    _check_computes_the_same(onnxruntime, content, prediction, batch_size)
    if jax.process_index() != 0:
        return
    replace_file(path, content)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the output and logs of a converter, and warnings of its use of other packages, in a block."""
    loggers = [logging.getLogger(name) for name in ("jax2onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
          warnings.catch_warnings()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL + 1)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _evaluated(program: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a traced program, with its calls inlined, and its pooling in fewer dimensions."""
    jaxpr = equations.jaxpr_of(program)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *values], strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in equations.CALLS:
            results = _evaluated(equations.program_of(equation), operands)
        elif name in _POOLS:
            results = [_pooled(equation, operands[0])]
        else:
            results = equations.run(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _pooled(equation: JaxprEqn, array: jax.Array | np.ndarray) -> Any:
    """Returns a pooling over images with rows and channels as one axis, because ONNX pools at most three axes."""
    params = {name: equation.params[name] for name in (
        "window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")}
    plain = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    inside = [axis for axis in range(array.ndim)
              if any(params[name][axis] != value for name, value in plain.items())]
    outside = [axis for axis in range(array.ndim) if axis not in inside]
    if len(outside) < 2:
        return equations.run(equation, [array])[0]
    order = [*outside, *inside]
    moved = jax.lax.transpose(array, order)
    merged = jax.lax.reshape(moved, (_product(moved.shape[:len(outside)]), *moved.shape[len(outside):]))
    changes = {name: (plain[name], *(params[name][axis] for axis in inside)) for name in params}
    result = equations.run(equation, [merged], **changes)[0]
    apart = jax.lax.reshape(result, (*moved.shape[:len(outside)], *result.shape[1:]))
    return jax.lax.transpose(apart, [order.index(axis) for axis in range(array.ndim)])


def _product(sizes: Sequence[Any]) -> Any:
    product = sizes[0]
    for size in sizes[1:]:
        product = product * size
    return product


def _check_computes_the_same(
    onnxruntime: Any, content: bytes, prediction: Prediction, batch_size: int | None
) -> None:
    """Raises ValueError if the results of a converted program differ from the model's."""
    rng = np.random.default_rng(0)
    for rows in (batch_size,) if batch_size is not None else (1, _CHECKED_ROWS):
        inputs = [_example(rng, (rows, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(prediction.inputs)]
        expected = prediction.function(list(prediction.weights.values()), inputs)
        try:
            session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
            names = [each.name for each in session.get_inputs()]
            found = session.run(None, dict(zip(names, inputs, strict=True)))
        except Exception as error:
            raise ValueError("The ONNX program that jax2onnx makes of the model does not run in onnxruntime. Export it "
                             f"in another format. {type(error).__name__}: {error}") from error
        for (name, _), one, other in zip(named(prediction.outputs, "outputs"), expected, found, strict=True):
            one = np.asarray(one)
            if one.shape != other.shape or not np.allclose(other.astype(np.float64), one.astype(np.float64),
                                                           rtol=_RTOL, atol=_ATOL, equal_nan=True):
                raise ValueError(f"The ONNX program that jax2onnx makes of the model computes other numbers: its "
                                 f"output {name!r} differs on {rows} random rows. Export it in another format.")


def _example(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns small numbers to compare with, because integers may be indices."""
    if np.issubdtype(np.dtype(dtype), np.integer) or np.dtype(dtype) == bool:
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)
