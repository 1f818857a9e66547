from trainer.tools.command_line.commands import main as main
from trainer.tools.finders import (
    BatchSizeSearch as BatchSizeSearch,
    LearningRateSearch as LearningRateSearch,
    find_batch_size as find_batch_size,
    find_learning_rate as find_learning_rate,
)
