"""The computation of `predict`, as a pure function of weights and inputs that are lists of arrays.

Owns the choice of its weights, the number of rows of its trace, and the description of inputs and outputs in a file.
`export.py` and `formats.py` turn it into programs and files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from trainer.core import tree_paths
from trainer.core.ambient.jax_options import jax_config
from trainer.core.compile.jit import compiled
from trainer.core.replica_context import single_context
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data import pack_x_y_sample_weight
from trainer.engine.step.steps import predict_one_batch

T = TypeVar("T")

_LOCATIONS = "jax_traceback_in_locations_limit"
_locations_lock = threading.Lock()

DEFAULT_BATCH_SIZE = 32
# In JAX's errors about a symbol as a number; the last is JAX 0.12's about an iteration over so many rows.
_CONVERSIONS = ("_DimExpr", "in a context that requires a constant", "no attribute 'process_primitive'")
_FIX_OF_CONVERSIONS = ("Write `x.shape[0]` in place of `len(x)`, and do not pass it to `int`, `float`, `range` or "
                       "NumPy, nor iterate over `x`. Otherwise, pass")


@dataclasses.dataclass
class Prediction:
    """A predict step with a state, as a function of arrays.

    Attributes:
      function: compiled function from the list of weights and the list of input leaves to the list of output leaves.
      weights: Weights of the function, by name.
      inputs: tree of leaves with the inputs' shapes and dtypes.
      outputs: shapes of the outputs, a tree of `jax.ShapeDtypeStruct`, whose sizes may depend on the number of rows.
    """

    function: Any
    weights: dict[str, jax.Array]
    inputs: Any
    outputs: Any

    @property
    def weight_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the weights."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.weights.values()]

    def input_specs(self, rows: Any) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the input leaves for that number of rows."""
        return [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(self.inputs)]

    def host_weights(self) -> dict[str, np.ndarray]:
        """Returns copies of the weights on the host."""
        # Copies, because JAX keeps a fetched host copy as long as its array lives.
        return {name: np.asarray(jnp.copy(leaf)) for name, leaf in self.weights.items()}


def prediction_of(
    predict_step: Callable[[TrainState, Any], Any], state: TrainState, inputs: PyTree, batch_size: int | None, what: str
) -> Prediction:
    """Returns a prediction with only the weights that it reads, for example the generator's in a GAN.

    Args:
      predict_step: pure function from the state and a batch to outputs.
      state: state for the predict step; the optimizer and its state are not used.
      inputs: some rows of `x`, or their shapes.
      batch_size: number of rows of the trace; None for any number.
      what: purpose of the export, for errors.

    Raises:
      ValueError: if the predict step cannot be traced with these rows.
    """
    leaves, structure = jax.tree.flatten((state.params, state.model_state))
    names = [f"{part}{tree_paths.SEPARATOR}{name}" for part in ("params", "model_state")
             for name in tree_paths.named_leaves(getattr(state, part))]
    step, seed = int(state.step), int(state.seed)
    input_structure = jax.tree.structure(inputs)
    outputs: Any = None

    def predict_with(numbers: Sequence[int]) -> Any:
        """Returns the prediction as a compiled function of some of the weights and of the inputs."""
        def predict(weights: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
            nonlocal outputs
            given = dict(zip(numbers, weights, strict=True))
            params, model_state = jax.tree.unflatten(structure, [
                given[number] if number in given else jnp.zeros(leaf.shape, leaf.dtype)
                for number, leaf in enumerate(leaves)])
            here = TrainState(jnp.int32(step), params, model_state, None, jnp.uint32(seed))
            batch = pack_x_y_sample_weight(jax.tree.unflatten(input_structure, inputs))
            predictions = predict_one_batch(predict_step, single_context, here, batch)
            outputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)),
                                   predictions)
            return [jnp.asarray(leaf) for leaf in jax.tree.leaves(predictions)]

        return compiled(predict)

    every = Prediction(predict_with(range(len(leaves))), dict(zip(names, leaves, strict=True)), inputs, None)

    def reads(rows: Any) -> list[bool]:
        program = every.function.trace(every.weight_specs, every.input_specs(rows)).jaxpr.jaxpr
        return _reads(program)[:len(leaves)]

    used = [number for number, is_read in enumerate(with_rows(reads, batch_size, what)) if is_read]
    function = every.function if len(used) == len(leaves) else predict_with(used)
    return Prediction(function, {names[number]: leaves[number] for number in used}, inputs, outputs)


def with_rows(make: Callable[[Any], T], batch_size: int | None, what: str) -> T:
    """Returns the result of `make` for `batch_size` rows, or for JAX's symbol of any number if that is None.

    Raises:
      ValueError: if `make` fails; the message says so if a fixed number of rows would work.
    """
    try:
        return make(batch_size or any_rows())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if batch_size is None and _succeeds(lambda: make(DEFAULT_BATCH_SIZE)):
            fix = _FIX_OF_CONVERSIONS if any(text in reason for text in _CONVERSIONS) else "Pass"
            raise ValueError("The model cannot be exported for any number of rows, as its code needs to know how many "
                             f"there are. {fix} `batch_size={DEFAULT_BATCH_SIZE}`, say: `predict` of the loaded model "
                             f"then computes in batches of so many rows. {reason}") from error
        raise ValueError(f"The model cannot be exported for {what}. {reason}") from error


def exported_program(
    prediction: Prediction, batch_size: int | None, platforms: Sequence[str]
) -> jax.export.Exported:
    """Returns the program of a prediction, for some platforms; see `with_rows`."""
    def exported(rows: Any) -> jax.export.Exported:
        with without_source_locations():
            return jax.export.export(prediction.function, platforms=platforms)(
                prediction.weight_specs, prediction.input_specs(rows))

    return with_rows(exported, batch_size, ", ".join(platforms))


@contextlib.contextmanager
def without_source_locations() -> Iterator[None]:
    """Leaves the lines of Python and their paths, which differ between machines, out of programs made in the block."""
    with _locations_lock:  # the option is for all threads; programs that others compile meanwhile compute the same
        before = getattr(jax_config, _LOCATIONS)
        jax_config.update(_LOCATIONS, 0)
        try:
            yield
        finally:
            jax_config.update(_LOCATIONS, before)


def _reads(program: ClosedJaxpr) -> list[bool]:
    """Returns for each input of a jaxpr whether the jaxpr uses it."""
    read = {id(variable) for equation in program.eqns for variable in equation.invars} | set(map(id, program.outvars))
    return [id(variable) in read for variable in program.invars]


def _succeeds(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception:
        return False
    return True


# --- descriptions --------------------------------------------------------------------------------------------------


def describe_tree(tree: PyTree, name: str) -> Any:
    """Returns a tree of arrays or shapes for JSON, with None for the number of rows.

    Raises:
      TypeError: if the tree has containers other than dicts with string keys, lists and tuples.
    """
    if tree is None:
        return None
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: describe_tree(value, f"{name}[{key!r}]") for key, value in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [describe_tree(value, f"{name}[{index}]") for index, value in enumerate(tree)]}
    if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        raise TypeError(f"An exported model has arrays in dicts with strings as keys, lists and tuples as inputs and "
                        f"outputs. Received: `{name}` is of type {type(tree).__name__}. Convert it, outputs in an "
                        "overridden `predict_step`.")
    # A size of outputs may depend on the number of rows.
    sizes = [size if isinstance(size, int) else str(size) for size in tree.shape[1:]]
    return {"shape": [None, *sizes], "dtype": str(tree.dtype)}


def tree_of(described: Any, leaf: Callable[[list[Any], str], Any]) -> Any:
    """Returns the tree that was passed to `describe_tree`, with `leaf(sizes, dtype)` as leaves."""
    if described is None:
        return None
    if "dict" in described:
        return {key: tree_of(value, leaf) for key, value in described["dict"].items()}
    for kind in (list, tuple):
        if kind.__name__ in described:
            return kind(tree_of(value, leaf) for value in described[kind.__name__])
    return leaf(described["shape"], described["dtype"])


def any_rows() -> Any:
    """Returns JAX's symbol for any number of rows."""
    return jax.export.symbolic_shape("rows")[0]


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the names of the leaves of inputs, for messages: `x`, or `x['image']`."""
    return [f"x{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_names(prediction: Prediction) -> None:
    """Raises ValueError if two inputs or two outputs have the same name."""
    for tree, what in ((prediction.inputs, "x"), (prediction.outputs, "outputs")):
        names = [name for name, _ in named(tree, what)]
        if len(set(names)) != len(names):
            raise ValueError(f"Two arrays of `{what}` would have one name in the file: {', '.join(names)}. Rename the "
                             "keys of the dict.")


def named(tree: PyTree, what: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of inputs or outputs with names: "image" of a dict, "x_0" of a tuple, "x" of an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        if not keys:
            yield what, leaf
        else:
            yield "_".join(keys if isinstance(tree, dict) else [what, *keys]), leaf
