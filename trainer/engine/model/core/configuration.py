"""The configuration that `compile` gives a model, and the steps compiled for it.

Owns that a rejected argument changes nothing, and that no compiled step outlives the configuration it was traced with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax

from trainer.core import tree_paths
from trainer.core.modules.base import FunctionalModule
from trainer.core.replica_context import in_replica_context
from trainer.core.types import PyTree
from trainer.core.updates.spikes import SpikeRule
from trainer.engine.step.compile_options import CompileOptions, check_eager
from trainer.engine.step.compiled_loss import CompiledLoss
from trainer.engine.step.compiled_metrics import CompiledMetrics, CompileMetrics
from trainer.engine.step.compiled_phase import CompiledPhase
from trainer.engine.step.update_rules import check_names, make_update_rules, with_options
from trainer.metrics import Mean, Metric
from trainer.optimizers.named import NamedRules
from trainer.optimizers.update_rule import UpdateRule


class Configuration:
    """The loss, the metrics, the update rules and the options of a model, and its compiled steps.

    Attributes:
      is_compiled: whether `compile` was called.
      loss, metrics, options: as in `step`.
      rules: the update rules of the parameters; None without an optimizer.
      trainable: whether the default train step trains.
      penalties_are_used: whether a traced step has called `compute_penalties`; may be assigned.
      training_arguments: the `training` arguments of `apply` in a traced step; may be cleared.
      phases: the compiled steps, by "train", "test" and "predict".
      proofs: known facts about the rows of steps; see `engine/step/lowering.py`.
      input_casts: known casts of inputs; see `engine/step/input_casts.py`.
      forwards: the compiled calls of the model, by `training`; None for a call that cannot be compiled.
      given: the arguments of the last `compile`, by name.
      noted_loss: pending value of the loss metric, assigned on its first access; None for no value. May be assigned.
      changes: number of changes of the compiled steps.
      outputs_are_checked: whether the outputs were checked against the loss.
    """

    def __init__(self) -> None:
        self.is_compiled = False
        self.given: dict[str, Any] = {}
        self.loss, self.metrics = CompiledLoss(None), CompiledMetrics()
        self.options = CompileOptions()
        self.rules: UpdateRule | NamedRules | None = None
        self.trainable = True
        self.penalties_are_used = False
        self.training_arguments: set[bool | None] = set()
        self._tracked: list[Metric] = []
        self.noted_loss: float | None = None
        self.changes = 0
        self.forget_phases()

    def forget_phases(self) -> None:
        """Drops all compiled steps, so that the next run traces them again."""
        self.changes += 1
        self.phases: dict[str, CompiledPhase] = {}
        self.proofs: dict[Hashable, dict[int, Any]] = {}
        self.input_casts: dict[Hashable, Any] = {}
        self.forwards: dict[bool, Callable[..., Any] | None] = {}
        self.outputs_are_checked = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy. It has no compiled steps, which call the methods of this model."""
        made = object.__new__(Configuration)
        vars(made).update(vars(self))
        made.forget_phases()
        return vars(made)

    def compile(
        self, optimizer: Any, loss: Any, loss_weights: Any, metrics: Any, weighted_metrics: Any,
        options: CompileOptions, module: FunctionalModule, params: PyTree,
    ) -> None:
        """Sets the arguments of `compile`. On an error, nothing changes.

        Args:
          optimizer, loss, loss_weights, metrics, weighted_metrics: as in `Model.compile`.
          options: all other arguments.
          module: the module.
          params: the parameters, or their shapes; None before initialization.
        """
        compiled_loss = CompiledLoss(loss, loss_weights)
        compiled_metrics = CompiledMetrics(metrics, weighted_metrics, compiled_loss)
        rules = make_update_rules(optimizer, options, module.param_variables)
        if module.names:
            check_names(rules, module.names, "named module")
        if params is not None:
            _check_params(rules, options, params)
        self.is_compiled, self._tracked, self.noted_loss = True, [], None
        self.loss, self.metrics, self.rules, self.options = compiled_loss, compiled_metrics, rules, options
        self.forget_phases()

    def with_options(self, options: CompileOptions) -> Configuration:
        """Returns the same configuration with other options and without compiled steps."""
        made = Configuration()
        made.is_compiled, made.given, made.trainable = self.is_compiled, self.given, self.trainable
        made.loss, made.metrics, made.options = self.loss, self.metrics, options
        made.rules = with_options(self.rules, options)
        return made

    def set_trainable(self, value: bool) -> None:
        """Sets `trainable` for steps traced from now on."""
        self.trainable = value
        self.forget_phases()

    def set_eager(self, value: bool) -> None:
        """Sets `eager` for steps that run from now on; raises ValueError if it contradicts another option."""
        check_eager(value, self.options.deterministic)
        self.options = dataclasses.replace(self.options, eager=value)
        self._note_given(run_eagerly=value, jit_compile="auto")
        self.forget_phases()

    def set_skip_non_finite(self, value: bool) -> None:
        """Sets `skip_non_finite` for steps traced from now on."""
        self.options = dataclasses.replace(self.options, skip_non_finite=value)
        self._note_given(skip_non_finite=value)
        self.rules = with_options(self.rules, self.options)
        self.forget_phases()

    def set_spike_rule(self, value: SpikeRule | None) -> None:
        """Sets `spike_rule` for steps traced from now on."""
        self.options = dataclasses.replace(self.options, spike_rule=value)
        self.rules = with_options(self.rules, self.options)
        self.forget_phases()

    def _note_given(self, **changes: Any) -> None:
        """Updates the arguments for a `compile` with another optimizer."""
        if self.given:
            self.given = {**self.given, **changes}

    def check_weights(self, params: PyTree, model_state: PyTree) -> None:
        """Raises ValueError unless the weights have all names in the optimizers and in `freeze` and other patterns."""
        _check_params(self.rules, self.options, params)

    def tracked_metrics(self) -> list[Metric]:
        """Returns the metric of the loss and the metrics of `compile`; an empty list before `compile`."""
        if self.is_compiled and not self._tracked:  # on demand: metrics start JAX's backend
            self._tracked = [Mean(name="loss"), *([CompileMetrics(self.metrics)] if self.metrics.is_given else [])]
        if self._tracked and self.noted_loss is not None and not in_replica_context():  # a step has its own metrics
            with jax.transfer_guard("allow"):  # explicit user request
                for variable, number in zip(self._tracked[0].variables, (self.noted_loss, 1), strict=True):
                    variable.assign(number)
            self.noted_loss = None
        return self._tracked


def _check_params(rules: UpdateRule | NamedRules | None, options: CompileOptions, params: PyTree) -> None:
    check_names(rules, params, "top-level submodule")
    paths = tree_paths.named_leaves(params)
    for rule in rules.values() if isinstance(rules, NamedRules) else [] if rules is None else [rules]:
        rule.check_weights(paths)
    tree_paths.check_patterns("freeze", options.freeze, paths)
    tree_paths.check_patterns("regularizers", [pattern for pattern, _ in options.regularizers], paths)
