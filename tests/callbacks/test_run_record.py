"""`run.json`: what it says of a run, where it lies, and that nothing that goes wrong with it ends a training."""

import json
import logging
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest

import trainer
import trainer.engine.model.core.model_core
import trainer.engine.model.inputs
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer.callbacks import BackupAndRestore, Callback, LogTo, RunRecord, TensorBoard, loggers
from trainer.callbacks.record import environment, run_record

X, Y, _ = classification(24)


class Crash(Callback):
    """Ends the training by an exception in an epoch."""

    def __init__(self, epoch, error):
        self.at, self.error = epoch, error

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.at:
            raise self.error


def compiled(replicas=1, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(LinenMLP(), seed=3, name="digits")
        model.compile(trainer.optimizers.SGD(0.1), logits_loss(), metrics=["accuracy"], **options)
    return model


def fit(*callbacks, model=None, **options):
    options = {"batch_size": 4, "epochs": 2, "validation_data": (X, Y), **options}
    return (model or compiled()).fit(X, Y, verbose=0, callbacks=list(callbacks), **options)


def read(folder):
    return json.loads((pathlib.Path(folder) / "run.json").read_text())


@pytest.mark.slow
def test_a_record_tells_what_a_run_was_and_how_it_went(tmp_path):
    history = fit(RunRecord(tmp_path / "new"), model=compiled(2, ema_decay=0.9), shuffle=False)
    record = read(tmp_path / "new")
    assert (record["status"], record["seed"], record["replicas"]) == ("finished", 3, 2)
    assert record["strategy"] == repr(mirrored(2))
    assert record["model"] == {"name": "digits", "class": "Model", "parameters": 6 * 8 + 8 + 8 * 3 + 3}
    assert record["compile"] == {"optimizer": "SGD(learning_rate=0.1)", "learning_rate": 0.1,
                                 "loss": repr(logits_loss()), "metrics": ["accuracy"], "ema_decay": 0.9}
    assert record["fit"]["shuffle"] is False and record["fit"]["epochs"] == 2 and record["fit"]["batch_size"] == 4
    assert record["fit"]["x"] == f"array of shape {X.shape} and dtype {X.dtype}"
    assert record["data"]["training"]["rows"] == 24 and len(record["data"]["validation"]["first batch"]) == 64
    assert record["history"] == history.history and record["epochs"] == [0, 1]
    assert record["versions"]["jax"] == jax.__version__ and record["devices"]["count"] == len(jax.devices())
    assert record["timing"]["total"] > 0 and record["begin"] <= record["end"] and record["earlier"] == []
    assert record["train_step_flops"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    lambda folder: TensorBoard(folder), lambda folder: BackupAndRestore(folder, delete_checkpoint=False),
    lambda folder: LogTo(loggers.JSONLines(folder / "log.jsonl")),
    lambda folder: LogTo(loggers.TensorBoardFiles(folder))])
def test_what_has_a_folder_gets_a_record_there(tmp_path, make):
    fit(make(tmp_path))
    assert read(tmp_path)["status"] == "finished"


@pytest.mark.slow
def test_a_folder_has_one_record(tmp_path):
    model = compiled()
    fit(TensorBoard(tmp_path), BackupAndRestore(tmp_path, delete_checkpoint=False), RunRecord(tmp_path), model=model)
    assert read(tmp_path)["status"] == "finished"
    given = [TensorBoard(tmp_path), RunRecord(tmp_path)]
    called = trainer.engine.model.inputs.callback_list(model, given, 0, history=True)
    assert [type(callback) for callback in called.callbacks].count(RunRecord) == 1


@pytest.mark.slow
def test_a_backup_that_is_deleted_takes_the_record_with_it(tmp_path):
    fit(BackupAndRestore(tmp_path / "backup"))
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
def test_evaluation_and_prediction_write_none(tmp_path):
    model = compiled()
    fit(model=model)
    model.evaluate(X, Y, verbose=0, callbacks=[TensorBoard(tmp_path), RunRecord(tmp_path)])
    model.predict(X, verbose=0, callbacks=[RunRecord(tmp_path)])
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(RuntimeError("broken"), "failed"), (KeyboardInterrupt(), "interrupted"),
                                               (SystemExit(143), "interrupted")])
def test_a_run_that_does_not_reach_its_end_says_how_it_ended(tmp_path, error, status):
    with pytest.raises(type(error)):
        fit(RunRecord(tmp_path), Crash(1, error))
    record = read(tmp_path)
    assert record["status"] == status and record["error"].startswith(type(error).__name__)
    assert record["epochs"] == [0] and len(record["history"]["loss"]) == 1


@pytest.mark.slow
def test_a_run_that_resumes_keeps_the_times_of_what_came_before(tmp_path):
    with pytest.raises(RuntimeError):
        fit(BackupAndRestore(tmp_path, delete_checkpoint=False), Crash(1, RuntimeError("broken")))
    first = read(tmp_path)
    fit(BackupAndRestore(tmp_path, delete_checkpoint=False), Crash(9, None))
    record = read(tmp_path)
    assert record["earlier"] == [{name: first[name] for name in ("status", "begin", "end", "timing")}]
    assert record["epochs"] == [0, 1] and "error" not in record


@pytest.mark.slow
def test_a_run_that_was_killed_is_told_apart_when_it_resumes(tmp_path):
    with pytest.raises(RuntimeError):
        fit(BackupAndRestore(tmp_path, delete_checkpoint=False), Crash(1, RuntimeError("broken")))
    # What SIGKILL leaves.
    (tmp_path / "run.json").write_text(json.dumps(read(tmp_path) | {"status": "running"}))
    fit(BackupAndRestore(tmp_path, delete_checkpoint=False), Crash(9, None))
    assert [each["status"] for each in read(tmp_path)["earlier"]] == ["killed"]


@pytest.mark.slow
def test_another_run_in_the_folder_has_nothing_before_it(tmp_path):
    fit(RunRecord(tmp_path))
    fit(RunRecord(tmp_path))
    assert read(tmp_path)["earlier"] == []


@pytest.mark.slow
def test_the_record_is_there_after_the_first_step_and_kept_up_to_date(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "MIN_SECS_BETWEEN_WRITES", 0.0)
    seen = []

    class Reader(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(read(tmp_path) if (tmp_path / "run.json").exists() else None)

    fit(RunRecord(tmp_path), Reader(), epochs=3)
    assert seen[0] is None and [each["status"] for each in seen[1:]] == ["running", "running"]
    assert len(seen[2]["history"]["loss"]) >= 1


def test_a_number_that_is_none_is_null(tmp_path):
    record = RunRecord(tmp_path)
    record._write({"loss": float("nan"), "array": np.array([1.0, np.inf]), "other": {1: {2.0}}, "path": tmp_path})
    assert read(tmp_path) == {"loss": None, "array": [1.0, None], "other": {"1": [2.0]}, "path": str(tmp_path)}


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_logged_and_costs_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "trainer"):
        history = fit(RunRecord(tmp_path / "file" / "folder"))
    assert history.epoch == [0, 1] and "run.json could not be written: NotADirectoryError" in caplog.text


@pytest.mark.slow
def test_a_model_that_cannot_be_described_is_logged_and_costs_nothing(tmp_path, caplog, monkeypatch):
    def fails(self):
        raise ValueError("odd")

    monkeypatch.setattr(trainer.engine.model.core.model_core.CurrentRun, "description", fails)
    with caplog.at_level(logging.WARNING, "trainer"):
        assert fit(RunRecord(tmp_path)).epoch == [0, 1]
    assert "run.json could not describe the run: ValueError: odd" in caplog.text


def test_the_commit_of_a_folder_and_whether_it_has_changed(tmp_path):
    def git(*command):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True,
                       capture_output=True)

    assert environment.git_state(str(tmp_path / "none")) is None
    git("init")
    (tmp_path / "script.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    environment.git_state.cache_clear()
    state = environment.git_state(str(tmp_path))
    assert len(state["commit"]) == 40 and state["is_dirty"] is False
    (tmp_path / "script.py").write_text("2")
    environment.git_state.cache_clear()
    assert environment.git_state(str(tmp_path))["is_dirty"] is True
    environment.git_state.cache_clear()


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "GIT_TIMEOUT_SECS", 1e-9)
    environment.git_state.cache_clear()
    assert environment.git_state(os.getcwd()) is None
    environment.git_state.cache_clear()
