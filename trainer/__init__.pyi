from trainer import (
    callbacks as callbacks,
    data as data,
    datasets as datasets,
    distribute as distribute,
    estimator as estimator,
    losses as losses,
    metrics as metrics,
    models as models,
    optimizers as optimizers,
    regularizers as regularizers,
    testing as testing,
    tools as tools,
    utils as utils,
)
from trainer.core.compile.persistent_cache import enable_compilation_cache as enable_compilation_cache
from trainer.core.train_state import TrainState as TrainState
from trainer.data import (
    pack_x_y_sample_weight as pack_x_y_sample_weight,
    unpack_x_y_sample_weight as unpack_x_y_sample_weight,
)
from trainer.engine.model.load import load as load, load_model as load_model
from trainer.engine.model.lora import LoraModel as LoraModel, lora as lora
from trainer.engine.model.model import Model as Model, Sequential as Sequential
from trainer.engine.model.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
from trainer.engine.saving.export import ExportedModel as ExportedModel, load_exported as load_exported
from trainer.tools.plan import plan as plan
from trainer.tools.report import report as report
from trainer.tools.sklearn_wrappers import TrainerClassifier as TrainerClassifier, TrainerRegressor as TrainerRegressor

__version__: str
