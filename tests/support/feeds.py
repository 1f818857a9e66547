"""Every kind of data that a trainer takes: the same ten or twelve numbered rows in three batches."""

import itertools

import grain
import grain.python as grain_python
import jax.numpy as jnp
import numpy as np

from trainer.data import Dataset, batches_from_columns, bucketed
from trainer.data.adapt import adapt

X, Y = np.arange(40, dtype=np.float32).reshape(10, 4), np.arange(10)


def column(batch):
    """Returns the row numbers of a batch."""
    x = batch[0] if isinstance(batch, tuple) else batch
    return (x[:, 0] / 4).astype(int).tolist()


def rows_of(group):
    """Returns the row numbers of each batch of a group."""
    x = group.data[0] if isinstance(group.data, tuple) else group.data
    return (x[:group.count, :, 0] / 4).astype(int).tolist()


def pairs(count=3, rows=4):
    """A generator of batches `(x, y)` whose rows are numbered throughout."""
    for number in range(count):
        numbers = np.arange(number * rows, (number + 1) * rows)
        yield np.stack([numbers * 4.0] * 4, axis=1), numbers


class ReIterable:
    """Yields `pairs`, counts its passes and notes whether each was closed."""

    def __init__(self, count=3, rows=4):
        self.count, self.rows, self.opened, self.closed = count, rows, 0, 0

    def __iter__(self):
        self.opened += 1
        try:
            yield from pairs(self.count, self.rows)
        finally:
            self.closed += 1


class EmptyLoader(ReIterable):
    """Like a torch `DataLoader` over no rows, which knows that it has no batches."""

    def __init__(self):
        super().__init__(0)

    def __len__(self):
        return 0


class Indexed:
    """A dataset in the form of `keras.utils.PyDataset` subclasses, without the base class."""

    def __init__(self):
        self.epochs_ended = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * 4 : index * 4 + 4], Y[index * 4 : index * 4 + 4]

    def on_epoch_end(self):
        self.epochs_ended += 1


class MadeByThreads(Indexed):
    """Like a `keras.utils.PyDataset` with workers."""

    workers, use_multiprocessing, max_queue_size = 2, False, 2


class EndlessPyDataset:
    """An endless dataset in the form of `keras.utils.PyDataset` subclasses."""

    num_batches = property(lambda self: None)

    def __getitem__(self, index):
        return X[index % 5 : index % 5 + 2]

    def __iter__(self):
        return map(self.__getitem__, itertools.count())


class FakeTensor:
    """Like a torch tensor that needs its gradient: numpy() refuses until detached and on the host."""

    def __init__(self, array, is_detached=False):
        self.array, self.is_detached = array, is_detached

    def detach(self):
        return FakeTensor(self.array, True)

    def cpu(self):
        return self

    def __array__(self, dtype=None, copy=None):
        if not self.is_detached:
            raise TypeError("Can't call numpy() on Tensor that requires grad.")
        return self.array


class FakeTorchLoader:
    def __len__(self):
        return 3

    def __iter__(self):
        return ([FakeTensor(x), FakeTensor(y)] for x, y in pairs())


class FakeTfTensor:
    def __init__(self, array):
        self.array = array

    def numpy(self):
        return self.array


class FakeTfDataset:
    def __init__(self, cardinality=3):
        self._cardinality = cardinality

    def cardinality(self):
        return np.int64(self._cardinality)

    def __len__(self):
        raise TypeError("The dataset is infinite or of unknown length.")

    def __iter__(self):
        count = itertools.count() if self._cardinality == -1 else range(1)
        return ((FakeTfTensor(x), FakeTfTensor(y)) for _ in count for x, y in pairs())


class Frame:
    """Like a pandas DataFrame: numbers behind `__array__`, and iteration over column names."""

    def __array__(self, dtype=None, copy=None):
        return X

    def __iter__(self):
        return iter("abcd")


def grain_map():
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(4)


def grain_loader():
    sampler = grain_python.IndexSampler(10, shard_options=grain_python.NoSharding(), shuffle=False, num_epochs=1)
    return grain.DataLoader(data_source=list(zip(X, Y, strict=True)), sampler=sampler,
                            operations=[grain_python.Batch(4)])


ROWS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
FULL = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
FEEDS = {
    "arrays": (lambda: adapt(X, Y, batch_size=4), 3, ROWS),
    "one array": (lambda: adapt(X, batch_size=4), 3, ROWS),
    "jax arrays": (lambda: adapt(jnp.asarray(X), jnp.asarray(Y), batch_size=4), 3, ROWS),
    "lists": (lambda: adapt(X.tolist(), Y.tolist(), batch_size=4), 3, ROWS),
    "frame": (lambda: adapt(Frame(), Y, batch_size=4), 3, ROWS),
    "dataset": (lambda: adapt(Dataset.from_arrays((X, Y)).batch(4)), 3, ROWS),
    "mapped dataset": (lambda: adapt(Dataset.from_arrays((X, Y)).batch(4).map(lambda x, y: (x, y + 1))), 3, ROWS),
    "generator": (lambda: adapt(pairs()), None, FULL),
    "re-iterable": (lambda: adapt(ReIterable()), None, FULL),
    "indexed": (lambda: adapt(Indexed()), 3, ROWS),
    "indexed, by threads": (lambda: adapt(MadeByThreads()), 3, ROWS),
    "with class weights": (lambda: adapt(Dataset.from_arrays((X, Y)).batch(4), class_weight=dict.fromkeys(Y, 2.0)),
                           3, ROWS),
    "torch loader": (lambda: adapt(FakeTorchLoader()), 3, FULL),
    "tf dataset": (lambda: adapt(FakeTfDataset()), 3, FULL),
    "bucketed": (lambda: adapt(bucketed((list(X), Y), [4], 4, shuffle=False)), 3, ROWS),
    "columns": (lambda: adapt(batches_from_columns([{"a": x, "b": y} for x, y in pairs()], "a", "b")), 3, FULL),
    "grain map dataset": (lambda: adapt(grain_map()), 3, ROWS),
    "grain iter dataset": (lambda: adapt(grain_map().to_iter_dataset()), None, ROWS),
    "grain loader": (lambda: adapt(grain_loader()), None, ROWS),
}
