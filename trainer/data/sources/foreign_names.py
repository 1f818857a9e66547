"""Names of `tf.data` and `torch.utils.data` that `trainer.data` lacks: the sentences that end their errors."""

_AHEAD = "Leave it out: `fit` reads ahead by itself."
_ARRAYS = "Instead: `Dataset.from_arrays((x, y))`."
_BUCKETS = "For sequences of several lengths: `trainer.data.bucketed`, or arrays of `trainer.utils.pad_sequences`."
_FILES = "Instead: `trainer.data.image_dataset_from_directory` for folders, or a Grain pipeline, which `fit` takes."
_GRAIN = "Instead: a Grain pipeline, which `fit` takes as data."
_HERE = "Leave it out: a `with strategy.scope():` gives each process its rows."
_ITERATE = "Instead: `for element in dataset`, whose elements are NumPy arrays."
_JOIN = "Join the arrays first, by `np.concatenate`."
_PARALLEL = "Leave it out: `fit` calls the function ahead of use. For slow functions, call `map` after `batch`."
_SPLIT = "Instead: `trainer.utils.split_dataset(dataset, left_size=0.8)`."

# : Of the datasets of `trainer.data`.
METHODS = {
    "as_numpy_iterator": _ITERATE,
    "apply": "Call the function: `f(dataset)`.",
    "bucket_by_sequence_length": _BUCKETS,
    "cache": "Leave it out: arrays are in memory, and on accelerators if they fit. Files are decoded in each epoch, by "
             "threads; to keep the decoded data, use an array and `from_arrays`.",
    "choose_from_datasets": _GRAIN,
    "concatenate": _JOIN,
    "element_spec": "Instead: `jax.tree.map(np.shape, next(iter(dataset)))`.",
    "enumerate": "Instead: Python's `enumerate(dataset)`.",
    "filter": "Select the rows of the arrays first: `Dataset.from_arrays((x[keep], y[keep]))`.",
    "flat_map": _GRAIN,
    "from_generator": "`fit` takes the generator itself.",
    "from_tensor_slices": _ARRAYS,
    "get_single_element": "Instead: `next(iter(dataset))`.",
    "interleave": _GRAIN,
    "list_files": _FILES,
    "padded_batch": _BUCKETS,
    "prefetch": _AHEAD,
    "random": _GRAIN,
    "range": "Instead: `Dataset.from_arrays(np.arange(n))`.",
    "reduce": _ITERATE,
    "repeat": "Leave it out: `fit(epochs=n)` reads the data n times.",
    "sample_from_datasets": _GRAIN,
    "shard": _HERE,
    "skip": "Slice the arrays first: `Dataset.from_arrays((x[n:], y[n:]))`.",
    "take": "Instead: `fit(steps_per_epoch=n)`, or fewer rows.",
    "train_test_split": _SPLIT,
    "unbatch": "Leave `batch` out: the elements are rows before it.",
    "window": "Instead: `trainer.data.timeseries_dataset_from_array`.",
    "with_options": "Instead: `trainer.data.with_options(dataset, auto_shard_policy)`.",
    "zip": f"A dataset takes a tuple of arrays. {_ARRAYS}",
}

# : Of `trainer.data` itself.
NAMES = {
    "AUTOTUNE": "Leave it out: `fit` reads ahead by itself, and `map` has no `num_parallel_calls`.",
    "ConcatDataset": _JOIN,
    "DataLoader": "Instead: `Dataset.from_arrays((x, y)).shuffle(seed=0).batch(batch_size)`. `fit` also takes a "
                  "`torch.utils.data.DataLoader` as it is.",
    "DistributedSampler": _HERE,
    "IterableDataset": "`fit` takes any iterable of batches, without a base class.",
    "Options": "Instead: `trainer.data.with_options(dataset, auto_shard_policy)`.",
    "Sequence": "Its new name: `PyDataset`.",
    "Subset": "Select the rows of the arrays: `Dataset.from_arrays((x[rows], y[rows]))`.",
    "TFRecordDataset": _GRAIN,
    "TensorDataset": _ARRAYS,
    "TextLineDataset": _GRAIN,
    "experimental": "Its names are in `trainer.data`, such as `AutoShardPolicy`.",
    "random_split": _SPLIT,
}

# : Arguments of `from_arrays`, `shuffle`, `map`, `random_map` and `batch`.
FROM_ARRAYS = dict.fromkeys(("x", "y", "*"), "Give the arrays as one tuple: `from_arrays((x, y))`.")
SHUFFLE = {
    "buffer_size": "Leave it out: there is no buffer. `shuffle(seed=0)` permutes all rows.",
    "reshuffle_each_iteration": "Leave it out: each epoch has a new order.",
    "*": "There is no buffer: `shuffle(seed=0)` permutes all rows, in a new order in each epoch.",
}
MAP = {
    "num_parallel_calls": _PARALLEL,
    "deterministic": "Leave it out: the order of the elements is always that of the data.",
    "*": _PARALLEL,
}
RANDOM_MAP = {
    "fn": "It takes a random generator, and each part of an element: `random_map(lambda rng, x, y: ...)`; "
          "`trainer.data.augmentation` has changes of images.",
    "num_parallel_calls": _PARALLEL,
}
BATCH = {
    "num_parallel_calls": "Leave it out: a batch is gathered at once.",
    "deterministic": MAP["deterministic"],
    "shuffle": "Call `shuffle(seed=0)` before `batch`.",
    "drop_last": "Instead: `drop_remainder=True`.",
}
