"""User data to host batches, to groups of batches, to groups that are placed ahead of use.

Owns everything between the user's `x` and a stacked tree of numpy arrays. It must not know about devices or strategies:
the caller of `prefetch` provides the function that places a group.
"""

from trainer.data.adapt import adapt
from trainer.data.files import augmentation
from trainer.data.files.audio_folder import audio_dataset_from_directory
from trainer.data.files.image_folder import image_dataset_from_directory
from trainer.data.files.row_dataset import RowDataset
from trainer.data.files.text_folder import text_dataset_from_directory
from trainer.data.files.timeseries import timeseries_dataset_from_array
from trainer.data.prefetch import Demand, Prefetcher, prefetch
from trainer.data.reader import Reader
from trainer.data.resident import ResidentBatches
from trainer.data.sharding.auto_shard import AutoShardPolicy, with_options
from trainer.data.sources.arrays import DataError
from trainer.data.sources.batches import Batch, Group, pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.sources.dataset import Dataset
from trainer.data.sources.host_arrays import HostArrays, split_validation
from trainer.data.sources.py_dataset import PyDataset
from trainer.data.sources.sources import Source

__all__ = [
    "AutoShardPolicy",
    "Batch",
    "DataError",
    "Dataset",
    "Demand",
    "Group",
    "HostArrays",
    "Prefetcher",
    "PyDataset",
    "Reader",
    "ResidentBatches",
    "RowDataset",
    "Source",
    "adapt",
    "audio_dataset_from_directory",
    "augmentation",
    "image_dataset_from_directory",
    "pack_x_y_sample_weight",
    "prefetch",
    "split_validation",
    "text_dataset_from_directory",
    "timeseries_dataset_from_array",
    "unpack_x_y_sample_weight",
    "with_options",
]
