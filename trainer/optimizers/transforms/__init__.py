"""Optax transformations that Keras's optimizers are chains of, where optax has none with Keras's numbers."""

from trainer.optimizers.transforms.accumulation import average_gradients
from trainer.optimizers.transforms.common import after_weight_decay, cast_to_params, clip_each_by_norm, descend
from trainer.optimizers.transforms.factored import descend_factored
from trainer.optimizers.transforms.ftrl import follow_regularized_leader
from trainer.optimizers.transforms.moments import (
    one_minus_power,
    scale_by_adam,
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_nadam,
)
from trainer.optimizers.transforms.orthogonal import orthogonal_momentum
from trainer.optimizers.transforms.schedule_free import descend_schedule_free

__all__ = [
    "after_weight_decay",
    "average_gradients",
    "cast_to_params",
    "clip_each_by_norm",
    "descend",
    "descend_factored",
    "descend_schedule_free",
    "follow_regularized_leader",
    "one_minus_power",
    "orthogonal_momentum",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_amsgrad",
    "scale_by_nadam",
]
