"""Types of the arguments of `Model.compile` and `Model.fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import optax

from trainer.callbacks import CallbackList
from trainer.callbacks.base.callback import Callback
from trainer.core.precision import Policy
from trainer.losses import Loss
from trainer.metrics import Metric
from trainer.optimizers import Optimizer

if TYPE_CHECKING:
    from flax import linen as nn
    from flax import nnx  # slow to import

Layer: TypeAlias = "nn.Module | nnx.Module | Callable[..., Any]"
ModuleLike: TypeAlias = "Layer | Sequence[Layer] | Mapping[str, Layer | Sequence[Layer]]"
"""A Linen or NNX module, a function of the inputs, a list of layers, or a dict of these by name."""

OptimizerLike: TypeAlias = str | Optimizer | optax.GradientTransformation | optax.MultiSteps
Optimizers: TypeAlias = OptimizerLike | Mapping[str, OptimizerLike]

LossLike: TypeAlias = str | Loss | type[Loss] | Callable[[Any, Any], Any]
Losses: TypeAlias = LossLike | Sequence[LossLike | None] | Mapping[str, LossLike | None]
LossWeights: TypeAlias = float | Sequence[float] | Mapping[str, float]

MetricLike: TypeAlias = str | Metric | type[Metric] | Loss | Callable[[Any, Any], Any]
MetricsOfOutput: TypeAlias = MetricLike | Sequence[MetricLike | None] | None
Metrics: TypeAlias = MetricsOfOutput | Sequence[MetricsOfOutput] | Mapping[str, MetricsOfOutput]

Precision: TypeAlias = str | Policy
Auto: TypeAlias = Literal["auto"]
Callbacks: TypeAlias = Callback | Sequence[Callback] | CallbackList
"""A callback, or several."""
