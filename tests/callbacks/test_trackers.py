"""The loggers of MLflow and Weights & Biases, with the packages themselves and without a server."""

import importlib.util
import os
import sys

import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss
from tests.support.tracked_runs import TRACKERS
from trainer.callbacks import BackupAndRestore, Callback, LogTo, loggers

X, Y, _ = classification(24)
LOGGERS = {"mlflow": loggers.MLflow, "wandb": loggers.WandB}

# What the packages do, and leave behind, is not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet_packages")]


@pytest.fixture
def quiet_packages(monkeypatch, tmp_path):
    """Lets the packages write to the test's folder alone, and takes back what they leave in the environment."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_SILENT": "true", "HOME": str(tmp_path), "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        os.environ[name] = value
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(params=TRACKERS)
def package(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


class Crash(Callback):
    """Ends the training by an exception after a batch of an epoch."""

    def __init__(self, epoch, batch):
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyError("crash")


def fit(*callbacks):
    model = trainer.Model(LinenMLP(), seed=3)
    model.compile(trainer.optimizers.SGD(0.1), logits_loss(), metrics=["accuracy"])
    return model.fit(X, Y, batch_size=4, epochs=3, validation_data=(X, Y), verbose=0, callbacks=list(callbacks)).history


def assert_points(points, steps, values):
    assert [step for step, _ in points] == steps
    np.testing.assert_allclose([value for _, value in points], values, rtol=1e-6)


def test_a_package_has_the_metrics_and_the_parameters_of_a_run(package, tmp_path):
    make, runs = TRACKERS[package]
    history = fit(LogTo(make(tmp_path), log_every=3))
    (run,) = runs(tmp_path)
    assert run["status"] == "finished"
    assert str(run["params"]["epochs"]) == "3" and run["params"]["optimizer"] == "SGD(learning_rate=0.1)"
    for name, values in history.items():
        assert_points(run["metrics"][name], [6, 12, 18], values)
    assert [step for step, _ in run["metrics"]["batch_loss"]] == [3, 6, 9, 12, 15, 18]


def test_an_exception_ends_the_run_of_the_package(package, tmp_path):
    make, runs = TRACKERS[package]
    with pytest.raises(KeyError, match="crash"):
        fit(LogTo(make(tmp_path), log_every=1), Crash(0, 3))
    (run,) = runs(tmp_path)
    assert run["status"] == "failed"
    assert [step for step, _ in run["metrics"]["batch_loss"]] == [1, 2, 3]  # all that the callback was told of


def test_a_run_that_resumes_goes_on_in_the_run_of_the_package(package, tmp_path):
    make, runs = TRACKERS[package]
    whole = tmp_path / "whole"
    whole.mkdir()
    fit(LogTo(make(whole), log_every=2))
    with pytest.raises(KeyError):
        fit(LogTo(make(tmp_path), log_every=2), Crash(1, 4), BackupAndRestore(tmp_path / "backup"))
    fit(LogTo(make(tmp_path), log_every=2), Crash(9, 9), BackupAndRestore(tmp_path / "backup"))
    (expected,) = runs(whole)
    if package == "mlflow":
        (run,) = runs(tmp_path)
        assert run["params"] == expected["params"] and run["status"] == "finished"
        assert {name: sorted(points) for name, points in run["metrics"].items()} == {
            name: sorted(points) for name, points in expected["metrics"].items()}
    else:  # without a server there are two parts, of one run as their names say
        first, second = runs(tmp_path)
        assert first["metrics"]["val_loss"] + second["metrics"]["val_loss"] == expected["metrics"]["val_loss"]
        # Nothing tells the steps that a part has that is not sent yet.
        before = [point for point in first["metrics"]["batch_loss"] if point[0] <= 6]
        assert before + second["metrics"]["batch_loss"] == expected["metrics"]["batch_loss"]
        assert second["params"] == {} or "optimizer" not in second["params"]


def test_a_run_that_was_given_stays_open(package, tmp_path):
    make, runs = TRACKERS[package]
    other = make(tmp_path)
    run, closing = other.run, other.finish
    given = "run_id" if package == "mlflow" else "run"
    settings = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"} if package == "mlflow" else {}
    fit(LogTo(LOGGERS[package](**{given: run}, **settings)))
    if package == "mlflow":
        assert runs(tmp_path)[0]["status"] == "running"
    other.log_metrics({"later": 1.0}, step=7)
    closing()
    (found,) = runs(tmp_path)
    assert found["metrics"]["later"] == [(7, 1.0)] and len(found["metrics"]["val_loss"]) == 3


def test_an_artifact_is_kept(package, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    make, runs = TRACKERS[package]
    logger = make(tmp_path)
    logger.log_params({"seed": 0})
    logger.log_artifact(file)
    logger.finish()
    later = tmp_path / "later.txt"
    later.write_text("bye")
    logger.log_artifact(later)
    if package == "mlflow":
        copies = [path for path in tmp_path.rglob("*.txt") if path not in (file, later)]
        assert sorted(path.read_text() for path in copies) == ["bye", "hello"]
        assert len({path.parent for path in copies}) == 1  # of one run
        (run,) = runs(tmp_path)
        assert run["status"] == "finished"
    else:  # without a server there are two parts, of one run as their names say
        assert len({path.name for path in tmp_path.rglob("run-*.wandb")}) == 1


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named_with_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"`{LOGGERS[name].__name__}` needs {name}.*trainer-jax\[{name}\]"):
        LOGGERS[name]()


def test_a_run_is_not_given_with_settings_for_another():
    pytest.importorskip("wandb")
    with pytest.raises(ValueError, match=r"`run` is there already, so .* takes no name with it"):
        loggers.WandB(run=object(), name="other")
