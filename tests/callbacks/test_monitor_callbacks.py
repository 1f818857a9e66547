"""Monitors: which direction is better, and which names are refused, before training where that is possible."""

import types

import numpy as np
import pytest

from trainer import callbacks
from trainer.callbacks import (
    Callback,
    CallbackList,
    EarlyStopping,
    History,
    LambdaCallback,
    LearningRateScheduler,
    MonitorCallback,
    ReduceLROnPlateau,
)


@pytest.fixture
def model():
    return types.SimpleNamespace(
        stop_training=False,
        optimizer=types.SimpleNamespace(learning_rate=0.1),
        current_run=types.SimpleNamespace(
            metric_directions={"accuracy": "max", "mse": "min", "inverse_loss": "max"}),
    )


def in_run(callback, model):
    callback.set_model(model)
    callback.on_train_begin()
    return callback


@pytest.mark.parametrize(("monitor", "mode", "expected"), [
    ("loss", "auto", np.less), ("val_loss", "auto", np.less), ("head_loss", "auto", np.less), ("mse", "auto", np.less),
    ("accuracy", "auto", np.greater), ("val_accuracy", "auto", np.greater), ("val_inverse_loss", "auto", np.greater),
    ("val_mse", "max", np.greater), ("accuracy", "min", np.less), ("unheard_of", "max", np.greater),
])
@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau])
def test_the_direction_of_a_monitor(kind, model, monitor, mode, expected):
    callback = in_run(kind(monitor=monitor, mode=mode), model)
    callback.on_epoch_end(0, {monitor: 0.5})
    assert callback.monitor_op is expected


@pytest.mark.parametrize("fake", [
    types.SimpleNamespace(current_run=types.SimpleNamespace(metric_directions={})), types.SimpleNamespace()])
def test_an_unknown_direction_is_refused(fake):
    with pytest.raises(ValueError, match=r"monitor=score, .* should be maximized or minimized. Pass `mode='max'`"):
        in_run(EarlyStopping(monitor="score"), fake).on_epoch_end(0, {"score": 0.5})


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau, MonitorCallback])
def test_an_unknown_mode_warns_and_means_auto(kind):
    with pytest.warns(UserWarning, match=f"{kind.__name__} mode 'unknown' is unknown, fallback to auto mode"):
        callback = kind(monitor="val_accuracy", mode="unknown")
    assert callback.mode == "auto"


UNKNOWN_MONITORS = [
    ("val_los", ["loss", "val_loss"], "EarlyStopping received monitor='val_los', .* Did you mean 'val_loss'"),
    ("acuracy", ["loss", "accuracy"], "Did you mean 'accuracy'"),
    ("xyz", ["loss", "accuracy"], "Available: accuracy, loss"),
    ("val_loss", ["loss"], "Nothing is validated: pass `validation_data`, or monitor one of: loss"),
]


@pytest.mark.parametrize(("monitor", "available", "message"), UNKNOWN_MONITORS)
def test_a_monitor_that_no_log_has_is_refused_before_training(monitor, available, message):
    with pytest.raises(ValueError, match=message):
        CallbackList([History(), EarlyStopping(monitor, mode="min")]).check_monitors(available)


@pytest.mark.parametrize(("monitor", "available", "message"), UNKNOWN_MONITORS)
def test_a_monitor_that_nobody_checked_is_refused_at_the_first_logs(model, monitor, available, message):
    with pytest.raises(ValueError, match=message):
        in_run(EarlyStopping(monitor, mode="min"), model).on_epoch_end(0, dict.fromkeys(available, 0.5))


def test_epochs_without_a_validation_are_passed_over(model):
    stopping = in_run(EarlyStopping(patience=1), model)
    plateau = in_run(ReduceLROnPlateau(patience=1), model)
    callback_list = CallbackList([stopping, plateau])
    callback_list.check_monitors(["loss", "val_loss"])
    for epoch, logs in enumerate([{"loss": 1.0}, {"loss": 1.0, "val_loss": 0.5}, {"loss": 1.0}]):
        callback_list.on_epoch_end(epoch, logs)
    assert (stopping.wait, stopping.best, plateau.wait) == (0, 0.5, 0)
    assert not model.stop_training


def test_the_next_fit_is_checked_anew(model):
    stopping = in_run(EarlyStopping(), model)
    stopping.on_epoch_end(0, {"loss": 1.0, "val_loss": 0.5})
    stopping.on_train_end()
    stopping.on_train_begin()
    with pytest.raises(ValueError, match="Nothing is validated"):
        stopping.on_epoch_end(0, {"loss": 1.0})


def test_a_monitor_may_be_a_log_that_a_callback_before_it_adds():
    class Scores(Callback):
        @callbacks.adds_logs("score")
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = 1.0

    class Unmarked(Scores):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)

    stopping = EarlyStopping("score", mode="max")
    CallbackList([Scores(), stopping]).check_monitors(["loss"])
    CallbackList([LambdaCallback(on_epoch_end=print), stopping]).check_monitors(["loss"])
    CallbackList([Unmarked(), stopping]).check_monitors(["loss"])
    with pytest.raises(ValueError, match="monitor='score', which no log has"):
        CallbackList([stopping, Scores()]).check_monitors(["loss"])


def test_early_stopping_may_watch_the_learning_rate():
    lowers = ReduceLROnPlateau("loss")
    CallbackList([lowers, EarlyStopping("learning_rate", mode="min")]).check_monitors(["loss"])


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau])
def test_an_instance_can_be_used_in_another_fit(kind, model):
    callback = in_run(kind("loss", patience=1, verbose=0), model)
    for epoch, loss in enumerate([0.1, 0.2, 0.3]):
        callback.on_epoch_end(epoch, {"loss": loss})
    callback.on_train_end()
    fresh = kind("loss").state_dict()
    callback.on_train_begin()
    assert callback.state_dict() == fresh


def test_an_unknown_argument_names_what_could_be_meant():
    with pytest.raises(TypeError, match=r"EarlyStopping has no argument 'patient'. Did you mean 'patience'"):
        EarlyStopping(patient=3)

    class Own(EarlyStopping):
        def __init__(self, **options):
            super().__init__(patience=options["patient"])

    assert Own(patient=3).patience == 3


@pytest.mark.parametrize("adding", [LearningRateScheduler(lambda epoch: 0.1), ReduceLROnPlateau("loss")])
def test_the_rate_of_each_optimizer_may_be_monitored(adding):
    rate = types.SimpleNamespace(learning_rate=0.5)
    model = types.SimpleNamespace(optimizer={"generator": rate, "critic": rate})
    known = EarlyStopping("learning_rate_generator", mode="min")
    CallbackList([adding, known], model=model).check_monitors(["loss"])
    unknown = EarlyStopping("learning_rate", mode="min")
    with pytest.raises(ValueError, match="learning_rate_generator"):
        CallbackList([adding, unknown], model=model).check_monitors(["loss"])
