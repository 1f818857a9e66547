"""Checks before the first step of a run compiles: inputs against the module, labels and outputs against the loss."""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import numpy as np

from trainer import losses, metrics
from trainer.core import errors, replica_context
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.modules.base import FunctionalModule
from trainer.core.modules.named import UnnamedModuleError
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.arrays import Batch
from trainer.engine.step.compiled_loss import CompiledLoss
from trainer.engine.step.compiled_metrics import CompiledMetrics, Entry
from trainer.engine.step.output_matching import match_arrays
from trainer.engine.step.probabilities import are_ones, are_probabilities
from trainer.losses.base import BuiltinLoss
from trainer.metrics.base import is_builtin
from trainer.metrics.registry import for_logits, takes_class_indices, takes_half_for_yes
from trainer.metrics.variable import asks_for_value

_ROUNDING = 1e-3  # of labels that are floats
_OTHER_YES_OR_NO = "Give `y > 0` for labels of -1 and 1, or `y - 1` for labels of 1 and 2"

# Messages of Python, NumPy and JAX for `x["name"]`.
_OF_FEATURES = re.compile(r"contracting dimensions to have the same shape, got \((\d+),\) and \((\d+),\)")
_SHAPE = re.compile(r"shape \(([\d, ]*)\)")
_LACKS_ATTRIBUTE = re.compile(r'"(\w+)" object has no attribute "(\w+)"')  # of Flax
_OF_DICT = re.compile(r"\bdict\b")
_INDEXED_BY_NAME = re.compile("indices must be integers.* not str|only integers, slices.* valid ind|string indexing")


def check_inputs_of_rank_one(
    module: FunctionalModule, sample_inputs: Callable[[Batch], Any], batch: Batch, rows: Batch, built_on: PyTree
) -> None:
    """Raises ValueError if some inputs have a single number per row, and the module treats rows as features.

    The parameters would then match a single number of rows. A module that takes any number of rows may have such
    inputs, for example tokens.

    Args:
      sample_inputs: returns the module's inputs from a batch.
      rows: its first rows, used to initialize the module.
      built_on: the inputs of the initialization, if any.
    """
    x = unpack_x_y_sample_weight(batch)[0]
    flat = [f"x{jax.tree_util.keystr(path)}" for path, leaf in jax.tree_util.tree_leaves_with_path(x) if leaf.ndim == 1]
    # Only the user's own step knows the inputs of named modules, or of a model that was built on other kinds of inputs.
    if not flat or module.names or (built_on is not None and _ranks(built_on) != _ranks(sample_inputs(rows))):
        return

    def outputs_of_twice_the_rows() -> Any:
        key = jax.random.key(0)
        twice = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), rows)
        params, model_state, _ = module.init(key, sample_inputs(rows), module.initial_values)
        with replica_context.enter(replica_context.ReplicaContext(rows=jax.tree.leaves(twice)[0].shape[0])):
            return module.apply(
                params, model_state, sample_inputs(twice), training=False, make_key=lambda stream: key)[0]

    try:
        jax.eval_shape(outputs_of_twice_the_rows)
    except Exception as error:
        names, fixes = (", ".join(f"`{name}{suffix}`" for name in flat) for suffix in ("", "[:, None]"))
        advice = _hint_of_names(x, error) or (_hint_of_parts(x).strip() if _may_be_rows(x) else (
            f"There is one number per row in {names}. Pass {fixes} if the module takes features, or it takes the rows "
            f"for them.{_hint_of_parts(x)}"))
        raise ValueError(f"The module cannot take such `x`: a batch is {errors.describe(x)}. {advice} It raised "
                         f"{type(error).__name__}: {error}") from error


def explain_inputs(inputs: PyTree, error: Exception, input_names: Sequence[str] = ()) -> ValueError:
    """Returns an error about inputs for which a module raised `error` during initialization.

    Args:
      inputs: the inputs.
      error: the error.
      input_names: names of the inputs of the module's call; empty if unknown.
    """
    if asks_for_value(error):
        several = ""
        if isinstance(inputs, (dict, list, tuple)):  # which operations on one array convert
            several = f"`x` is no array: {errors.describe(inputs)}.{_hint_of_parts(inputs)} Otherwise: "
        return ValueError(
            f"{several}The call of the module asks for the value of an array, which has none while it is traced. "
            "Choose with `jnp.where` or `jax.lax.cond` in place of `if`, and compute with `jnp` in place of `np` and "
            "`float`. "
            f"{errors.see('traced-value')} It raised {type(error).__name__}: {error}")
    hint = (_hint_of_module(error) or _hint_of_names(inputs, error) or _hint_of_keys(inputs, error, input_names)
            or _hint_of_parts(inputs).strip())
    return ValueError(f"The module cannot take such `x`: {errors.describe(inputs)}.{hint and ' ' + hint} "
                      f"It raised {type(error).__name__}: {error}")


def _hint_of_module(error: Exception) -> str:
    """Returns a sentence for an error about a module that is written as in another library, or an empty string."""
    if isinstance(error, flax.errors.AssignSubModuleError):
        return "A `__call__` that makes layers needs `@nn.compact` above it; or `setup` makes them."
    text = str(error) if isinstance(error, (TypeError, AttributeError)) else ""
    if "is not a callable object" in text:
        return "A module needs a `__call__`, which returns its outputs, in place of a `forward` or `call`."
    if "unexpected keyword argument 'parent'" in text:
        return ("A Linen module has no `__init__`: write its arguments as fields, `units: int`, and its layers in "
                "`setup(self)`, or in a `__call__` with `@nn.compact`.")
    if (lacking := _LACKS_ATTRIBUTE.match(text)) and _defines_build(error, lacking[1]):
        return (f"Flax does not call `build`: make {lacking[2]!r} in `setup(self)`, or by `self.param` in a `__call__` "
                "with `@nn.compact`, which knows the shape of its inputs.")
    if sizes := _OF_FEATURES.search(text):
        return (f"A layer of the module was made for {sizes[2]} features, and gets {sizes[1]}: write "
                f"`nnx.Linear({sizes[1]}, ...)`, or give other features.")
    return ""


def _defines_build(error: Exception, class_name: str) -> bool:
    """Returns whether the Linen module of that name, in whose call an error was raised, has a method `build`."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(type(owner).__name__ == class_name and hasattr(type(owner), "build") for owner in owners)


def _hint_of_keys(inputs: PyTree, error: Exception, input_names: Sequence[str]) -> str:
    """Returns a sentence for a dict that a module takes for an array, as its keys are no inputs, or an empty string."""
    if not isinstance(inputs, dict) or not input_names or not isinstance(error, (TypeError, AttributeError)) or (
            not _OF_DICT.search(str(error))):
        return ""
    known, others = (", ".join(map(repr, names)) for names in (
        input_names, [name for name in inputs if name not in input_names]))
    return others and (
        f"The keys of `x` must be the inputs of the module's call: {known}. Received: {others}. Rename them or leave "
        "them out; for one input give its array in place of a dict.")


def _hint_of_names(inputs: PyTree, error: Exception) -> str:
    """Returns a sentence for an error about the names of inputs, or an empty string."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(inputs, dict) and isinstance(name, str) and name not in inputs:
        return f"`x` has no {name!r}. {errors.near_hint(name, map(str, inputs))}"
    if isinstance(error, (TypeError, IndexError)) and _INDEXED_BY_NAME.search(str(error)):
        return ("If the module reads `x` by names, give a dict of arrays: `x={\"size\": sizes}`, or "
                "`Dataset.from_columns(data, x={\"size\": \"size\"})`.")
    return ""


def _hint_of_parts(inputs: PyTree) -> str:
    """Returns a sentence for an error about inputs that may be a whole batch, with targets, or an empty string."""
    if isinstance(inputs, (tuple, list)) and len(inputs) > 1:
        rows = " If each of its arrays is a row, pass `np.stack(x)`." if _may_be_rows(inputs) else ""
        return (f" A {type(inputs).__name__} given as `x` is {len(inputs)} inputs.{rows} If it is inputs and targets, "
                "give them apart, as in `fit(x, y)`, and data to validate on as `validation_data=(x, y)`. If it is "
                "batches, give a list of tuples: `[(x, y), ...]`, or `[(x,), ...]` without targets.")
    if isinstance(inputs, dict):
        return (" A dict is all inputs. If some of it are targets, yield `(batch[\"image\"], batch[\"label\"])`, with "
                "the names of yours.")
    return ""


def _may_be_rows(inputs: PyTree) -> bool:
    """Returns whether inputs are several arrays of one shape and dtype, such as observations of an environment."""
    return isinstance(inputs, (tuple, list)) and len(inputs) > 1 and all(
        hasattr(leaf, "shape") for leaf in inputs) and len({(leaf.shape, leaf.dtype) for leaf in inputs}) == 1


def _ranks(inputs: PyTree) -> list[tuple[str, int]]:
    return [(jax.tree_util.keystr(path), len(leaf.shape))
            for path, leaf in jax.tree_util.tree_leaves_with_path(inputs)]


def explain_other_inputs(inputs: PyTree, built_on: PyTree, error: Exception) -> None:
    """Raises ValueError from `error` if inputs have other keys or other row shapes than a model was built on.

    If their number of rows differs, which changed the shapes of weights, `error` gets a note.
    """
    if isinstance(error, UnnamedModuleError):
        return
    received, built = ([
        f"{jax.tree_util.keystr(path)} {leaf.shape[1:]}".strip()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)] for tree in (inputs, built_on))
    if received != built:
        shown = ", ".join(received[:errors.MAX_ITEMS]) + (", ..." if len(received) > errors.MAX_ITEMS else "")
        are_rows = [leaf.shape for leaf in jax.tree.leaves(inputs)] == [
            leaf.shape[1:] for leaf in jax.tree.leaves(built_on)]
        why = (" It has the shape of a single row: a batch of one row is `x[None]`." if are_rows else
               f"{_hint_of_parts(inputs)} Give such rows, or make another model. It raised {type(error).__name__}: "
               f"{error}")
        raise ValueError(f"`x` has rows of shape {shown}, but the model was built on rows of shape "
                         f"{', '.join(built)}, and cannot take others.{why}") from error
    if not isinstance(error, flax.errors.ScopeParamShapeError):
        return
    rows, built_rows = ([leaf.shape[:1] for leaf in jax.tree.leaves(tree)] for tree in (inputs, built_on))
    shapes = [shape.split(", ") for shape in _SHAPE.findall(str(error))[:2]]  # of the module, and of the state
    if sum(len(set(sizes)) > 1 for sizes in itertools.zip_longest(*shapes)) > 1:
        error.add_note("The state has a parameter of another shape than the module: it was replaced after the model "
                       "was built, or the module's arguments were.")
    elif rows != built_rows:
        error.add_note("The model was built on inputs of the same shape with another number of rows, so the module "
                       "takes rows for features. If it flattens its inputs, write `x.reshape(x.shape[0], -1)` in "
                       "place of `x.flatten()`, `x.ravel()`, or a number of rows such as 32.")


def check_labels(
    compiled_loss: CompiledLoss, compiled_metrics: CompiledMetrics, y: PyTree, sample_weight: PyTree = None
) -> None:
    """Raises ValueError for a label that a loss or a metric of this package would take for another, or for a mistake.

    Such labels are class indices, which number the model's outputs, or 0 and 1. Labels of weight 0 do not count.

    Args:
      compiled_loss: the losses, matched to the model's outputs.
      compiled_metrics: the metrics, matched likewise.
      y: the targets on the host; additional leading axes are allowed.
      sample_weight: their weights, likewise.
    """
    if y is not None and compiled_loss.label_limits:
        targets, weights = _matched(y, sample_weight, compiled_loss.outputs, compiled_loss.wanted)
        for index, loss, highest in compiled_loss.label_limits:
            label = _label_outside(targets[index], highest, [loss], weights[index])
            if label is not None:
                raise ValueError(_wrong_label_of_loss(loss, label, highest))
    if y is not None and compiled_metrics.label_limits:
        outputs = compiled_metrics.outputs
        targets, weights = _matched(y, sample_weight, outputs, compiled_metrics.wanted(outputs))
        for entry, highest in compiled_metrics.label_limits:
            weight = weights[entry.output] if entry.weighted else None
            ignoring = [compiled_metrics.loss_of(entry), entry.metric, getattr(entry.metric, "loss", None)]
            label = _label_outside(targets[entry.output], highest, ignoring, weight)
            if label is not None:
                raise ValueError(_wrong_label_of_metric(entry.metric, label, highest))


def _matched(y: PyTree, sample_weight: PyTree, outputs: PyTree, wanted: list[bool]) -> tuple[list[Any], list[Any]]:
    return (match_arrays("y", y, outputs, wanted=wanted),
            match_arrays("sample_weight", sample_weight, outputs, may_repeat=True, wanted=wanted))


def _label_outside(labels: Any, highest: int, ignoring: list[Any], weights: Any) -> float | None:
    """Returns a label below 0 or above `highest` that counts: of a weight other than 0, not `ignore_class`; or None."""
    if labels is None or not labels.size or labels.dtype == bool or (
            labels.min() >= -_ROUNDING and labels.max() <= highest + _ROUNDING):
        return None
    is_outside = (labels < -_ROUNDING) | (labels > highest + _ROUNDING)
    for each in ignoring:
        if (ignored := getattr(each, "ignore_class", None)) is not None:
            is_outside &= labels != ignored
    if weights is not None:
        is_outside &= weights.reshape(weights.shape[:labels.ndim] + (1,) * (labels.ndim - weights.ndim)) != 0
    outside = labels[is_outside]
    return float(outside[0]) if outside.size else None


def _wrong_label_of_loss(loss: losses.Loss, label: float, highest: int) -> str:
    if not loss.sparse_labels:
        return (f"`y` has the label {label:g}, but the labels of {loss.name!r} are 0 for no, 1 for yes, or numbers "
                f"between. {_OTHER_YES_OR_NO}, or use the loss \"hinge\" for labels of -1 and 1.")
    return (f"`y` has the label {label:g}, but the model has {highest + 1} outputs per row, for the labels 0 to "
            f"{highest} of {loss.name!r}. Make the last layer larger, number the labels from 0, or give "
            "`ignore_class`.")


def _wrong_label_of_metric(metric: metrics.Metric, label: float, highest: int) -> str:
    begin = f"`y` has the label {label:g}, which the metric {metric.name!r} would count wrong: its labels are "
    if highest == 1 and not takes_class_indices(metric):
        return (f"{begin}0 for no and 1 for yes. {_OTHER_YES_OR_NO}. For targets that are numbers, use a metric such "
                "as \"mae\".")
    return (f"{begin}0 to {highest}. Number the labels from 0. To leave labels out, use the loss "
            "SparseCategoricalCrossentropy(ignore_class=...), or give them the weight 0 and the metric in "
            "`weighted_metrics`.")


def check_outputs(
    compiled_loss: CompiledLoss, compiled_metrics: CompiledMetrics, y: PyTree, compute: Callable[[], Any],
    trace: Callable[[], Any] | None,
) -> None:
    """Raises ValueError for a loss or a metric that does not suit the model's outputs, if that can be determined.

    Warns of probabilities in place of logits, with which a model is trained, but slowly.

    Args:
      compiled_loss: the losses, matched to the model's outputs.
      compiled_metrics: the metrics, matched likewise.
      y: targets of some rows.
      compute: returns the model's outputs for these rows; called only if a check needs their values.
      trace: returns the program of `compute`, a `ClosedJaxpr`, whose proofs replace checks of values; None without it.
    """
    takes_probabilities = _take_probabilities(compiled_loss, compiled_metrics)
    of_logits = [] if trace is None else _takers_of_logits(compiled_loss, compiled_metrics)
    at_half = _split_at_half(compiled_loss, compiled_metrics)
    proven: list[bool] = []
    if trace is not None and (takes_probabilities or of_logits or at_half):
        # A custom step may give the module other inputs, which is not a reason to refuse it for a warning.
        with contextlib.nullcontext() if takes_probabilities else contextlib.suppress(Exception):
            program = trace()
            proven = are_probabilities(program)
            if any(proven) and any(are_ones(program)):
                warnings.warn("The model ends with a softmax over a single output, which is 1 for every row. End it "
                              "with `nn.Dense(1)` and `nn.sigmoid` for yes or no, or with an output for each class.",
                              stacklevel=user_stacklevel())
    for kind, name, output in of_logits:
        if len(proven) == len(compiled_loss.per_output or proven) and proven[output]:
            warnings.warn(
                f"The {kind} {name!r} has from_logits=True, but the model ends with a softmax or sigmoid, whose "
                "outputs are probabilities. Leave the softmax or sigmoid out, or use from_logits=False. "
                f"{errors.see('logits')}", stacklevel=user_stacklevel())
    if proven and all(proven):
        takes_probabilities, at_half = False, []
    is_required = takes_probabilities or any(map(_is_custom_sum, compiled_metrics.metrics))
    if not is_required and not at_half:
        return
    with contextlib.nullcontext() if is_required else contextlib.suppress(Exception):
        outputs = compute()
        _warn_of_split_logits(at_half, outputs)
        if is_required:
            is_of_outputs = compiled_loss.is_of(outputs)  # or of outputs that an overridden `compute_loss` has selected
            _check_probabilities(compiled_loss if is_of_outputs else None, compiled_metrics, outputs)
            _check_metrics(compiled_metrics, y, outputs)


def _take_probabilities(compiled_loss: CompiledLoss, compiled_metrics: CompiledMetrics) -> bool:
    return compiled_loss.expects_probabilities or any(map(_takes_probabilities, compiled_metrics.metrics))


def _takers_of_logits(
    compiled_loss: CompiledLoss, compiled_metrics: CompiledMetrics
) -> list[tuple[str, str, int]]:
    """Returns the kind, the name and the output of each loss and metric that takes logits."""
    taking = [("loss", entry.loss.name, index) for index, entry in enumerate(compiled_loss.per_output)
              if isinstance(entry.loss, BuiltinLoss) and getattr(entry.loss, "from_logits", False)]
    return taking + [("metric", entry.metric.name, entry.output) for entry in compiled_metrics.entries
                     if is_builtin(entry.metric) and entry.metric.get_config().get("from_logits", False)]


def _split_at_half(compiled_loss: CompiledLoss, compiled_metrics: CompiledMetrics) -> list[Entry]:
    """Returns the metrics that take 0.5 for the border of yes and no, where the loss does not say if it is."""
    own = [not isinstance(entry.loss, BuiltinLoss) for entry in compiled_loss.per_output]
    return [entry for entry in compiled_metrics.entries
            if takes_half_for_yes(entry.metric) and (not own or own[entry.output])]


def _warn_of_split_logits(metrics_at_half: list[Entry], outputs: PyTree) -> None:
    leaves = jax.tree.leaves(outputs)
    for entry in metrics_at_half:
        values = np.asarray(leaves[entry.output], np.float32)
        if _are_outside_of_probabilities(values):
            warnings.warn(
                f"The metric {entry.metric.name!r} takes predictions above 0.5 for yes, and the model's outputs go "
                f"from {values.min():.3g} to {values.max():.3g}: they look like logits, where values above 0 mean "
                f"yes. Use {for_logits(entry.metric)}. {errors.see('logits')}", stacklevel=user_stacklevel())


def _are_outside_of_probabilities(values: np.ndarray) -> bool:
    return bool((values < -1e-3).any() or (values > 1 + 1e-3).any())


def _check_probabilities(compiled_loss: CompiledLoss | None, compiled_metrics: CompiledMetrics,
                         outputs: PyTree) -> None:
    """Raises ValueError if outputs that a loss or a metric treats as probabilities are outside of [0, 1]."""
    leaves = jax.tree.leaves(outputs)
    taking = [] if compiled_loss is None else [("loss", loss.name, output) for (_, loss, *_), output in zip(
        compiled_loss.per_output, leaves, strict=True) if loss is not None and loss.expects_probabilities]
    taking += [("metric", entry.metric.name, leaves[entry.output]) for entry in compiled_metrics.entries
               if _takes_probabilities(entry.metric)]
    for kind, name, output in taking:
        values = np.asarray(output, np.float32)
        if _are_outside_of_probabilities(values):
            raise ValueError(
                f"The {kind} {name!r} expects probabilities, but the model's outputs (shape {values.shape}) go from "
                f"{values.min():.3g} to {values.max():.3g}: they look like logits. Use the {kind}'s class with "
                f"from_logits=True, or end the model with a softmax or sigmoid. {errors.see('logits')}")


def _check_metrics(compiled_metrics: CompiledMetrics, y: PyTree, outputs: PyTree) -> None:
    """Raises ValueError for a custom metric whose per-step variables do not add up."""
    if not compiled_metrics.is_given:
        return
    targets = match_arrays("y", y, outputs, wanted=compiled_metrics.wanted(outputs))
    predictions = jax.tree.leaves(outputs)
    for entry in compiled_metrics.entries:
        metric, rows = entry.metric, (targets[entry.output], predictions[entry.output])
        if rows[0] is None or not _is_custom_sum(metric):
            continue
        once = metric.stateless_update_state(metric.stateless_reset_state(), *rows)
        twice = metric.stateless_update_state(once, *rows)
        if not all(np.allclose(2 * np.asarray(one), two, rtol=1e-3, equal_nan=True)
                   for one, two in zip(once, twice, strict=True)):
            raise ValueError(
                f"The metric {metric.name!r} does not accumulate by adding: two updates with the same rows do not "
                "give twice the variables of one update, so several steps cannot be summed. Set `additive = False` "
                "in its class, and override `merge_variables` to merge two parts of the data.")


def _takes_probabilities(metric: metrics.Metric) -> bool:
    if isinstance(metric, metrics.LossMetric):
        return metric.loss.expects_probabilities
    takes_either = isinstance(metric, (metrics.AUC, metrics.ExpectedCalibrationError))
    return takes_either and not metric.get_config()["from_logits"]


def _is_custom_sum(metric: metrics.Metric) -> bool:
    return metric.additive and not is_builtin(metric)
