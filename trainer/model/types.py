"""Types of the arguments of `Model.compile` and `Model.fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import optax

from trainer.callbacks import CallbackList
from trainer.callbacks.base.callback import Callback
from trainer.core.precision import Policy
from trainer.losses import Loss
from trainer.metrics import Metric
from trainer.optimizers import Optimizer

OptimizerLike: TypeAlias = str | Optimizer | optax.GradientTransformation
Optimizers: TypeAlias = OptimizerLike | Mapping[str, OptimizerLike]

LossLike: TypeAlias = str | Loss | type[Loss] | Callable[[Any, Any], Any]
Losses: TypeAlias = LossLike | Sequence[LossLike | None] | Mapping[str, LossLike | None]
LossWeights: TypeAlias = float | Sequence[float] | Mapping[str, float]

MetricLike: TypeAlias = str | Metric | type[Metric] | Loss | Callable[[Any, Any], Any]
MetricsOfOutput: TypeAlias = MetricLike | Sequence[MetricLike | None] | None
Metrics: TypeAlias = MetricsOfOutput | Sequence[MetricsOfOutput] | Mapping[str, MetricsOfOutput]

Precision: TypeAlias = Literal["float32", "bfloat16", "mixed_bfloat16", "mixed_float16"] | Policy
Auto: TypeAlias = Literal["auto"]
Phase: TypeAlias = Literal["train", "test", "predict"]
Callbacks: TypeAlias = Callback | Sequence[Callback] | CallbackList
"""A callback, or several."""
