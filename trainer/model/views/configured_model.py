"""What `compile` configured of a model, as users read and set it.

Owns what setting one of it means. What a configuration is, and what it does to the state, is in `model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import jax
import numpy as np

from trainer.compile.entry_points import with_entry_points
from trainer.metrics import Metric
from trainer.model.core.model_core import ModelCore
from trainer.optimizers.attached_optimizer import AttachedOptimizer


@with_entry_points
class ConfiguredModel:
    """The part of `Model` that is about what `compile` was given."""

    _core: ModelCore

    @property
    def optimizer(self) -> Any:
        """The optimizer with its learning rate, which can be read and set; a dict of them for named modules.

        Setting it is the same as to call `compile` with another optimizer and all else as before: the weights stay, and
        the optimizer's state begins.

        Raises:
          RuntimeError: from setting it before `compile`, or while the model is running.
        """
        return self._core.state.attached_optimizer()

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._core.configuration.require_compiled("model.optimizer = ...")
        cast(Any, self).compile(**{**self._core.configuration.given, "optimizer": _detached(value)})

    @property
    def loss(self) -> Any:
        """What `compile` was given as `loss`; None before. To change it, call `compile`."""
        return self._core.configuration.given.get("loss")

    @loss.setter
    def loss(self, value: Any) -> NoReturn:
        raise _is_compiled("loss")

    @property
    def metrics(self) -> list[Metric]:
        """All metrics, as in Keras: the loss's, that of all metrics of `compile`, and those that are attributes.

        A step of your own may update them and return `{metric.name: metric.result() for metric in self.metrics}`. To
        change what `compile` was given, call it again.
        """
        return [*self._core.configuration.tracked_metrics(),
                *(value for value in vars(self).values() if isinstance(value, Metric))]

    @metrics.setter
    def metrics(self, value: Any) -> NoReturn:
        raise _is_compiled("metrics")

    @property
    def metrics_names(self) -> list[str]:
        """The names of `metrics`. As in Keras 3, all metrics of `compile` are one, "compile_metrics"."""
        return [metric.name for metric in self.metrics]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of `metrics` by the names of their logs: of the last validation or epoch, or of a step.

        In a step of your own, they are what the step returns as logs. Losses of single outputs are in the logs alone.
        """
        results: dict[str, Any] = {}
        for metric in self.metrics:
            result = metric.result()
            results.update(result if isinstance(result, Mapping) else {metric.name: result})
        return {name: _as_number(result) for name, result in results.items()}

    def reset_metrics(self) -> None:
        """Resets the state of all `metrics`. Those that steps update begin again with each epoch by themselves."""
        for metric in self.metrics:
            metric.reset_state()

    @property
    def run_eagerly(self) -> bool:
        """Whether steps run uncompiled. Setting it keeps the optimizer's state; the next `compile` sets it again.

        Raises:
          RuntimeError: from setting it while the model is running.
          ValueError: from setting it to True with `compile(deterministic=True)`.
        """
        return self._core.configuration.options.eager

    @run_eagerly.setter
    def run_eagerly(self, value: bool) -> None:
        if bool(value) != self.run_eagerly:
            self._core.run.check_is_idle("Set `run_eagerly`")
            self._core.configuration.set_eager(bool(value))

    @property
    def jit_compile(self) -> bool:
        """Whether steps are compiled: the opposite of `run_eagerly`."""
        return not self.run_eagerly

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self.run_eagerly = not value  # "auto" compiles

    @property
    def trainable(self) -> bool:
        """Whether the default `train_step` trains, and BatchNorm moves its averages. Setting it compiles again."""
        return self._core.configuration.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._core.run.check_is_idle("Set `trainable`")
        self._core.configuration.set_trainable(bool(value))

    @property
    def skip_non_finite(self) -> bool:
        """Whether updates with gradients that are not finite are left out. Setting it compiles the train step again.

        The optimizer's state stays. The next `compile` sets it again.
        """
        return self._core.configuration.options.skip_non_finite

    @skip_non_finite.setter
    def skip_non_finite(self, value: bool) -> None:
        if value != self.skip_non_finite:
            self._core.run.check_is_idle("Set `skip_non_finite`")
            self._core.configuration.set_skip_non_finite(bool(value))
            self._core.state.take_over_rules()


def _detached(optimizer: Any) -> Any:
    """Returns the optimizer of a value of `model.optimizer`, of this model or another; all else as it is."""
    if isinstance(optimizer, Mapping):
        return {name: _detached(part) for name, part in optimizer.items()}
    return optimizer.optimizer if isinstance(optimizer, AttachedOptimizer) else optimizer


def _is_compiled(name: str) -> AttributeError:
    return AttributeError(f"`{name}` of a model is what `compile` was given, and cannot be set: the steps are compiled "
                          f"with it. Call `compile(..., {name}=...)`. An attribute of your own needs another name.")


def _as_number(result: Any) -> Any:
    is_value = isinstance(result, (jax.Array, np.generic)) and not isinstance(result, jax.core.Tracer)
    return float(result) if is_value and np.ndim(result) == 0 else result
