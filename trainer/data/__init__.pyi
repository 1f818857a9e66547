from trainer.data import augmentation as augmentation, preprocessing as preprocessing
from trainer.data.buckets import BucketedDataset as BucketedDataset, bucketed as bucketed
from trainer.data.files.audio_folder import audio_dataset_from_directory as audio_dataset_from_directory
from trainer.data.files.image_folder import image_dataset_from_directory as image_dataset_from_directory
from trainer.data.files.row_dataset import RowDataset as RowDataset
from trainer.data.files.text_folder import text_dataset_from_directory as text_dataset_from_directory
from trainer.data.files.timeseries import timeseries_dataset_from_array as timeseries_dataset_from_array
from trainer.data.sharding.auto_shard import AutoShardPolicy as AutoShardPolicy, with_options as with_options
from trainer.data.sources.arrays import (
    DataError as DataError, pack_x_y_sample_weight as pack_x_y_sample_weight,
    unpack_x_y_sample_weight as unpack_x_y_sample_weight,
)
from trainer.data.sources.columns import batches_from_columns as batches_from_columns
from trainer.data.sources.dataset import Dataset as Dataset
from trainer.data.sources.py_dataset import PyDataset as PyDataset
