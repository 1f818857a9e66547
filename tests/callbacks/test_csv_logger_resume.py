"""A CSV file that a killed run goes on with ends up byte for byte like that of a run that was never killed."""

import itertools
import os
import signal
import subprocess
import sys

import pytest

import trainer
from tests.support import project_files
from tests.support.networks import LinenMLP, classification, logits_loss
from trainer.callbacks import Callback, CallbackList, CSVLogger
from trainer.callbacks.checkpoints.backup_and_restore import BackupAndRestore

EPOCHS = [{"loss": 0.1 * epoch, "accuracy": epoch, **({} if epoch % 2 else {"val_loss": 0.5})} for epoch in range(5)]
HEADER, ROW = b"epoch,loss,val_loss,accuracy,val_accuracy\r\n", b"0,0.5,NA,1,NA\r\n"  # in an order of its own
BEFORE = {"no file": None, "empty": b"", "rows": HEADER + ROW, "longer": HEADER + ROW * 99}


def begun(path, append):
    logger = CSVLogger(path, append=append)
    logger.on_train_begin()
    return logger


def log(logger, first, last):
    for epoch in range(first, last):
        logger.on_epoch_end(epoch, dict(EPOCHS[epoch]))


def end(logger):
    logger.on_train_end()
    with open(logger.filename, "rb") as file:
        return file.read()


@pytest.fixture(params=itertools.product(BEFORE, [False, True]), ids=str)
def start(request, tmp_path):
    """A function that puts into a file what the case begins with; and whether the logger appends to it."""
    before, append = request.param

    def place(name):
        path = tmp_path / name
        if BEFORE[before] is not None:
            path.write_bytes(BEFORE[before])
        return path

    return place, append


def undisturbed(start):
    place, append = start
    logger = begun(place("whole.csv"), append)
    log(logger, 0, len(EPOCHS))
    return end(logger)


@pytest.mark.parametrize(("saved", "killed"), [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (3, 5), (4, 4), (5, 5)])
def test_a_resumed_file_equals_an_undisturbed_one(start, saved, killed):
    place, append = start
    path = place("resumed.csv")
    logger = begun(path, append)
    log(logger, 0, saved)
    state = logger.state_dict()
    log(logger, saved, killed)
    logger = begun(path, append)  # the first one's file stays open, as nobody called its end
    logger.load_state_dict(state)
    log(logger, saved, len(EPOCHS))
    assert end(logger) == undisturbed(start)


@pytest.mark.parametrize("saved", [0, 2])
def test_a_row_that_was_torn_by_the_kill_is_cut_off(start, saved):
    place, append = start
    path = place("resumed.csv")
    logger = begun(path, append)
    log(logger, 0, saved)
    state = logger.state_dict()
    with path.open("ab") as file:
        file.write(b"2,0.2,")
    logger = begun(path, append)
    logger.load_state_dict(state)
    log(logger, saved, len(EPOCHS))
    assert end(logger) == undisturbed(start)


def test_a_run_that_is_resumed_several_times_equals_an_undisturbed_one(start):
    place, append = start
    path, state, first = place("resumed.csv"), None, 0
    for saved, killed in ((1, 3), (2, 4), (4, 5), (5, 5)):
        logger = begun(path, append)
        if state is not None:
            logger.load_state_dict(state)
        log(logger, first, saved)
        state, first = logger.state_dict(), saved
        log(logger, saved, killed)
    assert end(logger) == undisturbed(start)


def test_a_run_that_does_not_resume_replaces_the_file_with_its_first_row(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(BEFORE["longer"])
    logger = begun(path, append=False)
    assert path.read_bytes() == BEFORE["longer"]
    log(logger, 0, 1)
    assert path.read_bytes() == b"epoch,accuracy,loss,val_loss\r\n0,0,0.0,0.5\r\n"
    assert end(logger) == path.read_bytes()


def test_a_run_without_an_epoch_leaves_an_empty_file_or_what_was_there(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(BEFORE["rows"])
    assert end(begun(path, append=True)) == BEFORE["rows"]
    assert end(begun(path, append=False)) == b""


def test_rows_that_are_gone_cost_a_warning_and_the_others_follow_under_a_header(tmp_path):
    path = tmp_path / "log.csv"
    logger = begun(path, append=False)
    log(logger, 0, 2)
    state = logger.state_dict()
    path.unlink()
    logger = begun(path, append=False)
    with pytest.warns(UserWarning, match=r"`CSVLogger` resumes, but '.*log.csv' does not have the rows of the epochs"):
        logger.load_state_dict(state)
    log(logger, 2, 3)
    again = logger.state_dict()
    log(logger, 3, 4)
    logger = begun(path, append=False)
    logger.load_state_dict(again)
    log(logger, 3, 4)
    assert end(logger) == b"epoch,accuracy,loss,val_loss\r\n2,2,0.2,0.5\r\n3,3,0.30000000000000004,NA\r\n"


def test_rows_that_another_run_appends_meanwhile_stay(tmp_path):
    path = tmp_path / "log.csv"
    logger = begun(path, append=True)
    for epoch in range(2):
        log(logger, epoch, epoch + 1)
        with path.open("ab") as file:
            file.write(b"another's\r\n")
    assert end(logger).count(b"another's") == 2


def test_a_device_can_be_written_to():
    logger = begun(os.devnull, append=False)
    log(logger, 0, 2)
    assert end(logger) == b""


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    logger = begun(path, append=False)
    log(logger, 0, 2)
    state, written = logger.state_dict(), path.read_bytes()
    monkeypatch.setattr("jax.process_index", lambda: 1)
    others = CallbackList([CSVLogger(path)])
    others.on_train_begin()
    others.on_epoch_end(0, {"loss": 1.0})
    others.load_state_dict({"CSVLogger": state})  # without a warning that rows are gone
    others.on_epoch_end(2, {"loss": 1.0})
    others.on_train_end()
    assert path.read_bytes() == written


class Interruption(Callback):
    """Ends a run behind the row of an epoch, or in the middle of an epoch, before a checkpoint is written."""

    def __init__(self, where):
        self.where = where

    def on_epoch_end(self, epoch, logs=None):
        if self.where == ("epoch", epoch):
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        if self.where == ("step", self.model.optimizer.iterations):
            raise KeyboardInterrupt


def test_a_run_that_begins_anew_cuts_the_rows_of_the_one_before_it(start):
    place, append = start
    path = place("resumed.csv")
    first = CallbackList([begun(path, append)])
    note = first.snapshot_side_effects()
    for killed in (2, 1):
        log(first.callbacks[0], 0, killed)
        first = CallbackList([begun(path, append)])
        first.rollback_side_effects(note)
        assert first.snapshot_side_effects() == note
    log(first.callbacks[0], 0, len(EPOCHS))
    assert end(first.callbacks[0]) == undisturbed(start)


@pytest.mark.parametrize("resumes", [True, False])
def test_rows_that_another_run_has_appended_are_kept_aside(tmp_path, caplog, resumes):
    path = tmp_path / "log.csv"
    logger = begun(path, append=True)
    log(logger, 0, int(resumes))
    note, state = logger.snapshot_side_effects(), logger.state_dict()
    other = begun(path, append=True)
    log(other, 0, 3)
    of_other = end(other)[state["_end"]:]
    logger = begun(path, append=True)
    if resumes:
        logger.load_state_dict(state)
    else:
        logger.rollback_side_effects(note)
    log(logger, int(resumes), 2)
    assert len(end(logger).splitlines()) == 3
    assert (tmp_path / "log.csv.cut").read_bytes() == of_other
    assert f"has moved the rows behind it to '{path}.cut'" in caplog.text


def test_rows_of_another_file_are_not_cut(tmp_path):
    one, other = (begun(tmp_path / name, append=True) for name in ("one.csv", "other.csv"))
    note = one.snapshot_side_effects()
    log(other, 0, 2)
    other = begun(tmp_path / "other.csv", append=True)
    other.rollback_side_effects(note)
    assert len(end(other).splitlines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("append", "save_freq", "where"), [
    (True, "epoch", ("epoch", 1)), (False, 3, ("step", 8)), (True, 3, ("epoch", 1)), (True, 100, ("epoch", 1)),
])
def test_fit_goes_on_with_the_file_of_an_interrupted_run(append, save_freq, where, tmp_path):
    x, y, _ = classification(16)

    def run(name, *others):
        model = trainer.Model(LinenMLP())
        model.compile("sgd", logits_loss(), metrics=["accuracy"])
        path = tmp_path / f"{name}.csv"
        if not path.exists():
            path.write_bytes(BEFORE["longer"])
        model.fit(x, y, batch_size=4, epochs=4, validation_data=(x, y), validation_freq=2, verbose=0,
                  callbacks=[CSVLogger(path, append=append), *others])
        return path.read_bytes()

    backup = {"backup_dir": tmp_path / "backup", "save_freq": save_freq}
    with pytest.raises(KeyboardInterrupt):
        run("resumed", Interruption(where), BackupAndRestore(**backup))
    assert run("resumed", BackupAndRestore(**backup)) == run("whole")


KILLED_AT_THE_SECOND_ROW = """
import os, signal, sys
import numpy as np
from flax import linen as nn
import trainer
from trainer import callbacks

def kill(epoch, logs):
    if epoch == 1 and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

model = trainer.Model(nn.Dense(1))
model.compile("sgd", "mse")
model.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), batch_size=4, epochs=3, verbose=0, callbacks=[
    callbacks.CSVLogger("log.csv", append=True), callbacks.LambdaCallback(on_epoch_end=kill),
    callbacks.BackupAndRestore("backup", save_freq=100)])
"""


@pytest.mark.processes
def test_rows_of_a_run_that_was_killed_before_its_first_checkpoint_are_not_repeated(tmp_path):
    (tmp_path / "log.csv").write_bytes(b"epoch,loss,val_loss\r\n7,0.5,NA\r\n")
    for argument, code in (("kill", -signal.SIGKILL), ("kill", -signal.SIGKILL), ("", 0)):
        done = subprocess.run([sys.executable, "-c", KILLED_AT_THE_SECOND_ROW, argument], cwd=tmp_path, timeout=120,
                              env={**os.environ, "PYTHONPATH": project_files.ROOT})
        assert done.returncode == code
        assert (tmp_path / "backup").exists() == (code != 0)
    assert [line.split(b",")[0] for line in (tmp_path / "log.csv").read_bytes().splitlines()] == [
        b"epoch", b"7", b"0", b"1", b"2"]


def test_folders_that_do_not_exist_are_made(tmp_path):
    logger = begun(tmp_path / "runs" / "1" / "log.csv", append=False)
    log(logger, 0, 1)
    logger.on_train_end()
    assert (tmp_path / "runs" / "1" / "log.csv").read_text().startswith("epoch,")


APPENDED = [  # what is there, the logs, and what is there afterwards, or the error
    (b"epoch,loss\r\n0,0.5\r\n", {"loss": 0.25}, b"epoch,loss\r\n0,0.5\r\n0,0.25\r\n"),
    (b"epoch,mae,loss\r\n", {"loss": 0.25, "mae": 2}, b"epoch,mae,loss\r\n0,2,0.25\r\n"),
    (b"epoch,mae,loss\r\n", {"loss": 0.25}, b"epoch,mae,loss\r\n0,NA,0.25\r\n"),
    (b"epoch,loss\r\n0,0.5\r\n", {"loss": 0.25, "mape": 1},
     r"'.*log.csv', .* 'epoch', 'loss', and none for mape\. Give"),
    (b"epoch;loss\r\n", {"loss": 0.25}, r"has written with this separator\. Received: .*'epoch;loss'\. Give"),
    (b"0,0.5\r\n", {"loss": 0.25}, "begins with the columns '0', '0.5'"),
    (b"\xff\xfe\x00", {"loss": 0.25}, "a new file, or one that it has written"),
]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(("before", "logs", "after"), APPENDED)
def test_a_file_that_is_appended_to_keeps_its_columns_or_is_left_as_it_is(before, logs, after, is_known, tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(before)
    logger = CSVLogger(path, append=True)

    def run():
        if is_known:
            CallbackList([logger]).check_monitors(logs)
        logger.on_train_begin()
        logger.on_epoch_end(0, dict(logs))
        logger.on_train_end()

    if isinstance(after, str):
        with pytest.raises(ValueError, match=after):
            run()
        after = before
    else:
        run()
    logger.on_train_end()
    assert path.read_bytes() == after


def test_logs_that_only_a_validation_has_get_a_column_before_there_is_one(tmp_path):
    logger = CSVLogger(tmp_path / "log.csv")
    CallbackList([logger]).check_monitors(["loss", "val_loss", "val_recall"], ["loss"])
    logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 0.5})
    assert end(logger) == b"epoch,loss,val_loss,val_recall\r\n0,0.5,NA,NA\r\n"
