"""Streams with a position: a saved run asks for it and a resumed run restores it, or reads all again and says so."""

import itertools
import re
import sys
import types

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.streams import LikeLoader
from trainer import callbacks
from trainer.core import plain
from trainer.data import batches_from_columns
from trainer.data.adapt import adapt
from trainer.data.reader import Reader

EPOCHS, BATCHES = 3, 7


class Counted:
    """Counts the batches that are made."""

    made = 0

    def batch(self, number):
        type(self).made += 1
        return np.full((2, 3), number, np.float32)


class OfIterable(Counted):
    """Like streams of one's own: an iterable with a state, whose numbers go on from pass to pass."""

    def __init__(self):
        self.next, self.stop = 0, BATCHES

    def __iter__(self):
        while self.next < self.stop:
            self.next += 1
            yield self.batch(self.next)
        self.stop += BATCHES

    def state_dict(self):
        return {"next": self.next, "stop": self.stop}

    def load_state_dict(self, state):
        self.next, self.stop = state["next"], state["stop"]


class OfIterator(Counted):
    """An iterable without a state, whose iterators have a state."""

    def __iter__(self):
        return OneShot(BATCHES)


class OneShot(Counted):
    def __init__(self, stop=sys.maxsize):
        self.next, self.stop = 0, stop

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.stop:
            raise StopIteration
        self.next += 1
        return self.batch(self.next)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def numbers_of(group):
    data = group.data[0] if isinstance(group.data, tuple) else group.data
    return data.reshape(len(data), -1)[:group.count].tolist()


def read(reader, first=(0, 0), on_epoch=lambda epoch: None):
    """Yields the epoch, the next batch, the rows of a group, and the position after it; and those of epochs' ends."""
    reader.keeps_resume_tokens = True
    for epoch in range(first[0], EPOCHS):
        start = first[1] if epoch == first[0] else 0
        if start == 0:
            on_epoch(epoch)
        for group in reader.read(epoch, start):
            after = group.first + group.count
            yield epoch, after, numbers_of(group), reader.position(epoch, after, group.resume_token)
        yield epoch + 1, 0, [], reader.position(epoch + 1, 0)


def check_resumes(make, steps=None, group_size=1, on_epoch=lambda data, epoch: None):
    """Compares a run that is resumed at each of its positions with the undisturbed run; returns skipped batches."""
    def begun(data):
        reader = Reader(adapt(data), steps, group_size=group_size)
        reader.peek()
        return reader

    data, skipped = make(), []
    with begun(data) as reader:
        saved = list(read(reader, on_epoch=lambda epoch: on_epoch(data, epoch)))
    for index, (epoch, batch, _, position) in enumerate(saved[:-1]):
        again = make()
        with begun(again) as reader:
            if batch:
                on_epoch(again, epoch)
            skipped.append(reader.resume(epoch, batch, plain.decode(*plain.encode(position))))
            rest = list(read(reader, (epoch, batch), lambda epoch, data=again: on_epoch(data, epoch)))
        assert [rows for *_, rows, _ in rest] == [rows for *_, rows, _ in saved[index + 1:]], (epoch, batch)
    return skipped


@pytest.mark.parametrize(("steps", "group_size"), [(None, 1), (None, 3), (3, 2), (7, 1)])
@pytest.mark.parametrize("make", [OfIterable, LikeLoader])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_stream_with_a_state_goes_on_from_any_position(make, steps, group_size):
    make.made = 0
    assert not any(check_resumes(make, steps, group_size)[1:]), "only the first batches of all are read again"
    runs = make.made / BATCHES / EPOCHS
    assert runs < (EPOCHS * BATCHES / group_size + 4) * 0.75, "batches before the position are not made"


@pytest.mark.parametrize("group_size", [1, 3])
def test_an_iterator_with_a_state_goes_on_from_any_position(group_size):
    assert not any(check_resumes(OneShot, 5, group_size)[1:])


def test_passes_are_read_again_where_only_their_iterators_have_a_state():
    skipped = check_resumes(OfIterator)
    assert skipped[:BATCHES] == [1, *[0] * (BATCHES - 1)]
    assert skipped[BATCHES - 1:BATCHES + 2] == [0, BATCHES, BATCHES + 1]


def test_a_state_that_is_no_plain_data_is_refused_by_name_and_batches_are_read_again():
    class Secret:
        pass

    class Keeps(OfIterable):
        def state_dict(self):
            return {**super().state_dict(), "inner": [Secret()]}

    with pytest.warns(UserWarning, match=r"`Keeps\.state_dict\(\)\['inner'\]\[0\]` is of type .*Secret.*reads all"):
        skipped = check_resumes(Keeps)
    assert skipped[:4] == [1, 2, 3, 4]


class Forgets(OfIterable):
    """An iterable whose state does not hold the place."""

    def load_state_dict(self, state):
        pass


def test_batches_are_read_again_if_a_state_does_not_restore_the_data():
    class Restarts(Forgets):
        def __iter__(self):
            self.next = 0
            return super().__iter__()

    with Reader(adapt(Restarts())) as reader:
        saved = list(read(reader))
    epoch, batch, _, position = saved[3]
    with Reader(adapt(Restarts())) as reader:
        reader.peek()
        with pytest.warns(UserWarning, match="does not restore them: with it, they go on with another batch"):
            assert reader.resume(epoch, batch, position) == batch
        assert [rows for *_, rows, _ in read(reader, (epoch, batch))] == [rows for *_, rows, _ in saved[4:]]


@pytest.mark.filterwarnings("ignore:The state that the data reported")
@pytest.mark.parametrize("make", [Forgets, type("Once", (OneShot,), {"load_state_dict": Forgets.load_state_dict})])
def test_data_that_neither_a_state_nor_reading_restores_are_refused(make):
    with Reader(adapt(make()), 5) as reader:
        saved = list(itertools.islice(read(reader), 4))
    with Reader(adapt(make()), 5) as reader:
        reader.peek()
        with pytest.raises(ValueError, match=r"does not restore them.*seed their random numbers"):
            reader.resume(0, 4, saved[3][-1])


def test_a_refused_run_blames_the_data_and_not_the_checkpoint(tmp_path):
    class Other(Forgets):
        batches = BATCHES

        def batch(self, number):
            return super().batch(self.offset + number), np.ones((2, 1), np.float32)

    def fit(offset, **limit):
        model = trainer.Sequential([nn.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=1)
        data = Other()
        data.offset = offset
        model.fit(data, epochs=2, verbose=0, callbacks=[
            callbacks.BackupAndRestore(tmp_path, save_freq=1, delete_checkpoint=False)], **limit)

    fit(0, max_steps=3)
    with pytest.warns(UserWarning, match="do not match|does not restore"), pytest.raises(ValueError) as raised:
        fit(100)
    assert re.match(r"The state that the data reported.*seed their random.*The checkpoint: '", str(raised.value))


def test_tensors_of_torch_in_a_state_come_back_as_tensors(monkeypatch):
    class Tensor:
        def __init__(self, array):
            self.array = array

        detach = cpu = lambda self: self

        def numpy(self):
            return self.array

    Tensor.__module__, Tensor.__qualname__ = "torch", "Tensor"
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(from_numpy=Tensor))
    tensor = Tensor(np.arange(5, dtype=np.uint8))
    back, = plain.decode(*plain.encode([tensor]))
    assert type(back) is Tensor
    np.testing.assert_array_equal(back.array, tensor.array)
    assert back.array is not tensor.array


def test_columns_of_a_stream_become_batches_and_keep_its_position():
    class Rows(OfIterable):
        def batch(self, number):
            return {"ids": [[number, 2], [3, 4]], "label": [0, 1], "name": ["a", "b"]}

    check_resumes(lambda: batches_from_columns(Rows(), "ids", "label"))
    x, y = next(iter(batches_from_columns(Rows(), {"a": "ids"}, "label")))
    assert (x["a"].tolist(), y.tolist()) == ([[1, 2], [3, 4]], [0, 1])
    with pytest.raises(ValueError, match=r"has no column 'labels'.*'?label'?"):
        next(iter(batches_from_columns(Rows(), "ids", "labels")))


# --- Hugging Face's streams, where they are installed ---------------------------------------------------------------

def hugging_face(change=lambda stream: stream):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"a": np.arange(36)}).to_iterable_dataset(num_shards=3)
    return batches_from_columns(change(rows).batch(4), x="a")


STREAMS = {
    "plain": lambda rows: rows,
    "arrays": lambda rows: rows.with_format("numpy"),
    "mapped and filtered": lambda rows: rows.map(lambda row: {"a": row["a"] + 1}).filter(lambda row: row["a"] % 3 > 0),
    "mapped by batches": lambda rows: (
        rows.with_format("arrow").map(lambda t: t, batched=True, batch_size=7).with_format("numpy")),
    "repeated": lambda rows: rows.take(12).repeat(2),
}


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_stream_of_hugging_face_goes_on_from_its_state(name, steps):
    assert not any(check_resumes(lambda: hugging_face(STREAMS[name]), steps)[1:])


@pytest.mark.slow
def test_the_shuffle_buffer_of_a_stream_is_filled_again_by_reading_its_epoch():
    def shuffled():
        return hugging_face(lambda rows: rows.shuffle(seed=1, buffer_size=16))

    with pytest.warns(UserWarning, match="does not hold the buffer of `shuffle`"):
        skipped = check_resumes(shuffled, on_epoch=lambda data, epoch: data.batches.set_epoch(epoch))
    assert skipped[:12] == [*range(1, 10), 0, 0, 2]


def test_a_stream_of_columns_without_names_is_refused():
    with pytest.raises(ValueError, match=r"IterableDataset of named columns.*batches_from_columns\(data\.batch"):
        adapt(hugging_face().batches)


# --- torchdata's loaders, where they are installed -------------------------------------------------------------------

class Numbered:
    """A dataset of torch: any object with these methods."""

    def __len__(self):
        return 26

    def __getitem__(self, index):
        return np.full(3, index, np.float32)


def torchdata_loader(num_workers, has_generator, **options):
    library, torch = pytest.importorskip("torchdata.stateful_dataloader"), pytest.importorskip("torch")
    torch.manual_seed(9)
    generator = torch.Generator().manual_seed(5) if has_generator else None
    return library.StatefulDataLoader(Numbered(), 4, shuffle=True, num_workers=num_workers, generator=generator,
                                      **options)


LOADERS = {
    "seeded by torch": lambda: torchdata_loader(0, False),
    "a generator": lambda: torchdata_loader(0, True),
    "a state at every third batch": lambda: torchdata_loader(0, True, snapshot_every_n_steps=3),
    "columns": lambda: batches_from_columns(
        torchdata_loader(0, True, collate_fn=lambda rows: {"a": np.array(rows)}), "a"),
    "workers": lambda: torchdata_loader(2, False),
    "workers and a generator": lambda: torchdata_loader(2, True),
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning", "ignore:.*os.fork:RuntimeWarning")
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("group_size", [1, 3])
def test_a_loader_of_torchdata_goes_on_from_its_state(name, group_size):
    assert not any(check_resumes(LOADERS[name], group_size=group_size)[1:])


def test_other_data_report_no_state():
    source = adapt(iter(np.zeros((1, 2, 3))))
    next(source.read(0))
    assert source.state() is None
