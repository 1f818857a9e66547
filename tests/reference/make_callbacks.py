"""Writes callbacks.json: what Keras's callbacks decide on given logs.

Run with Keras installed: `KERAS_BACKEND=jax python tests/reference/make_callbacks.py`. The test drives the trainer's
callbacks through the same `DRIVERS`, on the same cases.
"""

import contextlib
import io
import json
import pathlib
import tempfile
import types

import numpy as np

OUTPUT = pathlib.Path(__file__).with_name("callbacks.json")

FALLING_THEN_FLAT = [0.9, 0.7, 0.5, 0.52, 0.51, 0.49, 0.495, 0.5, 0.505, 0.6]
RISING_THEN_FLAT = [0.1, 0.5, 0.6, 0.59, 0.605, 0.58, 0.6, 0.61]

SCHEDULES = {
    "halve_after_the_second_epoch": lambda epoch, learning_rate: learning_rate * (0.5 if epoch > 1 else 1.0),
    "by_the_epoch_alone": lambda epoch: 0.1 / (epoch + 1),
}


class FakeOptimizer:
    """Keeps its learning rate in float32, as an optimizer does."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def __setattr__(self, name, value):
        super().__setattr__(name, np.float32(value))


class FakeModel:
    """A model whose only weight is the number of the epoch."""

    def __init__(self):
        self.name = "fake"
        self.stop_training = False
        self.current_run = types.SimpleNamespace(metric_directions={})
        self.optimizer = FakeOptimizer(0.1)
        self.epoch = -1

    def get_weights(self):
        return [np.float32(self.epoch)]

    def set_weights(self, weights):
        self.epoch = int(weights[0])


def run_epochs(callback, epochs, attributes):
    """Feeds each epoch's logs to the callback until it stops the training, and returns what it did."""
    model = FakeModel()
    callback.set_model(model)
    trace = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        callback.on_train_begin()
        for epoch, logs in enumerate(epochs):
            logs = dict(logs)
            model.epoch = epoch
            callback.on_epoch_begin(epoch)
            callback.on_epoch_end(epoch, logs)
            record = {name: getattr(callback, name) for name in attributes}
            trace.append({**record, "learning_rate": float(model.optimizer.learning_rate), "logs": logs})
            if model.stop_training:
                break
        callback.on_train_end()
    return {"epochs": trace, "weights_are_of_epoch": model.epoch, "printed": printed.getvalue()}


def drive_early_stopping(callbacks, case):
    attributes = ["wait", "best", "best_epoch", "stopped_epoch"]
    return run_epochs(callbacks.EarlyStopping(**case["arguments"]), case["logs"], attributes)


def drive_reduce_lr_on_plateau(callbacks, case):
    attributes = ["wait", "best", "cooldown_counter"]
    return run_epochs(callbacks.ReduceLROnPlateau(**case["arguments"]), case["logs"], attributes)


def drive_learning_rate_scheduler(callbacks, case):
    arguments = {**case["arguments"], "schedule": SCHEDULES[case["arguments"]["schedule"]]}
    return run_epochs(callbacks.LearningRateScheduler(**arguments), case["logs"], [])


def drive_csv_logger(callbacks, case):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "log.csv"
        if case["before"] is not None:
            path.write_bytes(case["before"].encode())
        run_epochs(callbacks.CSVLogger(str(path), **case["arguments"]), case["logs"], [])
        return {"file": path.read_bytes().decode()}


def drive_terminate_on_nan(callbacks, case):
    model = FakeModel()
    callback = callbacks.TerminateOnNaN(**case["arguments"])
    callback.set_model(model)
    stopped, raised = [], None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for batch, loss in enumerate(case["losses"]):
            try:
                callback.on_train_batch_end(batch, {"loss": float(loss)})
            except RuntimeError as error:
                raised = str(error)
                break
            stopped.append(model.stop_training)
    return {"stopped": stopped, "raised": raised, "printed": printed.getvalue()}


def drive_callback_list(callbacks, case):
    """Calls every hook of a list of two recorders and returns the calls, in order."""
    calls = []

    def recorder(name):
        def record(hook):
            return lambda self, *args, **kwargs: calls.append([name, hook, len(args), sorted(kwargs)])

        hooks = {hook: record(hook) for hook, _ in case["calls"]}
        return type("Recorder", (callbacks.Callback,), hooks)()

    callback_list = callbacks.CallbackList([recorder("first"), recorder("second")])
    for hook, arguments in case["calls"]:
        getattr(callback_list, hook)(*arguments)
    return calls


DRIVERS = {
    "early_stopping": drive_early_stopping,
    "reduce_lr_on_plateau": drive_reduce_lr_on_plateau,
    "learning_rate_scheduler": drive_learning_rate_scheduler,
    "csv_logger": drive_csv_logger,
    "terminate_on_nan": drive_terminate_on_nan,
    "callback_list": drive_callback_list,
}


def monitor_cases(kinds):
    """Returns a case for each dict of arguments and each sequence: falling for "min" and "auto", rising for "max"."""
    cases = []
    for arguments in kinds:
        monitor = arguments.setdefault("monitor", "val_loss")
        values = RISING_THEN_FLAT if arguments.get("mode") == "max" else FALLING_THEN_FLAT
        cases.append({"arguments": arguments, "logs": [{monitor: value, "other": 1.0} for value in values]})
    return cases


def cases_by_driver():
    early = [
        {}, {"patience": 1}, {"patience": 2, "verbose": 1}, {"patience": 3, "monitor": "loss"},
        {"patience": 2, "min_delta": 0.05, "verbose": 1, "restore_best_weights": True},
        {"patience": 2, "min_delta": -0.05}, {"patience": 4, "restore_best_weights": True, "verbose": 1},
        {"patience": 20, "restore_best_weights": True, "verbose": 1},
        {"patience": 3, "baseline": 0.505},
        {"patience": 3, "baseline": 0.1, "restore_best_weights": True, "verbose": 1},
        {"start_from_epoch": 3}, {"patience": 1, "start_from_epoch": 6, "restore_best_weights": True},
        {"mode": "max", "monitor": "accuracy", "patience": 1}, {"mode": "max", "patience": 2, "min_delta": 0.02},
        {"mode": "min", "monitor": "error", "patience": 2},
    ]
    plateau = [
        {"patience": 1}, {"patience": 1, "factor": 0.5, "verbose": 1}, {"patience": 2, "factor": 0.5, "cooldown": 2},
        {"patience": 1, "min_lr": 0.03, "verbose": 1}, {"patience": 1, "min_delta": 0.1, "cooldown": 1},
        {"patience": 1, "min_lr": 0.1}, {"mode": "max", "monitor": "accuracy", "patience": 1, "factor": 0.2},
        {"patience": 0, "monitor": "loss", "verbose": 1},
    ]
    nan = float("nan")
    nan_logs = [{"val_loss": 0.5}, {"val_loss": nan}, {"val_loss": 0.4}, {"val_loss": 0.45}]
    table = [{"loss": 0.1 + 0.2, "accuracy": 0.5}, {"accuracy": 1e-12, "loss": 2}]
    validated = [{"val_loss": 0.25, "loss": 0.5, "note": "a,b"}, {"loss": 0.4}, {"loss": 0.3, "list": [1, 2]}]
    hooks = [
        *((f"on_{phase}_{end}", []) for phase in ("train", "test", "predict") for end in ("begin", "end")),
        *((f"on_{phase}batch_{end}", [3]) for phase in ("train_", "test_", "predict_", "") for end in ("begin", "end")),
        ("on_epoch_begin", [1]), ("on_epoch_end", [1, {"loss": 0.5}]),
    ]
    return {
        "early_stopping": [
            *monitor_cases(early),
            {"arguments": {"patience": 2}, "logs": nan_logs},
            {"arguments": {}, "logs": [{"val_loss": nan}] * 3},
        ],
        "reduce_lr_on_plateau": monitor_cases(plateau),
        "learning_rate_scheduler": [
            {"arguments": {"schedule": name, "verbose": verbose}, "logs": [{"loss": 0.5}] * 4}
            for name in SCHEDULES for verbose in (0, 1)
        ],
        "csv_logger": [
            {"arguments": arguments, "logs": logs, "before": before}
            for logs, header in ((table, "epoch,accuracy,loss,val_accuracy,val_loss\r\n"),
                                 (validated, "epoch,loss,note,val_loss\r\n"))
            for arguments, before in (
                ({}, None), ({}, "old\n"), ({"separator": ";"}, None), ({"append": True}, None),
                ({"append": True}, header),
            )
        ],
        "terminate_on_nan": [
            {"arguments": {"raise_error": raise_error}, "losses": losses}
            for raise_error in (False, True)
            for losses in (["0.5", "0.1"], ["0.5", "nan", "0.1"], ["inf"], ["-inf"])
        ],
        "callback_list": [{"calls": hooks}],
    }


def main():
    import keras
    from keras import callbacks

    results = [
        {"driver": driver, "case": case, "expected": DRIVERS[driver](callbacks, case)}
        for driver, cases in cases_by_driver().items()
        for case in cases
    ]
    lines = ",\n".join(map(json.dumps, results))
    OUTPUT.write_text(f'{{"origin": "Keras {keras.__version__}", "results": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
