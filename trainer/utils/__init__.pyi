from trainer.core.ambient.interactive_logging import (
    disable_interactive_logging as disable_interactive_logging,
    enable_interactive_logging as enable_interactive_logging,
    is_interactive_logging_enabled as is_interactive_logging_enabled,
)
from trainer.callbacks.progress.progbar import Progbar as Progbar
from trainer.core.configs import (
    CustomObjectScope as CustomObjectScope,
    custom_object_scope as custom_object_scope,
    get_custom_objects as get_custom_objects,
    get_registered_name as get_registered_name,
    get_registered_object as get_registered_object,
    register_keras_serializable as register_keras_serializable,
)
from trainer.data import (
    PyDataset as PyDataset,
    audio_dataset_from_directory as audio_dataset_from_directory,
    image_dataset_from_directory as image_dataset_from_directory,
    pack_x_y_sample_weight as pack_x_y_sample_weight,
    text_dataset_from_directory as text_dataset_from_directory,
    timeseries_dataset_from_array as timeseries_dataset_from_array,
    unpack_x_y_sample_weight as unpack_x_y_sample_weight,
)
from trainer.data.sources.py_dataset import Sequence as Sequence
from trainer.utils.arrays import (
    normalize as normalize,
    pad_sequences as pad_sequences,
    to_categorical as to_categorical,
)
from trainer.utils.dataset_split import split_dataset as split_dataset
from trainer.utils.files.get_file import get_file as get_file
from trainer.utils.images import (
    array_to_img as array_to_img,
    img_to_array as img_to_array,
    load_img as load_img,
    save_img as save_img,
)
from trainer.utils.model_plot import model_to_dot as model_to_dot, plot_model as plot_model
from trainer.utils.random_seed import set_random_seed as set_random_seed
from trainer.utils.session import clear_session as clear_session
