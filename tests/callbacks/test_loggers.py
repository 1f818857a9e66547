"""LogTo and the loggers that write files: what they write, when they read, and how they go on after an interruption."""

import json
import pathlib
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import trainer
from tests.support import event_files
from tests.support.networks import LinenMLP, classification, logits_loss
from trainer.callbacks import BackupAndRestore, Callback, LazyLogs, LogTo, ReduceLROnPlateau, TensorBoard, loggers
from trainer.testing import LocalCluster

X, Y, _ = classification(24)
BATCHES = 6  # of an epoch


class Notes:
    """A logger that notes its calls, and fails at those of some names."""

    def __init__(self, failing=()):
        self.calls, self.failing = [], failing

    def _note(self, *call):
        self.calls.append(call)
        if call[0] in self.failing:
            raise ConnectionError("the server is gone")

    def log_metrics(self, metrics, step):
        self._note("metrics", step, dict(metrics))

    def log_params(self, params):
        self._note("params", dict(params))

    def log_artifact(self, path, name=None):
        self._note("artifact", path, name)

    def finish(self, failed=False):
        self._note("finish", failed)

    def steps(self, prefix=""):
        return [call[1] for call in self.calls if call[0] == "metrics"
                and any(name.startswith("batch_") == (prefix == "batch_") for name in call[2])]


class Crash(Callback):
    """Ends the training by an exception after a batch of an epoch."""

    def __init__(self, epoch, batch):
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyError("crash")


def compiled(**options):
    model = trainer.Model(LinenMLP(), seed=3)
    model.compile(trainer.optimizers.SGD(0.1), logits_loss(), metrics=["accuracy"], **options)
    return model


def fit(*callbacks, model=None, epochs=3, **options):
    return (model or compiled()).fit(X, Y, batch_size=4, epochs=epochs, validation_data=(X, Y), verbose=0,
                                     callbacks=list(callbacks), **options)


def file_loggers(folder):
    return [loggers.JSONLines(folder / "log.jsonl"), loggers.TensorBoardFiles(folder / "events")]


def noted(read, batch):
    """Returns the logs of a batch, which note in a list that they are read."""
    return LazyLogs(["loss"], lambda: read.append(batch) or {"loss": 1.0})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what is logged --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_epochs_are_logged_as_the_history_has_them_after_the_parameters():
    notes = Notes()
    history = fit(LogTo(notes, params={"width": 8})).history
    kinds = [call[0] for call in notes.calls]
    assert kinds == ["params", "metrics", "metrics", "metrics", "finish"] and notes.calls[-1] == ("finish", False)
    params = notes.calls[0][1]
    assert params["optimizer"] == "SGD(learning_rate=0.1)" and params["learning_rate"] == 0.1
    assert (params["epochs"], params["batch_size"], params["seed"], params["width"]) == (3, 4, 3, 8)
    assert params["x"] == f"array of shape {X.shape} and dtype {X.dtype}" and "Strategy(" in params["strategy"]
    assert "verbose" not in params and "callbacks" not in params and "microbatches" not in params
    for epoch, (_, step, metrics) in enumerate(notes.calls[1:-1]):
        assert step == epoch and metrics.pop("learning_rate") == pytest.approx(0.1)
        assert metrics == {name: values[epoch] for name, values in history.items()}


def test_the_rate_is_that_of_the_epoch_although_a_callback_has_set_the_next():
    notes = Notes()
    history = fit(ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0), LogTo(notes)).history
    logged = [metrics["learning_rate"] for kind, _, metrics in notes.calls[1:-1]]
    np.testing.assert_allclose(logged, history["learning_rate"])
    assert logged[-1] < logged[0] == pytest.approx(0.1)


@pytest.mark.slow
def test_arguments_that_are_not_the_defaults_are_parameters():
    notes = Notes()
    fit(LogTo(notes), model=compiled(ema_decay=0.9, microbatches=2), shuffle=False)
    params = notes.calls[0][1]
    assert (params["ema_decay"], params["microbatches"], params["shuffle"]) == (0.9, 2, False)


@pytest.mark.slow
def test_own_parameters_go_before_those_of_the_run():
    notes = Notes()
    fit(LogTo(notes, params={"optimizer": "mine"}), epochs=1)
    assert notes.calls[0][1]["optimizer"] == "mine"


@pytest.mark.slow
def test_batches_are_logged_at_their_number_in_the_fit_and_epochs_among_them():
    notes = Notes()
    fit(LogTo(notes, log_every=4))
    assert notes.steps("batch_") == [4, 8, 12, 16]
    assert notes.steps() == [6, 12, 18]
    assert [call[2]["epoch"] for call in notes.calls if call[0] == "metrics" and "epoch" in call[2]] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [1, 3, "auto"])
def test_logs_of_a_batch_are_the_same_however_steps_are_fused(fused):
    class Seen(Callback):
        logs = []

        def on_train_batch_end(self, batch, logs=None):
            self.logs.append(dict(logs))

    seen, notes = Seen(), Notes()
    seen.logs = []
    fit(seen)
    fit(LogTo(notes, log_every=2), model=compiled(steps_per_execution=fused))
    logged = {call[1]: call[2] for call in notes.calls if call[0] == "metrics" and "batch_loss" in call[2]}
    assert sorted(logged) == list(range(2, 19, 2))
    for step, metrics in logged.items():
        assert metrics["batch_loss"] == pytest.approx(seen.logs[step - 1]["loss"], rel=1e-6)


def test_logs_of_a_batch_are_read_when_the_next_execution_has_begun():
    log, read = LogTo(Notes(), log_every=1), []
    log.set_model(compiled())
    log.on_train_begin()
    log.on_epoch_begin(0)
    for batch in range(3):
        log.next_sync_step("train", batch)
        log.on_execution_end("train", batch, noted(read, batch))
        assert read == list(range(batch))
    log.flush()
    assert read == [0, 1, 2]


def test_logs_that_are_not_due_are_never_read():
    log, read = LogTo(Notes(), log_every=2), []
    log.set_model(compiled())
    log.on_train_begin()
    log.on_epoch_begin(0)
    for batch in range(4):
        log.on_execution_end("train", batch, noted(read, batch))
    log.flush()
    assert read == [1, 3]


def test_a_log_of_several_values_gets_a_name_for_each():
    notes = Notes()
    log = LogTo(notes)
    log.set_model(compiled())
    log.on_train_begin()
    log.on_epoch_end(0, {"recall": np.array([0.5, 1.0])})
    assert {"recall_0", "recall_1"} <= notes.calls[1][2].keys()


@pytest.mark.slow
def test_evaluation_logs_nothing():
    notes, model = Notes(), compiled()
    fit(model=model, epochs=1)
    model.evaluate(X, Y, verbose=0, callbacks=[LogTo(notes)])
    assert notes.calls == []


# --- the end, and what fails -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loggers_are_told_that_an_exception_has_ended_the_training():
    notes = Notes()
    with pytest.raises(KeyError, match="crash"):
        fit(LogTo(notes, log_every=1), Crash(1, 2))
    assert notes.calls[-1] == ("finish", True) and [call[0] for call in notes.calls].count("finish") == 1
    assert notes.steps("batch_")[-1] == BATCHES + 2  # the last batch of which this callback was told


@pytest.mark.slow
def test_a_logger_that_fails_at_once_ends_the_training():
    with pytest.raises(ConnectionError, match="the server is gone"):
        fit(LogTo(Notes(failing=["params"])))


@pytest.mark.slow
def test_a_logger_that_fails_later_costs_a_warning_and_not_the_training():
    failing, other = Notes(failing=["metrics"]), Notes()
    with pytest.warns(UserWarning, match=r"`Notes` gets no more logs .*ConnectionError: the server is gone"):
        history = fit(LogTo(failing, other))
    assert len(history.epoch) == 3
    assert [call[0] for call in failing.calls] == ["params", "metrics", "finish"]
    assert other.steps() == [0, 1, 2]


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: LogTo(), ValueError, "needs a logger"),
    (lambda: LogTo(3), TypeError, r"`loggers` must be instances .* type int"),
    (lambda: LogTo(Notes), TypeError, r"`loggers` must be instances"),
    (lambda: LogTo(Notes(), log_every=0), ValueError, r"`log_every` must be 'epoch' or a whole number"),
    (lambda: LogTo(Notes(), log_every="step"), ValueError, r"`log_every` must be 'epoch' or"),
    (lambda: LogTo(Notes(), params=[1]), TypeError, r"`params` must be a dict"),
    (lambda: loggers.JSONLines(""), ValueError, r"`path` must be"),
    (lambda: loggers.JSONLines("a.jsonl", append="yes"), TypeError, r"`append` must be True or False"),
    (lambda: loggers.JSONLines("/dev/null"), ValueError, r"regular file, .*'/dev/null', which is none"),
    (lambda: LogTo(loggers.JSONLines("a"), loggers.JSONLines("./a")), ValueError, "two loggers for the file './a'"),
])
def test_what_cannot_be_used_is_said_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_hold_what_was_logged(tmp_path):
    history = fit(LogTo(*file_loggers(tmp_path), log_every=3)).history
    first, *others = lines(tmp_path / "log.jsonl")
    assert first["params"]["epochs"] == 3
    epochs = [line for line in others if "loss" in line]
    assert [line["step"] for line in epochs] == [6, 12, 18]
    for name in ("loss", "val_loss"):
        assert [line[name] for line in epochs] == history[name]
    (points,) = [points for tag, points in event_files.scalars(tmp_path / "events").items() if tag.endswith("/loss")]
    assert points == [(step, pytest.approx(loss)) for step, loss in zip([6, 12, 18], history["loss"], strict=True)]


def test_mlflow_gets_parameters_as_short_texts_in_requests_that_it_takes(monkeypatch):
    requests = []
    client = SimpleNamespace(log_batch=lambda run, params: requests.append((run, params)))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(
        MlflowClient=lambda uri: client, entities=SimpleNamespace(Param=lambda name, value: (name, value))))
    sizes = {f"size_{number}": number for number in range(100)}
    loggers.MLflow(run_id="seven").log_params({"note": "x" * 2000, **sizes})
    assert [(run, len(params)) for run, params in requests] == [("seven", 100), ("seven", 1)]
    assert requests[0][1][:2] == [("note", "x" * 500), ("size_0", "0")] and requests[1][1] == [("size_99", "99")]


@pytest.mark.slow
def test_another_fit_with_the_same_loggers_begins_the_files_anew(tmp_path):
    log = LogTo(*file_loggers(tmp_path))
    fit(log)
    fit(log, epochs=1)
    assert len(lines(tmp_path / "log.jsonl")) == 2


def test_numbers_that_are_not_finite_are_null_in_json_lines(tmp_path):
    log = loggers.JSONLines(tmp_path / "log.jsonl")
    log.log_metrics({"loss": float("nan"), "other": float("inf")}, step=1)
    assert lines(tmp_path / "log.jsonl") == [{"step": 1, "loss": None, "other": None}]


@pytest.mark.slow
def test_a_file_that_cannot_be_written_ends_the_training_at_once(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"`path` must be the path of a file, and is a folder"):
        loggers.JSONLines(tmp_path)
    log = loggers.JSONLines(tmp_path / "log")
    (tmp_path / "log").mkdir()  # since then
    with pytest.raises(IsADirectoryError):
        fit(LogTo(log))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match=r"cannot be written to its folder .*Give a path in a folder"):
        fit(LogTo(loggers.JSONLines(tmp_path / "file" / "log")))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.slow
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "log")
    for epochs in (2, 1):
        fit(LogTo(loggers.JSONLines(tmp_path / "link")), epochs=epochs)
    assert (tmp_path / "link").is_symlink() and len((tmp_path / "disk" / "log").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_files_that_are_appended_to_keep_what_was_there(tmp_path, is_same):
    def log():
        return LogTo(loggers.JSONLines(tmp_path / "log.jsonl", append=True))

    first = log()
    fit(first, epochs=2)
    before = (tmp_path / "log.jsonl").read_text()
    second = first if is_same else log()
    second.params_given["more"] = 1
    model = compiled()
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[second])  # without validation
    assert (tmp_path / "log.jsonl").read_text().startswith(before)
    assert [("params" in line, line.get("step"), "val_loss" in line) for line in lines(tmp_path / "log.jsonl")[3:]] == [
        (True, None, False), (False, 0, False)]


def test_a_line_that_was_cut_is_ended_before_others_are_appended(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n{"st')
    loggers.JSONLines(tmp_path / "log.jsonl", append=True).log_metrics({}, step=1)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 0}\n{"st\n{"step": 1}\n'


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("save_freq", "crash"), [
    (2, (1, 4)), ("epoch", (1, 3)), (4, (0, 1)), ("epoch", (2, 0))])
def test_files_of_a_run_that_was_resumed_are_those_of_one_that_was_not_interrupted(tmp_path, save_freq, crash):
    fit(LogTo(*file_loggers(tmp_path / "whole"), log_every=2))
    with pytest.raises(KeyError):
        fit(LogTo(*file_loggers(tmp_path / "resumed"), log_every=2), Crash(*crash),
            BackupAndRestore(tmp_path / "backup", save_freq=save_freq))
    fit(LogTo(*file_loggers(tmp_path / "resumed"), log_every=2), Crash(9, 9),
        BackupAndRestore(tmp_path / "backup", save_freq=save_freq))
    assert (tmp_path / "resumed" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_what_it_was_appended_to(tmp_path):
    def log(folder):
        return LogTo(loggers.JSONLines(tmp_path / folder / "log.jsonl", append=True), log_every=2)

    for folder in ("whole", "resumed"):
        fit(log(folder), epochs=1)
    fit(log("whole"))
    with pytest.raises(KeyError):
        fit(log("resumed"), Crash(1, 4), BackupAndRestore(tmp_path / "backup", save_freq=2))
    fit(log("resumed"), Crash(9, 9), BackupAndRestore(tmp_path / "backup", save_freq=2))
    assert (tmp_path / "resumed" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


def test_tensorboard_is_told_to_leave_out_the_steps_that_come_again(tmp_path):
    first = loggers.TensorBoardFiles(tmp_path)
    first.log_metrics({"loss": 3.0}, step=4)
    state = first.state_dict()
    first.log_metrics({"loss": 2.0}, step=6)
    first.finish(failed=True)
    second = loggers.TensorBoardFiles(tmp_path)
    second.load_state_dict(state)
    second.log_params({"seed": 0})
    second.log_metrics({"loss": 2.0}, step=6)
    second.finish()
    events = list(event_files.events_of(max(tmp_path.iterdir(), key=lambda path: int(path.name.split(".")[-2]))))
    restarts = [event.step for event in events if event.HasField("session_log")]
    assert restarts == [5] and [event.step for event in events if event.summary.value] == [6]


def test_other_loggers_than_those_of_the_run_are_refused(tmp_path):
    log = LogTo(Notes(), Notes())
    log.set_model(compiled())
    log.on_train_begin()
    other = LogTo(Notes())
    with pytest.raises(ValueError, match=r"`LogTo` has 1 loggers. Expected, as in the run that resumes: 2"):
        other.load_state_dict(log.state_dict())


# --- several processes -----------------------------------------------------------------------------------------------


def fit_over_processes(folder):
    with trainer.distribute.MultiWorkerMirroredStrategy().scope():
        model = compiled()
    folder = pathlib.Path(folder)
    log = LogTo(loggers.JSONLines(folder / "log.jsonl"), log_every=2)
    sizes = []

    class Looker(Callback):
        def on_train_end(self, logs=None):
            sizes.append(len(log.state_dict()["loggers"][0] or ()))

    fit(log, Looker(), TensorBoard(folder / "events"), BackupAndRestore(folder / "backup"), model=model)
    return {"chief": jax.process_index() == 0, "has_state": sizes == [1]}


@pytest.mark.processes
def test_of_several_processes_the_first_logs(tmp_path):
    told = LocalCluster(2, timeout_secs=240).run(fit_over_processes, str(tmp_path))
    assert told == [{"chief": True, "has_state": True}, {"chief": False, "has_state": False}]
    first, *others = lines(tmp_path / "log.jsonl")
    assert "params" in first and [line["step"] for line in others] == [2, 4, 6, 6, 8, 10, 12, 12, 14, 16, 18, 18]
    assert json.loads((tmp_path / "run.json").read_text())["devices"]["processes"] == 2
    assert json.loads((tmp_path / "events" / "run.json").read_text())["status"] == "finished"
