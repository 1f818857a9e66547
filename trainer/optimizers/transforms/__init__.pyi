from trainer.optimizers.transforms.accumulation import average_gradients as average_gradients
from trainer.optimizers.transforms.common import (
    after_weight_decay as after_weight_decay,
    cast_to_params as cast_to_params,
    clip_each_by_norm as clip_each_by_norm,
    descend as descend,
)
from trainer.optimizers.transforms.factored import descend_factored as descend_factored
from trainer.optimizers.transforms.ftrl import follow_regularized_leader as follow_regularized_leader
from trainer.optimizers.transforms.moments import (
    one_minus_power as one_minus_power,
    scale_by_adam as scale_by_adam,
    scale_by_adamax as scale_by_adamax,
    scale_by_amsgrad as scale_by_amsgrad,
    scale_by_nadam as scale_by_nadam,
)
from trainer.optimizers.transforms.orthogonal import orthogonal_momentum as orthogonal_momentum
from trainer.optimizers.transforms.schedule_free import descend_schedule_free as descend_schedule_free
