from trainer.regularizers.penalties import (
    L1 as L1,
    L1L2 as L1L2,
    L2 as L2,
    OrthogonalRegularizer as OrthogonalRegularizer,
    Penalty as Penalty,
    Regularizer as Regularizer,
    l1 as l1,
    l1_l2 as l1_l2,
    l2 as l2,
    orthogonal_regularizer as orthogonal_regularizer,
)
from trainer.regularizers.registry import deserialize as deserialize, get as get, serialize as serialize
