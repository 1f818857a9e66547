"""Keras's utilities, with its names and numbers.

Owns what prepares data and scripts around a model. What is of use to lower rooms lives there and is named here.
"""

from trainer.callbacks.base.interactive_logging import (
    disable_interactive_logging,
    enable_interactive_logging,
    is_interactive_logging_enabled,
)
from trainer.callbacks.progress.progbar import Progbar
from trainer.core.configs import (
    CustomObjectScope,
    custom_object_scope,
    get_custom_objects,
    get_registered_name,
    get_registered_object,
    register_keras_serializable,
)
from trainer.data import (
    PyDataset,
    audio_dataset_from_directory,
    image_dataset_from_directory,
    pack_x_y_sample_weight,
    text_dataset_from_directory,
    timeseries_dataset_from_array,
    unpack_x_y_sample_weight,
)
from trainer.utils.arrays import normalize, pad_sequences, to_categorical
from trainer.utils.dataset_split import split_dataset
from trainer.utils.files.get_file import get_file
from trainer.utils.images import array_to_img, img_to_array, load_img, save_img
from trainer.utils.model_plot import model_to_dot, plot_model
from trainer.utils.random_seed import set_random_seed

Sequence = PyDataset
"""Keras's older name for `PyDataset`."""

__all__ = [
    "CustomObjectScope",
    "Progbar",
    "PyDataset",
    "Sequence",
    "array_to_img",
    "audio_dataset_from_directory",
    "custom_object_scope",
    "disable_interactive_logging",
    "enable_interactive_logging",
    "get_custom_objects",
    "get_file",
    "get_registered_name",
    "get_registered_object",
    "image_dataset_from_directory",
    "img_to_array",
    "is_interactive_logging_enabled",
    "load_img",
    "model_to_dot",
    "normalize",
    "pack_x_y_sample_weight",
    "pad_sequences",
    "plot_model",
    "register_keras_serializable",
    "save_img",
    "set_random_seed",
    "split_dataset",
    "text_dataset_from_directory",
    "timeseries_dataset_from_array",
    "to_categorical",
    "unpack_x_y_sample_weight",
]
