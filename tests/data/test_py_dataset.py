"""`PyDataset`: the same batches in the same order for any number of threads and processes, hooks, errors, resume."""

import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.waiting import until
from trainer.data import PyDataset
from trainer.data.adapt import adapt
from trainer.data.parallel_items import ParallelSource
from trainer.data.reader import Reader

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")


class Numbered(PyDataset):
    """Batches of numbers, which `on_epoch_end` turns around."""

    def __init__(self, count=7, raises_at=None, **kwargs):
        super().__init__(**kwargs)
        self.order, self.raises_at, self.calls = np.arange(4 * count), raises_at, []

    def __len__(self):
        return len(self.order) // 4

    def __getitem__(self, index):
        if index == self.raises_at:
            raise OSError("no such file")
        time.sleep(0.003 * (index % 3))  # so that workers end in another order than they begin
        rows = self.order[4 * index:4 * index + 4].astype(np.float32)[:, None]
        return rows, rows / 16

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.order = self.order[::-1].copy()


class Endless(PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return np.full((2, 1), index)


class ExitsAt3(Numbered):
    def __getitem__(self, index):
        if index == 3:
            raise SystemExit(7)
        return super().__getitem__(index)


def read(data, epochs=3, shuffle=False, steps=None):
    """Returns the rows of each batch by epochs."""
    with Reader(adapt(data, shuffle=shuffle), steps) as reader:
        return [[batch[:, 0].tolist() for group in reader.read(epoch)
                 for batch in (group.data[0] if isinstance(group.data, tuple) else group.data)[:group.count]]
                for epoch in range(epochs)]


def fitted(data, epochs=3, callbacks=(), **kwargs):
    model = trainer.Model(nn.Dense(1), seed=3)
    model.compile(trainer.optimizers.SGD(1e-4), "mse")
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks), **kwargs)
    return history.history["loss"], np.asarray(model.state.params["kernel"])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("workers", "most"), [(2, 3), (5, 3), (2, 0)])
def test_threads_give_the_batches_of_one(workers, most, shuffle):
    expected, found = (Numbered(workers=count, max_queue_size=most) for count in (1, workers))
    assert read(found, shuffle=shuffle) == read(expected, shuffle=shuffle)
    assert found.calls == expected.calls == ["begin", "end"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_give_the_batches_of_one_thread(workers):
    expected, found = Numbered(), Numbered(workers=workers, use_multiprocessing=True)
    assert read(found) == read(expected)
    assert found.calls == expected.calls == ["begin", "end"] * 3


def test_a_data_set_of_kerass_is_read_by_its_workers():
    threads = set()

    class OfKeras(keras.utils.PyDataset):
        __len__ = Numbered.__len__
        __getitem__ = Numbered.__getitem__
        order, raises_at = np.arange(28), None

        def on_epoch_begin(self):
            threads.add("begun")

    class Watched(OfKeras):
        def __getitem__(self, index):
            threads.add(threading.current_thread().name)
            return super().__getitem__(index)

    assert read(Watched(workers=3)) == read(OfKeras())
    assert {name for name in threads if name.startswith("trainer-py-dataset")} and "begun" in threads


def test_workers_do_not_read_further_than_the_queue_is_long():
    made = []

    class Watched(Numbered):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    batches = adapt(Watched(workers=2, max_queue_size=3)).read(0)
    next(batches)
    time.sleep(0.1)
    assert sorted(made) == [0, 1, 2]
    batches.close()


def calls(base):
    """Returns a data set that notes what is called, and the notes."""
    notes = []

    class Noted(base):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            notes.append(index)
            return np.full((2, 1), index, np.float32), np.ones((2, 1), np.float32)

        def on_epoch_begin(self):
            notes.append("begin")

        def on_epoch_end(self):
            notes.append("end")

    return Noted(), notes


@pytest.mark.slow
def test_batches_and_hooks_are_called_as_in_keras():
    (theirs, expected), (ours, found) = calls(keras.utils.PyDataset), calls(PyDataset)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(theirs, epochs=2, shuffle=False, verbose=0)
    fitted(ours, epochs=2, shuffle=False)
    building = ["begin", 0, "end"]  # Keras looks at a batch
    assert expected == [*building, *found] and found == ["begin", 0, 1, 2, "end"] * 2


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_hooks_are_called_once_for_each_pass(workers):
    ours, validation = Numbered(workers=workers), Numbered(workers=workers)
    fitted(ours, epochs=2, validation_data=validation)
    assert ours.calls == validation.calls == ["begin", "end"] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_an_epoch_of_fewer_steps_than_batches_continues_the_pass(workers):
    data = Numbered(count=4, workers=workers)
    data.on_epoch_end = lambda: data.calls.append("end")
    assert [len(epoch) for epoch in read(data, steps=2)] == [2, 2, 2]
    assert data.calls == ["begin", "end"] * 3
    assert read(data, 1, steps=2) == read(data, 3, steps=2)[2:]


def test_endless_data_are_read_by_threads():
    for most in (10, 0):  # 0 for no limit
        assert read(Endless(workers=3, max_queue_size=most), 2, steps=3) == [
            [[0, 0], [1, 1], [2, 2]], [[3, 3], [4, 4], [5, 5]]]


@pytest.mark.slow
def test_training_is_that_of_one_thread_and_no_thread_stays():
    (losses, kernel), (expected_losses, expected) = (fitted(Numbered(workers=workers)) for workers in (4, 1))
    assert losses == expected_losses and len(set(losses)) == 3
    np.testing.assert_array_equal(kernel, expected)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainer-py-dataset")]


@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_thread_raises_names_the_batch(workers):
    with pytest.raises(RuntimeError, match=r"raised OSError at batch 5: no such file") as caught:
        fitted(Numbered(raises_at=5, workers=workers), shuffle=False)
    assert caught.value.__cause__.__notes__ == ["It was raised for index 5 of a Numbered."]


@pytest.mark.slow
def test_what_a_process_raises_names_the_batch_and_the_line():
    with pytest.raises(RuntimeError, match=r"(?s)at batch 5: A worker process.*made batch 5 of a Numbered.*"
                                           r'raise OSError\("no such file"\)'):
        read(Numbered(raises_at=5, workers=2, use_multiprocessing=True))


@pytest.mark.slow
def test_a_process_that_ends_is_told():
    with pytest.raises(RuntimeError, match=r"Worker process 1 of a ExitsAt3 ended with exit code 7 .*__main__"):
        read(ExitsAt3(workers=2, use_multiprocessing=True))


@pytest.mark.slow
def test_a_data_set_that_cannot_be_sent_is_refused():
    data = Numbered(workers=1, use_multiprocessing=True)
    data.lock = threading.Lock()
    with pytest.raises(RuntimeError, match=r"can be sent to another process, but this Numbered cannot"):
        read(data)


@pytest.mark.slow
def test_processes_are_kept_from_epoch_to_epoch_and_end_with_the_reader():
    source = adapt(Numbered(workers=2, use_multiprocessing=True))
    assert isinstance(source, ParallelSource)
    batches = source.read(0)
    next(batches)
    batches.close()  # six batches have been asked for, and are not read
    processes = [worker for worker, _ in source._processes._workers]
    with Reader(source) as reader:
        first = [group.data[0][0, 0, 0] for group in reader.read(0)]
        assert [worker for worker, _ in source._processes._workers] == processes
    assert first == [0, 4, 8, 12, 16, 20, 24]
    assert [process.is_alive() for process in processes] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch", [2, 6, 9])
def test_a_resumed_run_is_exact(workers, batch, tmp_path):
    class Killed(Exception):
        pass

    class Kill(trainer.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, number, logs=None):
            Kill.seen += 1
            if Kill.seen == batch:
                raise Killed

    def backup():
        return trainer.callbacks.BackupAndRestore(tmp_path, save_freq=1)

    expected_losses, expected = fitted(Numbered(workers=workers))
    with pytest.raises(Killed):
        fitted(Numbered(workers=workers), callbacks=[backup(), Kill()])
    data = Numbered(workers=workers)
    losses, kernel = fitted(data, callbacks=[backup()])
    assert losses == expected_losses
    np.testing.assert_array_equal(kernel, expected)
    assert data.calls == ["begin", "end"] * 3


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"workers": -1}, ValueError, "`workers` must be a whole number of at least 0"),
    ({"max_queue_size": -1}, ValueError, "`max_queue_size` must be a whole number of at least 0"),
    ({"use_multiprocessing": "yes"}, TypeError, "`use_multiprocessing` must be True or False"),
])
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Numbered(**arguments)


def test_what_a_subclass_must_define_is_named():
    class Bare(PyDataset):
        pass

    with pytest.raises(NotImplementedError, match="`Bare` must define `__getitem__"):
        Bare()[0]
    with pytest.raises(NotImplementedError, match="`Bare` must define `__len__`"):
        _ = Bare().num_batches


SCRIPT = """
import sys
import numpy as np, trainer
from flax import linen as nn

class Numbered(trainer.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        import jax
        assert jax.default_backend() == "cpu"
        x = np.full((4, 2), index / 5, np.float32)
        return x, x[:, :1]

def main():
    losses = []
    for processes in (False, True):
        model = trainer.Model(nn.Dense(1))
        model.compile("sgd", "mse")
        data = Numbered(workers=2, use_multiprocessing=processes)
        losses.append(model.fit(data, epochs=2, verbose=0, validation_data=data).history)
    assert losses[0] == losses[1], losses
    print("equal", sorted(losses[0]))

"""


def run_script(path, text):
    path.write_text(text)
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_trains_on_what_processes_make(tmp_path):
    done = run_script(tmp_path / "script.py", SCRIPT + "if __name__ == '__main__':\n    main()\n")
    assert (done.returncode, done.stdout) == (0, "equal ['loss', 'val_loss']\n"), done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_without_a_guard_is_told_to_have_one(tmp_path):
    done = run_script(tmp_path / "script.py", SCRIPT + "main()\n")
    assert done.returncode == 1
    assert "must begin its training within `if __name__ == \"__main__\":`" in done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = SCRIPT + """if __name__ == '__main__':
    from trainer.data.adapt import adapt
    source = adapt(Numbered(workers=2, use_multiprocessing=True))
    next(source.read(0))
    print(*(worker.pid for worker, _ in source._processes._workers), flush=True)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_script(tmp_path / "script.py", script)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until(lambda: not any(map(is_alive, pids)))


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
