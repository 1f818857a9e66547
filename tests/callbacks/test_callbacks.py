"""Callbacks decide, count and print what Keras's do, refuse what cannot be meant, and continue after a restart."""

import json
import pathlib
import runpy

import numpy as np
import pytest

from trainer import callbacks
from trainer.callbacks import (
    Callback,
    CallbackList,
    CSVLogger,
    EarlyStopping,
    History,
    LambdaCallback,
    LazyLogs,
    LearningRateScheduler,
    ProgbarLogger,
    ReduceLROnPlateau,
    TerminateOnNaN,
)

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
REFERENCE_RUN = runpy.run_path(str(REFERENCE / "make_callbacks.py"))
RESULTS = json.loads((REFERENCE / "callbacks.json").read_text())["results"]

PHASES = ("train", "test", "predict")
HOOKS = sorted(name for name in dir(Callback) if name.startswith("on_") and name != "on_save_point")  # has no logs


def call(callback, hook, logs=None):
    """Calls a hook with arguments that fit it."""
    numbered = "batch" in hook or "epoch" in hook
    arguments = ("train", 3) if hook == "on_execution_end" else (3,) if numbered else ()
    getattr(callback, hook)(*arguments, *([] if logs is None else [logs]))


@pytest.fixture
def model():
    return REFERENCE_RUN["FakeModel"]()


def in_run(callback, model):
    callback.set_model(model)
    callback.on_train_begin()
    return callback


# Keras's results


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: f"{result['driver']}-{json.dumps(result['case'])[:90]}")
def test_what_a_callback_does_is_what_keras_does(result):
    received = REFERENCE_RUN["DRIVERS"][result["driver"]](callbacks, result["case"])
    # As texts, in which NaN equals NaN and every bit of a number counts.
    assert json.dumps(received) == json.dumps(result["expected"])


def test_the_reference_covers_every_case_that_its_script_lists():
    listed = [(driver, case) for driver, cases in REFERENCE_RUN["cases_by_driver"]().items() for case in cases]
    saved = [(result["driver"], result["case"]) for result in RESULTS]
    assert json.dumps(listed) == json.dumps([list(pair) for pair in saved])


# The base class and the list


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_need_not_call_its_base_class_constructor(hook):
    class Bare(Callback):
        def __init__(self):
            pass

    call(Bare(), hook)
    assert Bare().model is None
    assert Bare().params is None


@pytest.mark.parametrize("end", ["begin", "end"])
def test_on_batch_is_called_by_on_train_batch(end):
    calls = []
    callback = Callback()
    setattr(callback, f"on_batch_{end}", lambda batch, logs: calls.append((batch, logs)))
    getattr(callback, f"on_train_batch_{end}")(3, {"loss": 0.5})
    assert calls == [(3, {"loss": 0.5})]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_list_calls_every_hook_in_its_order_and_with_a_dict(hook):
    calls = []

    def recorder(name):
        return LambdaCallback(**{hook: lambda *args, **kwargs: calls.append((name, [*args, *kwargs.values()][-1]))})

    call(CallbackList([recorder("first"), recorder("second")]), hook)
    assert calls == [("first", {}), ("second", {})]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_list_hands_on_the_very_logs_it_is_given(hook):
    seen = []
    logs = LazyLogs(["loss"], lambda: pytest.fail("nobody has read a value"))
    keep = LambdaCallback(**{hook: lambda *args, **kwargs: seen.append([*args, *kwargs.values()][-1])})
    call(CallbackList([keep, keep]), hook, logs)
    assert len(seen) == 2
    assert all(item is logs for item in seen)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_list_knows_which_hooks_are_overridden(hook):
    on_class = type("OnClass", (Callback,), {hook: lambda self, *args, **kwargs: None})()
    on_instance = Callback()
    setattr(on_instance, hook, lambda *args, **kwargs: None)
    for callback in (on_class, on_instance):
        callback_list = CallbackList([Callback(), callback])
        assert [name for name in HOOKS if callback_list.wants(name)] == [hook]
        phases = [phase for phase in PHASES if callback_list.wants_batch_hooks(phase)]
        assert phases == [phase for phase in PHASES if "batch" in hook and phase in hook.replace("on_batch", "train")]


def test_a_hook_that_is_replaced_later_is_noticed():
    callback = Callback()
    callback_list = CallbackList([callback])
    assert not callback_list.wants_batch_hooks("train")
    callback.on_batch_end = lambda batch, logs: None
    assert callback_list.wants_batch_hooks("train")


def test_only_callbacks_that_need_every_batch_slow_the_loop_down(tmp_path):
    quiet = [History(), ProgbarLogger(), EarlyStopping(), ReduceLROnPlateau(), LearningRateScheduler(lambda epoch: 0.1),
             CSVLogger(tmp_path / "log.csv"), LambdaCallback(on_epoch_end=print), TerminateOnNaN()]
    assert not any(CallbackList(quiet).wants_batch_hooks(phase) for phase in PHASES)
    slow = CallbackList([*quiet, LambdaCallback(on_train_batch_end=lambda batch, logs: None)])
    assert slow.wants_batch_hooks("train") and not slow.wants_batch_hooks("test")


def test_a_list_gives_its_callbacks_the_model_and_the_parameters(model):
    first, second = Callback(), Callback()
    callback_list = CallbackList([first, second], model=model, verbose=0, epochs=2, steps=None)
    for callback in (first, second, callback_list):
        assert callback.model is model
        assert callback.params == {"verbose": 0, "epochs": 2, "steps": None}


@pytest.mark.parametrize(("given", "expected"), [
    (None, []), ([], []), (Callback(), [Callback]), ((History(),), [History]),
])
def test_one_callback_a_list_of_them_or_none_can_be_given(given, expected):
    assert [type(callback) for callback in CallbackList(given).callbacks] == expected


def test_history_and_progress_bar_are_added_at_the_end_and_once():
    user = Callback()
    added = CallbackList([user], add_history=True, add_progbar=True).callbacks
    assert [type(callback) for callback in added] == [Callback, History, ProgbarLogger]
    own = [ProgbarLogger(), History()]
    assert CallbackList(own, add_history=True, add_progbar=True).callbacks == own
    assert own == CallbackList(own).callbacks


@pytest.mark.parametrize(("wrong", "message"), [
    ("early", "type str at index 1"), (None, "type NoneType at index 1"),
    (EarlyStopping, "type type at index 1. Give an instance, not the class"),
])
def test_something_else_than_a_callback_is_refused(wrong, message):
    with pytest.raises(TypeError, match=f"`callbacks` must be instances of `Callback`. .* {message}"):
        CallbackList([History(), wrong])


def test_one_instance_may_be_given_twice():
    calls = []
    callback = LambdaCallback(on_train_begin=lambda logs: calls.append(1))
    CallbackList([callback, callback]).on_train_begin()
    assert calls == [1, 1]


# History and LambdaCallback


def test_history_records_python_floats_and_what_earlier_callbacks_added(model):
    model.optimizer.learning_rate = 0.5
    callback_list = CallbackList([LearningRateScheduler(lambda epoch, rate: rate / 2)], add_history=True, model=model)
    callback_list.on_train_begin()
    for epoch in (3, 4):
        callback_list.on_epoch_begin(epoch)
        callback_list.on_epoch_end(epoch, LazyLogs(["loss"], lambda: {"loss": np.float32(0.5)}))
    history = model.history
    assert history.history == {"loss": [0.5, 0.5], "learning_rate": [0.25, 0.125]}
    assert history.epoch == [3, 4]
    assert {type(value) for values in history.history.values() for value in values} == {float}


def test_history_has_a_shorter_list_for_what_not_every_epoch_has(model):
    history = in_run(History(), model)
    history.on_epoch_end(0, {"loss": 1.0})
    history.on_epoch_end(1, {"loss": 0.5, "val_loss": 0.75})
    assert history.history == {"loss": [1.0, 0.5], "val_loss": [0.75]}


def test_lambda_callback_takes_any_hook_and_keeps_other_attributes():
    calls = []
    callback = LambdaCallback(on_test_end=calls.append, note="kept", on_predict_end=None)
    callback.on_test_end({"loss": 0.5})
    callback.on_predict_end()
    assert calls == [{"loss": 0.5}]
    assert callback.note == "kept"


def test_lambda_callback_refuses_a_hook_that_nobody_calls():
    with pytest.raises(TypeError, match=r"no hook 'on_epoch_ends'. Known hooks: .*on_epoch_end"):
        LambdaCallback(on_epoch_ends=print)


# Learning rates, files, NaN


def test_reduce_lr_on_plateau_refuses_a_factor_that_does_not_reduce():
    with pytest.raises(ValueError, match=r"`factor` must be a number above 0 and below 1. Received: factor=1"):
        ReduceLROnPlateau(factor=1.0)


@pytest.mark.parametrize("returned", [np.float32(0.25), np.float64(0.25), np.array(0.25), 0.25])
def test_a_schedule_may_return_any_floating_point_scalar(model, returned):
    in_run(LearningRateScheduler(lambda epoch: returned), model).on_epoch_begin(0)
    assert model.optimizer.learning_rate == np.float32(0.25)


@pytest.mark.parametrize(("returned", "kind"), [
    (None, "NoneType"), (1, "int"), ("0.1", "str"), (np.zeros(2), "ndarray"),
])
def test_a_schedule_that_returns_anything_else_is_refused(model, returned, kind):
    scheduler = in_run(LearningRateScheduler(lambda epoch: returned), model)
    with pytest.raises(ValueError, match=f"The output of the `schedule` function should be a float. .* type {kind}"):
        scheduler.on_epoch_begin(0)


def test_a_schedule_must_be_callable():
    with pytest.raises(TypeError, match="`schedule` must be a function of the epoch"):
        LearningRateScheduler(0.1)


def test_an_error_inside_a_schedule_reaches_the_user(model):
    def schedule(epoch, learning_rate):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        in_run(LearningRateScheduler(schedule), model).on_epoch_begin(0)


def test_csv_logger_takes_a_path_and_can_be_used_again(tmp_path, model):
    path = tmp_path / "log.csv"
    logger = CSVLogger(path)
    for loss in (0.5, 0.25):
        in_run(logger, model)
        logger.on_epoch_end(0, {"loss": loss, "val_loss": 1.0})
        assert path.read_text() == f"epoch,loss,val_loss\n0,{loss},1.0\n"  # on disk before the end
    logger.on_train_end()
    assert logger.csv_file.closed


def test_csv_logger_says_which_file_it_cannot_write(tmp_path, model):
    (tmp_path / "no_folder").touch()
    with pytest.raises(OSError, match="no_folder"):
        in_run(CSVLogger(tmp_path / "no_folder" / "log.csv"), model)


def test_terminate_on_nan_ignores_logs_without_a_loss(model):
    in_run(TerminateOnNaN(), model).on_train_batch_end(0, {"accuracy": float("nan")})
    assert not model.stop_training


# State


STATEFUL = {
    "early_stopping": lambda: EarlyStopping("loss", patience=3, restore_best_weights=True),
    "reduce_lr_on_plateau": lambda: ReduceLROnPlateau("loss", patience=2, cooldown=2, factor=0.5),
    "history": History,
}
LOSSES = [0.9, 0.5, 0.6, 0.7, 0.45, 0.5, 0.6, 0.65, 0.7]


def feed(callback, model, first, last):
    for epoch in range(first, last):
        if not model.stop_training:
            model.epoch = epoch
            callback.on_epoch_end(epoch, {"loss": LOSSES[epoch]})


@pytest.mark.parametrize("cut", range(len(LOSSES)))
@pytest.mark.parametrize("name", STATEFUL)
def test_a_fresh_callback_continues_from_a_saved_state(name, cut, model):
    whole = in_run(STATEFUL[name](), model)
    feed(whole, model, 0, len(LOSSES))
    whole.on_train_end()

    before = REFERENCE_RUN["FakeModel"]()
    interrupted = in_run(STATEFUL[name](), before)
    feed(interrupted, before, 0, cut)
    state = interrupted.state_dict()
    after = REFERENCE_RUN["FakeModel"]()
    after.optimizer, after.stop_training = before.optimizer, before.stop_training
    resumed = in_run(STATEFUL[name](), after)
    resumed.load_state_dict(state)
    feed(resumed, after, cut, len(LOSSES))
    resumed.on_train_end()

    assert resumed.state_dict() == whole.state_dict()
    assert after.optimizer.learning_rate == model.optimizer.learning_rate
    assert (after.stop_training, after.epoch) == (model.stop_training, model.epoch)


def test_a_saved_state_does_not_change_with_the_callback(model):
    history = in_run(History(), model)
    history.on_epoch_end(0, {"loss": 0.5})
    state = history.state_dict()
    history.on_epoch_end(1, {"loss": 0.25})
    assert state["history"] == {"loss": [0.5]} and state["epoch"] == [0]
    fresh = in_run(History(), model)
    fresh.load_state_dict(state)
    fresh.on_epoch_end(1, {"loss": 0.25})
    assert state["history"] == {"loss": [0.5]} and state["epoch"] == [0]


def test_a_state_of_another_callback_is_refused():
    with pytest.raises(ValueError, match=r"not of ReduceLROnPlateau: it has \['best', 'best_epoch', 'best_weights', "):
        ReduceLROnPlateau().load_state_dict(EarlyStopping().state_dict())
    state = {name: value for name, value in ReduceLROnPlateau().state_dict().items() if name != "wait"}
    with pytest.raises(ValueError, match=r"it has \['best', 'cooldown_counter'\]\. Expected: \['best', 'wait', "):
        ReduceLROnPlateau().load_state_dict(state)


def test_a_list_saves_and_restores_the_state_of_each_callback(model):
    def both():
        stoppings = [EarlyStopping("loss", patience=9), EarlyStopping("mse", mode="min")]
        return CallbackList([*stoppings, Callback()], add_history=True, model=model)

    old, new = both(), both()
    old.on_train_begin()
    old.on_epoch_end(0, {"loss": 0.5, "mse": 0.25})
    state = old.state_dict()
    assert set(state) == {"EarlyStopping", "EarlyStopping_1", "History"}
    new.on_train_begin()
    new.load_state_dict(state)
    assert [callback.best for callback in new.callbacks[:2]] == [0.5, 0.25]
    assert new.callbacks[-1].history == {"loss": [0.5], "mse": [0.25]}


def test_a_list_of_other_callbacks_refuses_the_state():
    state = CallbackList([EarlyStopping()]).state_dict()
    with pytest.raises(ValueError, match=r"Received: \['History'\], expected: \['EarlyStopping'\]\. Resume"):
        CallbackList([History()]).load_state_dict(state)


def test_a_method_that_is_named_like_a_hook_and_is_none_gets_a_warning():
    class Misspelt(callbacks.Callback):
        def on_epoch_ends(self, epoch, logs=None):
            raise AssertionError("it is never called")

    class OfLightning(callbacks.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise AssertionError("it is never called")

    for callback, name in ((Misspelt(), "on_epoch_ends"), (OfLightning(), "on_train_epoch_end")):
        with pytest.warns(UserWarning, match=rf"`\w+\.{name}` is not a hook, so .*Did you mean .*'on_epoch_end'"):
            callbacks.CallbackList([callback])
