"""The metrics of a compiled model, matched to its outputs, and the names of their logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from trainer import losses, metrics
from trainer.core import configs, errors
from trainer.core.train_state import shapes_of
from trainer.core.types import PyTree
from trainer.engine.step.compiled_loss import CompiledLoss, is_within_rows
from trainer.engine.step.output_matching import match_arrays, match_choices, output_names
from trainer.engine.step.step_metrics import computed, updated
from trainer.losses.linear_logits import LinearLogits, leaves_of, with_shapes
from trainer.metrics import Metric, Variable
from trainer.metrics.adapted import parts
from trainer.metrics.arrays import full_weights
from trainer.metrics.base import MetricValue, is_builtin
from trainer.metrics.registry import check, highest_label, takes_class_indices


class Entry(NamedTuple):
    """A metric of an output.

    Attributes:
      log_name: the name of its log.
      metric: the metric.
      output: the index of the output.
      weighted: whether it uses sample weights.
      highest_label: the largest label that it takes; None for any labels.
    """

    log_name: str
    metric: Metric
    output: int
    weighted: bool
    highest_label: int | None


class CompiledMetrics:
    """The `metrics` and `weighted_metrics` of `compile`, resolved at the first batch.

    Args:
      plain: metrics that ignore sample weights: a list for all outputs, a dict by output name, or a list of lists.
      weighted: metrics that use sample weights, in the same form.
      loss: the model's loss: "crossentropy" takes logits if the loss of the same output does.

    Raises:
      TypeError: if either has another type, or contains an element that is not a metric.
      ValueError: if the name of a metric is unknown.

    Attributes:
      entries: the metrics with their outputs, in the order of their logs; empty until the first batch.
      label_limits: the entries of metrics that do not take all labels, with the largest label.
      outputs: the shapes of the outputs of the first batch.
    """

    def __init__(self, plain: Any = None, weighted: Any = None, loss: CompiledLoss | None = None):
        for argument, given in (("metrics", plain), ("weighted_metrics", weighted)):
            if given is not None and not isinstance(given, (list, tuple, Mapping)):
                raise errors.wrong_type(argument, given, "a list, or a dict by output name")
            for identifier in _flat(given):
                for part in parts(identifier):
                    check(part)
        self._plain, self._weighted, self._loss = plain, weighted, loss
        self.entries: list[Entry] = []
        self.label_limits: list[tuple[Entry, int]] = []
        self.outputs: Any = None

    def loss_of(self, entry: Entry) -> losses.Loss | None:
        """Returns the loss of a metric's output if the metric leaves out the labels that the loss leaves out."""
        if self._loss is None or not self._loss.is_of(self.outputs) or not takes_class_indices(entry.metric):
            return None
        return self._loss.per_output[entry.output].loss

    @property
    def metrics(self) -> list[Metric]:
        """The metrics in the order of their logs; empty until the first batch."""
        return [entry.metric for entry in self.entries]

    @property
    def by_log_name(self) -> dict[str, Metric]:
        """The metrics by the names of their logs; empty until the first batch."""
        return {entry.log_name: entry.metric for entry in self.entries}

    def why_of_batch(self) -> str | None:
        """Returns the reason, as a clause, why a metric may depend on the whole batch; None if all sum over rows."""
        for identifier in (*_flat(self._plain), *_flat(self._weighted)):
            of_rows = (isinstance(identifier, str) and identifier not in configs.with_custom_objects({})) or (
                isinstance(identifier, Metric) and is_builtin(identifier)
                and type(identifier) not in (metrics.MeanMetricWrapper, metrics.LossMetric))
            if not of_rows:
                name = getattr(identifier, "name", None) or errors.describe(identifier)
                return f"the metric {name} is the user's own"
            if not is_within_rows(getattr(identifier, "axis", -1)):
                return f"the metric {identifier.name} may be of the batch as a whole"
        return None

    @property
    def is_given(self) -> bool:
        """Whether there are any metrics."""
        return bool(self._plain or self._weighted)

    @property
    def directions(self) -> dict[str, str]:
        """The better direction, "max" or "min", of each log with a known direction."""
        return {entry.log_name: entry.metric.direction for entry in self.entries if entry.metric.direction}

    def values(self, y: PyTree, outputs: PyTree, sample_weight: PyTree = None) -> dict[str, MetricValue]:
        """Returns each metric's accumulators over the rows of the context, by log name.

        Raises:
          ValueError: if a name is unknown, or targets and outputs do not match a metric.
        """
        values = {}
        for entry, arguments in self.matched(y, outputs, sample_weight):
            with errors.named_in_errors("metric", entry.log_name, None, *arguments[:2]):
                accumulated = updated(entry.metric, entry.metric.stateless_reset_state(), *arguments)
            values[entry.log_name] = computed(MetricValue(accumulated, entry.metric))
        return values

    def matched(self, y: PyTree, outputs: PyTree, sample_weight: PyTree = None) -> list[tuple[Entry, tuple[Any, ...]]]:
        """Returns each metric with the arguments of its update; see `values`."""
        if not self._plain and not self._weighted:
            return []
        predictions = [each.array() if isinstance(each, LinearLogits) else each for each in leaves_of(outputs)]
        outputs = with_shapes(outputs)
        wanted = self.wanted(outputs)
        targets = match_arrays("y", y, outputs, wanted=wanted)
        weights = match_arrays("sample_weight", sample_weight, outputs, may_repeat=True, wanted=wanted)
        if self.outputs is None:
            # Metrics create their accumulators when they are built: concrete arrays, even while a step is being traced.
            with jax.ensure_compile_time_eval():
                self.entries = self._match(targets, outputs)
            self.label_limits = [
                (entry, entry.highest_label) for entry in self.entries if entry.highest_label is not None]
            self.outputs = shapes_of(outputs)
        matched = []
        for entry in self.entries:
            target, weight = targets[entry.output], weights[entry.output] if entry.weighted else None
            if target is None:
                raise _no_targets(entry.metric.name, output_names(outputs)[entry.output])
            weight = _without_ignored(self.loss_of(entry), target, predictions[entry.output], weight)
            arguments = (target, predictions[entry.output], *(() if weight is None else (weight,)))
            matched.append((entry, arguments))
        return matched

    def wanted(self, outputs: PyTree) -> list[bool]:
        """Returns which outputs need targets: outputs with a loss, or with a metric if the losses are for others."""
        if self._loss is not None and self._loss.is_of(outputs):
            return self._loss.wanted
        return [any(each) for each in zip(*(per_output for _, per_output in self._chosen(outputs)), strict=True)]

    def _chosen(self, outputs: PyTree) -> Iterator[tuple[bool, list[Any]]]:
        """Yields the metrics of each output: first the metrics that ignore weights, then the metrics that use them."""
        for weighted, given, argument in ((False, self._plain, "metrics"), (True, self._weighted, "weighted_metrics")):
            yield weighted, match_choices(argument, given, outputs, lambda choices, number: 1 < number == len(choices))

    def _match(self, targets: list[Any], outputs: PyTree) -> list[Entry]:
        names, predictions = output_names(outputs), jax.tree.leaves(outputs)
        of_outputs = [entry.loss for entry in self._loss.per_output] if self._loss else []
        entries: list[Entry] = []
        # Reserves the logs of the losses, which a metric of a function called `loss` must not replace.
        taken = {"loss", *(f"{name}_loss" for name in names)}
        for weighted, per_output in self._chosen(outputs):
            for index, (output_name, chosen) in enumerate(zip(names, per_output, strict=True)):
                if chosen is None:
                    continue
                for identifier in (part for each in (chosen if isinstance(chosen, (list, tuple)) else [chosen])
                                   for part in parts(each)):
                    if targets[index] is None:
                        raise _no_targets(identifier, output_name)
                    spec = jax.ShapeDtypeStruct(targets[index].shape, targets[index].dtype)
                    output_spec = jax.ShapeDtypeStruct(predictions[index].shape, predictions[index].dtype)
                    metric = metrics.resolve(identifier, spec, output_spec, of_outputs[index] if of_outputs else None,
                                             output_name)
                    name = _free_name(metric.name, output_name, weighted, taken)
                    taken.add(name)
                    highest = highest_label(metric, tuple(output_spec.shape))
                    entries.append(Entry(name, metric, index, weighted, highest))
        return entries


def _without_ignored(loss: losses.Loss | None, y_true: Any, y_pred: Any, weights: Any) -> Any:
    """Returns the weights of labels, with 0 for labels that a loss leaves out."""
    kept = None if loss is None else loss.mask(y_true, y_pred)
    return weights if kept is None else full_weights(kept, weights) * kept


def _flat(chosen: Any) -> Iterator[Any]:
    """Yields the metrics of a list, of a dict by output name, or of nested lists, without None."""
    if isinstance(chosen, Mapping):
        chosen = list(chosen.values())
    for item in chosen if isinstance(chosen, (list, tuple)) else () if chosen is None else (chosen,):
        if isinstance(item, (list, tuple, Mapping)) or item is None:
            yield from _flat(item)
        else:
            yield item


def _no_targets(metric: object, output_name: str | None) -> ValueError:
    return ValueError(f"There is the metric {metric!r} for output {output_name!r}, but `y` has no targets for it.")


def _free_name(name: str, output_name: str | None, weighted: bool, taken: set[str]) -> str:
    prefix = "" if output_name is None else f"{output_name}_"
    candidate = prefix + name
    if weighted and candidate in taken:
        candidate = f"{prefix}weighted_{name}"
    number, free = 0, candidate
    while free in taken:
        number += 1
        free = f"{candidate}_{number}"
    return free


class CompileMetrics(Metric, is_composite=True):
    """All metrics of `compile` as a single metric, which custom steps find in `model.metrics`, as in Keras."""

    def __init__(self, compiled: CompiledMetrics):
        super().__init__(name="compile_metrics")
        self._compiled = compiled

    @property
    def names(self) -> list[str]:
        """The names of the metrics, without the names of their outputs; empty until the first batch."""
        return [metric.name for metric in self._compiled.metrics]

    @property
    def variables(self) -> list[Variable]:
        return [variable for metric in self._compiled.metrics for variable in metric.variables]

    def update_state(self, y_true: PyTree, y_pred: PyTree, sample_weight: PyTree = None) -> None:
        """Updates each metric with its output."""
        for entry, arguments in self._compiled.matched(y_true, y_pred, sample_weight):
            with errors.named_in_errors("metric", entry.log_name, None, *arguments[:2]):
                entry.metric.update_state(*arguments)

    def result(self) -> dict[str, Any]:
        """Returns the results by log name."""
        return {name: metric.result() for name, metric in self._compiled.by_log_name.items()}

    def reset_state(self) -> None:
        """Resets each metric."""
        for metric in self._compiled.metrics:
            metric.reset_state()
