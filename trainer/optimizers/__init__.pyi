from trainer.optimizers import schedules as schedules
from trainer.optimizers.adagrad import Adadelta as Adadelta, Adagrad as Adagrad, Ftrl as Ftrl, RMSprop as RMSprop
from trainer.optimizers.adam import Adam as Adam, Adamax as Adamax, AdamW as AdamW, Lamb as Lamb, Nadam as Nadam
from trainer.optimizers.base import Optimizer as Optimizer, OptimizerState as OptimizerState
from trainer.optimizers.common_arguments import CommonArguments as CommonArguments
from trainer.optimizers.large_models import Adafactor as Adafactor, Muon as Muon, ScheduleFreeAdamW as ScheduleFreeAdamW
from trainer.optimizers.learning_rate import LearningRate as LearningRate
from trainer.optimizers.momentum import SGD as SGD, Lion as Lion
from trainer.optimizers.registry import deserialize as deserialize, get as get, serialize as serialize
from trainer.optimizers.update_rule import LossScaleOptimizer as LossScaleOptimizer
