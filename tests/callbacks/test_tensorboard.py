"""TensorBoard's event files hold what Keras's callback writes; only who asks for every batch pays for it."""

from __future__ import annotations

import itertools
import json
import pathlib
import runpy
import sys
import types

import jax
import numpy as np
import pytest

from tests.support.event_files import read_events, scalars
from trainer.callbacks import CallbackList, LazyLogs, TensorBoard
from trainer.callbacks.tensorboard import event_file, tensorboard

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
REFERENCE_RUN = runpy.run_path(str(REFERENCE / "make_tensorboard.py"))
RESULTS = json.loads((REFERENCE / "tensorboard.json").read_text())["results"]


def nested(paths):
    tree = {}
    for path, leaf in paths.items():
        layer, name = path.split("/")
        tree.setdefault(layer, {})[name] = leaf
    return tree


class FakeModel:
    """A model with given weights, and one optimizer."""

    def __init__(self, params=None, model_state=None, text=None):
        self.optimizer = types.SimpleNamespace(learning_rate=0.5, iterations=0)
        self.current_run = types.SimpleNamespace(
            state=types.SimpleNamespace(params=params or {}, model_state=model_state or {}),
            train_step_text=self.train_step_text)
        self.texts_asked = 0
        self.text = text

    def get_weights(self):
        return jax.tree.leaves((self.current_run.state.params, self.current_run.state.model_state))

    def set_progress(self, iterations, learning_rate):
        self.optimizer = types.SimpleNamespace(learning_rate=learning_rate, iterations=iterations)

    def train_step_text(self):
        self.texts_asked += 1
        return self.text


def begin(board, model=None):
    board.set_model(model or FakeModel())
    board.on_train_begin({})
    return board


def run_batches(board, batches):
    """Calls the hooks of executions of one batch each, of those hooks that the board wants."""
    callbacks = CallbackList([board])
    for batch in batches:
        logs = {"loss": batch + 1.0}
        if callbacks.wants_batch_hooks("train"):
            callbacks.on_train_batch_begin(batch, {})
            callbacks.on_train_batch_end(batch, logs)
        callbacks.on_execution_end("train", batch, logs)


# Keras's files


def comparable(rows):
    return sorted(((*row[:4], row[4]) for row in rows), key=lambda row: (row[:4], str(row[4])))


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: json.dumps(result["case"]))
def test_the_files_hold_what_keras_writes(result, tmp_path):
    case = dict(result["case"])
    fits = case.pop("fits", 1)
    weights = REFERENCE_RUN["WEIGHTS"]
    model = FakeModel({"dense": nested(weights)["dense"]}, {"norm": nested(weights)["norm"]})
    REFERENCE_RUN["run_fits"](TensorBoard(tmp_path, **case), model, fits)
    ours, keras = comparable(read_events(tmp_path)), comparable(map(tuple, result["events"]))
    assert [row[:4] for row in ours] == [row[:4] for row in keras]
    for our, expected in zip(ours, keras, strict=True):
        if our[2] == "images":
            assert our[4] == expected[4]
        else:
            np.testing.assert_allclose(our[4], expected[4], rtol=1e-7, atol=1e-9, err_msg=our[1])


def test_the_reference_covers_every_case_that_its_script_lists():
    assert [result["case"] for result in RESULTS] == REFERENCE_RUN["CASES"]


def test_epochs_are_written_also_if_the_update_frequency_does_not_divide_their_batches(tmp_path):
    board = begin(TensorBoard(tmp_path, update_freq=2))
    for epoch in range(2):
        board.on_epoch_begin(epoch, {})
        run_batches(board, range(3))
        board.on_epoch_end(epoch, {"loss": epoch + 0.5, "val_loss": epoch + 0.25})
    board.on_train_end({})
    assert scalars(tmp_path) == {
        "train/batch_loss": [(2, 2.0), (4, 1.0), (6, 3.0)],
        "train/epoch_loss": [(0, 0.5), (1, 1.5)],
        "train/epoch_learning_rate": [(0, 0.5), (1, 0.5)],
        "validation/epoch_loss": [(0, 0.25), (1, 1.25)],
    }


def test_two_optimizers_have_two_learning_rates(tmp_path):
    model = FakeModel()
    model.optimizer = {"first": types.SimpleNamespace(learning_rate=0.5, iterations=3),
                       "second": types.SimpleNamespace(learning_rate=0.25, iterations=4)}
    board = begin(TensorBoard(tmp_path), model)
    board.on_epoch_begin(0, {})
    board.on_test_end({"loss": 1.0})
    board.on_epoch_end(0, {"loss": 2.0})
    board.on_train_end({})
    assert scalars(tmp_path) == {
        "train/epoch_loss": [(0, 2.0)], "train/epoch_learning_rate_first": [(0, 0.5)],
        "train/epoch_learning_rate_second": [(0, 0.25)], "validation/evaluation_loss_vs_iterations": [(4, 1.0)]}


def test_a_log_of_several_values_gets_a_scalar_for_each(tmp_path):
    board = begin(TensorBoard(tmp_path))
    board.on_epoch_end(0, {"recall": np.array([0.25, 0.75])})
    board.on_train_end({})
    points = scalars(tmp_path)
    assert (points["train/epoch_recall_0"], points["train/epoch_recall_1"]) == ([(0, 0.25)], [(0, 0.75)])


def test_the_hooks_of_a_subclass_are_called_too(tmp_path):
    seen = []

    class Board(TensorBoard):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            super().on_train_batch_end(batch, logs)

    board = begin(Board(tmp_path, update_freq=1))
    board.on_epoch_begin(0, {})
    run_batches(board, range(2))
    board.on_train_end({})
    assert seen == [0, 1]
    assert scalars(tmp_path) == {"train/batch_loss": [(1, 1.0), (2, 2.0)]}


# Speed


def test_by_default_no_execution_reads_its_logs(tmp_path):
    board = begin(TensorBoard(tmp_path))
    board.on_epoch_begin(0, {})

    def fetch():
        raise AssertionError("the logs were read")

    board.on_execution_end("train", 3, LazyLogs(["loss"], fetch))
    board.on_train_end({})
    assert board.state_dict()["_last_batch"] == 3, "the batches were counted all the same"


def test_steps_per_second_are_batches_over_seconds(tmp_path, monkeypatch):
    clock = itertools.count(step=0.5)  # each look at it takes half a second
    monkeypatch.setattr(tensorboard, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    board = begin(TensorBoard(tmp_path, write_steps_per_second=True))
    board.on_epoch_begin(0, {})
    board.on_execution_end("train", 63, {})
    board.on_epoch_end(0, {"loss": 1.0})
    board.on_train_end({})
    assert scalars(tmp_path)["train/epoch_steps_per_second"] == [(0, 128.0)]


def test_steps_per_second_of_batches_are_those_since_the_last_scalar(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tensorboard, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    board = begin(TensorBoard(tmp_path, write_steps_per_second=True, update_freq=2))
    board.on_epoch_begin(0, {})
    for batch, secs in enumerate([1.0, 1.0, 0.5, 0.5]):
        now[0] += secs
        run_batches(board, [batch])
    board.on_train_end({})
    assert scalars(tmp_path)["train/batch_steps_per_second"] == [(2, 1.0), (4, 2.0)]


# Resuming, and ends that were not planned


def test_a_resumed_run_continues_the_step_numbers_in_the_same_directory(tmp_path):
    board = begin(TensorBoard(tmp_path, update_freq=1))
    board.on_epoch_begin(0, {})
    run_batches(board, range(3))
    board.on_epoch_end(0, {"loss": 1.0})
    board.on_epoch_begin(1, {})
    run_batches(board, range(1))
    state = json.loads(json.dumps(board.state_dict()))
    board.set_model(FakeModel())  # closes the files, as the end of the process would

    resumed = begin(TensorBoard(tmp_path, update_freq=1))
    resumed.on_epoch_begin(1, {})  # as a resumed `fit` does, before the state
    resumed.load_state_dict(state)
    run_batches(resumed, range(1, 3))
    resumed.on_epoch_end(1, {"loss": 2.0})
    resumed.on_epoch_begin(2, {})
    run_batches(resumed, range(1))
    resumed.on_train_end({})
    points = scalars(tmp_path)
    assert points["train/batch_loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 1.0), (5, 2.0), (6, 3.0), (7, 1.0)]
    assert points["train/epoch_loss"] == [(0, 1.0), (1, 2.0)]


def test_batches_of_fused_steps_are_counted(tmp_path):
    board = begin(TensorBoard(tmp_path))
    for epoch in range(2):
        board.on_epoch_begin(epoch, {})
        board.on_execution_end("train", 3, {})
        board.on_execution_end("test", 7, {})
        board.on_execution_end("train", 4, {})
        board.on_epoch_end(epoch, {})
    assert board.state_dict() == {"_batches_before_epoch": 5, "_last_batch": 4}


def test_a_run_resumed_in_an_epoch_ends_executions_at_the_batches_to_write(tmp_path):
    board = begin(TensorBoard(tmp_path, update_freq=3))
    board.on_epoch_begin(0, {})
    board.on_execution_end("train", 4, {})
    board.on_epoch_begin(1, {})
    board.on_execution_end("train", 1, {})
    resumed = begin(TensorBoard(tmp_path, update_freq=3))
    resumed.on_epoch_begin(1, {})
    resumed.load_state_dict(board.state_dict())
    assert resumed.next_sync_step("train", 2) == board.next_sync_step("train", 2) == 3, "batch 9 of the fit"


def test_epochs_are_on_the_disk_when_they_end(tmp_path):
    board = begin(TensorBoard(tmp_path))
    board.on_epoch_end(0, {"loss": 0.5})
    assert scalars(tmp_path)["train/epoch_loss"] == [(0, 0.5)]
    board.on_train_end({})


def test_batches_are_on_the_disk_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "FLUSH_SECS", 0.0)
    board = begin(TensorBoard(tmp_path, update_freq=1))
    board.on_epoch_begin(0, {})
    run_batches(board, range(1))
    assert scalars(tmp_path)["train/batch_loss"] == [(1, 1.0)]
    board.on_train_end({})


def test_a_process_other_than_the_first_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    board = begin(TensorBoard(tmp_path, update_freq=1, histogram_freq=1, embeddings_freq=1, profile_batch=1),
                  FakeModel({"words": {"embedding": np.ones((2, 2), np.float32)}}, text="module"))
    board.on_epoch_begin(0, {})
    run_batches(board, range(2))
    board.on_test_end({"loss": 1.0})
    board.on_epoch_end(0, {"loss": 1.0})
    board.on_train_end({})
    assert list(tmp_path.iterdir()) == []


# The compiled step, and profiles


def test_the_text_of_the_step_is_written_once_in_a_fit(tmp_path):
    model = FakeModel(text="module @train_step")
    board = begin(TensorBoard(tmp_path), model)
    board.on_epoch_begin(0, {})
    assert model.texts_asked == 0
    run_batches(board, range(3))
    board.on_train_end({})
    assert model.texts_asked == 1
    assert read_events(tmp_path) == [("train", "train_step", "text", 0, "```\nmodule @train_step\n```")]


@pytest.mark.parametrize(("arguments", "asked"), [({}, 1), ({"write_graph": False}, 0)])
def test_no_text_is_written_for_a_step_without_one(arguments, asked, tmp_path):
    model = FakeModel(text=None)
    board = begin(TensorBoard(tmp_path, **arguments), model)
    board.on_epoch_begin(0, {})
    run_batches(board, range(2))
    board.on_train_end({})
    assert model.texts_asked == asked
    assert read_events(tmp_path) == []


def test_a_profile_spans_the_batches_asked_for_and_steps_are_fused_again_after_it(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append(directory))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    board = begin(TensorBoard(tmp_path, profile_batch=(3, 5)))
    fused = []
    for epoch in range(3):
        board.on_epoch_begin(epoch, {})
        fused.append(not CallbackList([board]).wants_batch_hooks("train"))
        for batch in range(3):
            calls.append(3 * epoch + batch + 1)
            run_batches(board, [batch])
        board.on_epoch_end(epoch, {})
    board.on_train_end({})
    assert calls == [1, 2, 3, str(tmp_path / "train"), 4, 5, "stop", 6, 7, 8, 9]
    assert fused == [False, False, True]


def test_a_profile_that_outlasts_the_fit_ends_with_it(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    board = begin(TensorBoard(tmp_path, profile_batch="1,9"))
    board.on_epoch_begin(0, {})
    run_batches(board, range(2))
    board.on_train_end({})
    assert calls == ["start", "stop"]


def test_a_profile_that_cannot_start_only_warns(tmp_path, monkeypatch):
    def fail(directory):
        raise RuntimeError("another profile runs")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    board = begin(TensorBoard(tmp_path, profile_batch=1))
    board.on_epoch_begin(0, {})
    with pytest.warns(UserWarning, match="cannot start to profile: another profile runs"):
        run_batches(board, range(1))
    board.on_train_end({})


# Arguments


def test_metadata_of_embeddings_that_are_not_written_are_refused():
    with pytest.raises(ValueError, match="`embeddings_freq` is 0"):
        TensorBoard(embeddings_metadata="words.tsv")


@pytest.mark.parametrize(("given", "batches"), [
    (0, (0, 0)), (4, (4, 4)), ((2, 5), (2, 5)), ([2, 5], (2, 5)), ("2,5", (2, 5)), ("4", (4, 4))])
def test_the_batches_to_profile_can_be_given_in_keras_ways(given, batches):
    board = TensorBoard(profile_batch=given)
    assert (board._start_batch, board._stop_batch) == batches


def test_the_attributes_are_keras_ones():
    board = TensorBoard(pathlib.Path("logs"), update_freq="batch")
    assert (board.log_dir, board.update_freq, board.histogram_freq) == ("logs", 1, 0)
    assert (board.write_graph, board.write_images, board.write_steps_per_second) == (True, False, False)
    assert (board.embeddings_freq, board.embeddings_metadata) == (0, None)


def test_without_tensorboardx_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    monkeypatch.delitem(sys.modules, "trainer.callbacks.tensorboard.event_file")
    with pytest.raises(ImportError, match=r"`pip install 'trainer-jax\[tensorboard\]'`"):
        TensorBoard()


# Images


@pytest.mark.parametrize(("shape", "images"), [
    ((), None), ((4,), [1, 4, 1]), ((2, 3), [3, 2, 1]), ((3, 2), [3, 2, 1]), ((2, 3, 5), [3, 2, 3]),
    ((2, 4, 5, 3), [5, 4, 2]), ((2, 2, 5, 7), None)])
def test_weights_become_images_by_their_axes(shape, images, tmp_path):
    weight = np.linspace(0, 1, max(int(np.prod(shape)), 1), dtype=np.float32).reshape(shape)
    board = begin(TensorBoard(tmp_path, histogram_freq=1, write_images=True), FakeModel({"layer": {"weight": weight}}))
    board.on_epoch_end(0, {})
    board.on_train_end({})
    written = {tag: value for _, tag, plugin, _, value in read_events(tmp_path) if plugin == "images"}
    if images is None:
        assert written == {}
    else:
        width, height, pixels = written["layer/weight/image"]
        assert [width, height, len(pixels)] == images
        assert np.shape(pixels[0])[:2] == (height, width)
