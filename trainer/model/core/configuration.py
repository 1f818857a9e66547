"""What `compile` configures of a model, and the steps that were compiled for it.

Owns that nothing changes when an argument is rejected, and that no compiled step outlives the configuration that it was
traced with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from trainer.core import tree_paths
from trainer.core.errors import see
from trainer.core.replica_context import in_replica_context
from trainer.core.types import PyTree
from trainer.metrics import Mean, Metric
from trainer.optimizers.named import NamedRules
from trainer.optimizers.update_rule import UpdateRule
from trainer.step.compile_options import CompileOptions, check_eager
from trainer.step.compiled_loss import CompiledLoss
from trainer.step.compiled_metrics import CompiledMetrics, CompileMetrics
from trainer.step.compiled_phase import CompiledPhase
from trainer.step.update_rules import check_names, make_update_rules, with_options


class Configuration:
    """The loss, the metrics, the update rules and the options of a model, and its compiled steps.

    Attributes:
      is_compiled: whether `compile` was called.
      loss, metrics, options: as in `step`.
      rules: how gradients update the parameters; None without an optimizer.
      trainable: whether the default train step trains.
      penalties_are_used: whether a step that was traced has called `compute_penalties`; may be assigned.
      phases: the compiled steps, by "train", "test" and "predict".
      proofs: what is known of the rows of steps; see `step/lowering.py`.
      forwards: the compiled calls of the model, by whether they are part of training; None where a call cannot be.
      given: the arguments of the last `compile`, by name.
      noted_loss: what the metric of the loss is to be given when it is asked for; None for nothing. May be assigned.
      changes: how often what steps compute has changed.
      outputs_are_checked: whether the outputs were seen to fit the loss.
    """

    def __init__(self) -> None:
        self.is_compiled = False
        self.given: dict[str, Any] = {}
        self.loss, self.metrics = CompiledLoss(None), CompiledMetrics()
        self.options = CompileOptions()
        self.rules: UpdateRule | NamedRules | None = None
        self.trainable = True
        self.penalties_are_used = False
        self._tracked: list[Metric] = []
        self.noted_loss: float | None = None
        self.changes = 0
        self.forget_phases()

    def forget_phases(self) -> None:
        """Lets go of all compiled steps: the next run traces them again."""
        self.changes += 1
        self.phases: dict[str, CompiledPhase] = {}
        self.proofs: dict[Hashable, dict[int, Any]] = {}
        self.forwards: dict[bool, Callable[..., Any] | None] = {}
        self.outputs_are_checked = False

    def compile(
        self, optimizer: Any, loss: Any, loss_weights: Any, metrics: Any, weighted_metrics: Any,
        options: CompileOptions, names: Sequence[str], params: PyTree,
    ) -> None:
        """Takes what a model is compiled with, or leaves all as it was and raises.

        Args:
          optimizer: as in `Model.compile`; so are the next four.
          loss: see `optimizer`.
          loss_weights: see `optimizer`.
          metrics: see `optimizer`.
          weighted_metrics: see `optimizer`.
          options: the rest of the arguments.
          names: those of a dict of modules; empty for a single module.
          params: the parameters, or their shapes; None if there are none yet.
        """
        compiled_loss = CompiledLoss(loss, loss_weights)
        compiled_metrics = CompiledMetrics(metrics, weighted_metrics, compiled_loss)
        rules = make_update_rules(optimizer, options)
        if names:
            check_names(rules, names, "named module")
        if params is not None:
            _check_params(rules, options, params)
        self.is_compiled, self._tracked, self.noted_loss = True, [], None
        self.loss, self.metrics, self.rules, self.options = compiled_loss, compiled_metrics, rules, options
        self.forget_phases()

    def with_options(self, options: CompileOptions) -> Configuration:
        """Returns the same configuration with other options, and no compiled steps."""
        made = Configuration()
        made.is_compiled, made.given, made.trainable = self.is_compiled, self.given, self.trainable
        made.loss, made.metrics, made.options = self.loss, self.metrics, options
        made.rules = with_options(self.rules, options)
        return made

    def set_trainable(self, value: bool) -> None:
        """Sets `trainable`, for steps that are traced from now on."""
        self.trainable = value
        self.forget_phases()

    def set_eager(self, value: bool) -> None:
        """Sets that option, for steps that run from now on.

        Raises:
          ValueError: if it contradicts another option.
        """
        check_eager(value, self.options.deterministic)
        self.options = dataclasses.replace(self.options, eager=value)
        self._note_given(run_eagerly=value, jit_compile="auto")
        self.forget_phases()

    def set_skip_non_finite(self, value: bool) -> None:
        """Sets that option, for steps that are traced from now on."""
        self.options = dataclasses.replace(self.options, skip_non_finite=value)
        self._note_given(skip_non_finite=value)
        self.rules = with_options(self.rules, self.options)
        self.forget_phases()

    def _note_given(self, **changes: Any) -> None:
        """Notes what `compile` is to be called with where it is called again for another optimizer."""
        if self.given:
            self.given = {**self.given, **changes}

    def check_weights(self, params: PyTree, model_state: PyTree) -> None:
        """Raises ValueError unless there are the names that optimizers, `freeze` and other patterns are given for."""
        _check_params(self.rules, self.options, params)

    def tracked_metrics(self) -> list[Metric]:
        """Returns the metrics of the loss and of `compile`; none before `compile`."""
        if self.is_compiled and not self._tracked:  # not before they are asked for: they start JAX's backend
            self._tracked = [Mean(name="loss"), *([CompileMetrics(self.metrics)] if self.metrics.is_given else [])]
        if self._tracked and self.noted_loss is not None and not in_replica_context():  # a step has metrics of its own
            with jax.transfer_guard("allow"):  # the user asks for it
                for variable, number in zip(self._tracked[0].variables, (self.noted_loss, 1), strict=True):
                    variable.assign(number)
            self.noted_loss = None
        return self._tracked

    def require_compiled(self, method: str) -> None:
        """Raises RuntimeError before `compile`."""
        if not self.is_compiled:
            raise RuntimeError(f"Call `compile(optimizer, loss)` before `{method}`. {see('not-compiled')}")


def _check_params(rules: UpdateRule | NamedRules | None, options: CompileOptions, params: PyTree) -> None:
    check_names(rules, params, "top-level submodule")
    paths = tree_paths.named_leaves(params)
    tree_paths.check_patterns("freeze", options.freeze, paths)
    tree_paths.check_patterns("regularizers", [pattern for pattern, _ in options.regularizers], paths)
