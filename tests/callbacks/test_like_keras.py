"""Random runs through Keras's own callbacks and ours: the same decisions, files and printed words.

`test_callbacks.py` has Keras's results on chosen cases, and needs no Keras; `test_remote_monitor.py` compares requests.
Where we differ on purpose, a test at the end says how and why.
"""

import contextlib
import io
import pathlib
import re
import warnings

import numpy as np
import pytest

from trainer import callbacks as ours

NAN = float("nan")


@pytest.fixture(scope="module")
def theirs():
    """`keras.callbacks`, on the backend that needs no further package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras").callbacks


class Optimizer:
    """Keeps its learning rate in float32, as an optimizer does."""

    def __init__(self):
        self.learning_rate = 0.1

    def __setattr__(self, name, value):
        super().__setattr__(name, np.float32(value))


class Model:
    """A model whose only weight is the number of the batch, counted over epochs; its files hold that number."""

    def __init__(self):
        self.stop_training = False
        self.optimizer = Optimizer()
        self.time = 0

    def get_weights(self):
        return [np.float32(self.time)]

    def set_weights(self, weights):
        self.time = int(weights[0])

    def save(self, path, overwrite=True):
        pathlib.Path(path).write_text(f"all {self.time}")

    def save_weights(self, path, overwrite=True):
        pathlib.Path(path).write_text(f"weights {self.time}")


def is_ours(callback):
    return isinstance(callback, ours.Callback)


def train_epoch(callback, model, batches, group):
    """Trains on the logs of some batches; our callbacks see groups of them, cut where they look."""
    for batch, logs in enumerate([] if is_ours(callback) else batches):
        model.time += 1
        callback.on_train_batch_end(batch, logs)
    start = 0
    while is_ours(callback) and start < len(batches):
        look = callback.next_sync_step("train", start)
        stop = min(start + group, len(batches), len(batches) if look is None else look + 1)
        model.time += stop - start
        callback.on_execution_end("train", stop - 1, batches[stop - 1])
        start = stop


def run(callback, epochs, attributes=(), fits=1, group=1):
    """Gives each epoch's `(batches, logs)` to a callback until it stops the training, in each fit.

    Returns what could be seen of it, as texts, in which NaN equals NaN and every bit counts.
    """
    model = Model()
    callback.set_model(model)
    callback.set_params({"epochs": len(epochs), "verbose": 0, "steps": None})
    seen = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(fits):
            model.stop_training = False
            if hasattr(callback, "check_monitor"):
                callback.check_monitor({name for _, logs in epochs for name in logs})
            callback.on_train_begin()
            for epoch, (batches, logs) in enumerate(epochs):
                logs = dict(logs)
                callback.on_epoch_begin(epoch)
                train_epoch(callback, model, batches, group)
                callback.on_epoch_end(epoch, logs)
                state = {name: getattr(callback, name) for name in attributes}
                seen.append(repr((epoch, state, logs, model.optimizer.learning_rate, model.stop_training)))
                if model.stop_training:
                    break
            callback.on_train_end()
            seen.append(model.time)
    return [*seen, printed.getvalue()]


def quietly(function, *args, **kwargs):
    """Calls a function without its warnings; returns its result and how many there were."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return function(*args, **kwargs), len(caught)


def random_values(rng, count):
    """Returns numbers with many ties and near ties, some NaN and infinite, in the types that logs have."""
    grid = rng.choice([0.01, 0.05, 0.0001])
    values = 0.5 + grid * rng.integers(-4, 5, count)
    values[rng.random(count) < rng.choice([0, 0.1])] = np.nan
    values[rng.random(count) < rng.choice([0, 0.05])] = rng.choice([np.inf, -np.inf])
    kind = rng.choice(["float32", "float of float32", "float"])
    return [{"float32": np.float32, "float of float32": lambda v: float(np.float32(v)), "float": float}[kind](value)
            for value in values]


def random_epochs(rng, monitor, missing=0.0):
    """Returns epochs without batches, whose logs may lack the monitor."""
    count = int(rng.integers(1, 14))
    return [([], {"other": 1.0} if rng.random() < missing else {"other": 1.0, monitor: value})
            for value in random_values(rng, count)]


def random_monitor(rng):
    """Returns the arguments `monitor` and `mode`."""
    monitor = str(rng.choice(["val_loss", "loss", "accuracy"]))
    return {"monitor": monitor,
            "mode": str(rng.choice(["min", "max"] if monitor == "accuracy" else ["min", "max", "auto"]))}


def assert_alike(theirs, name, arguments, epochs, attributes, fits=1):
    expected, _ = quietly(run, getattr(theirs, name)(**arguments), epochs, attributes, fits)
    assert run(getattr(ours, name)(**arguments), epochs, attributes, fits) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_early_stopping_stops_where_keras_stops(theirs, seed):
    rng = np.random.default_rng(seed)
    arguments = {
        **random_monitor(rng), "min_delta": float(rng.choice([0, 0.01, -0.01, 0.0001, 0.05])),
        "patience": int(rng.integers(0, 4)), "verbose": int(rng.integers(2)),
        "baseline": rng.choice([None, 0.5, 0.47]), "restore_best_weights": bool(rng.integers(2)),
        "start_from_epoch": int(rng.choice([0, 0, 1, 3])),
    }
    epochs = random_epochs(rng, arguments["monitor"], missing=rng.choice([0, 0.3]))
    epochs[0][1][arguments["monitor"]] = 0.5  # a monitor that no log has is refused
    epochs = [([{}, {}], logs) for _, logs in epochs]
    attributes = ("wait", "best", "best_epoch", "best_weights", "stopped_epoch")
    assert_alike(theirs, "EarlyStopping", arguments, epochs, attributes, fits=int(rng.integers(1, 3)))


@pytest.mark.parametrize("seed", range(120))
def test_reduce_lr_on_plateau_lowers_the_rate_where_keras_does(theirs, seed):
    rng = np.random.default_rng(1000 + seed)
    arguments = {
        **random_monitor(rng), "min_delta": float(rng.choice([0, 0.01, 0.0001, 0.05])),
        "factor": float(rng.choice([0.1, 0.5, 0.9])), "patience": int(rng.integers(0, 4)),
        "verbose": int(rng.integers(2)), "cooldown": int(rng.integers(0, 3)),
        "min_lr": float(rng.choice([0, 0.03, 0.1, 0.001])),
    }
    epochs = random_epochs(rng, arguments["monitor"], missing=rng.choice([0, 0.3]))
    epochs[0][1][arguments["monitor"]] = 0.5
    attributes = ("wait", "best", "cooldown_counter")
    assert_alike(theirs, "ReduceLROnPlateau", arguments, epochs, attributes, fits=int(rng.integers(1, 3)))


SCHEDULES = {
    "of both": lambda epoch, rate: rate * (0.5 if epoch % 3 else 0.9),
    "of the epoch": lambda epoch: 0.3 / (epoch + 7),
    "in float32": lambda epoch, rate: np.float32(rate) * np.float32(0.7),
    "in float64": lambda epoch: np.float64(1) / (epoch + 3),
    "with a default": lambda epoch, rate=0.25: rate / 3,
    "of any number": lambda *args: args[-1] / 2 + args[0],
}


@pytest.mark.parametrize("verbose", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_sets_and_says_what_it_does_in_keras(theirs, name, verbose):
    epochs = [([], {"loss": 0.5})] * 6
    assert_alike(theirs, "LearningRateScheduler", {"schedule": SCHEDULES[name], "verbose": verbose}, epochs, ())


# --- files -----------------------------------------------------------------------------------------------------------


def checkpoint_to(package, path, **arguments):
    """Returns a `ModelCheckpoint` that writes to a path, which is given without the suffix that Keras demands."""
    suffix = ".safetensors" if package is ours else ".weights.h5" if arguments.get("save_weights_only") else ".keras"
    return package.ModelCheckpoint(f"{path}{suffix}", **arguments)


def run_in_folder(folder, callback, epochs, attributes, fits, group=1):
    """Returns what `run` saw, how many warnings there were, the error if there was one, and the files.

    Paths are without the folder and the suffix.
    """
    folder.mkdir(exist_ok=True)
    try:
        seen, count = quietly(run, callback, epochs, attributes, fits, group)
    except KeyError as error:
        seen, count = ["", str(error)], 0
    files = {plain(str(path.relative_to(folder))): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [plain(str(part).replace(str(folder), "")) for part in seen], count, files


def plain(text):
    return re.sub(r"\.(safetensors|weights\.h5|keras)\b", "", text)


def checkpoint_of(package, folder, name, arguments):
    callback = checkpoint_to(package, folder / name, **arguments)
    if not is_ours(callback):
        # In its first epoch, Keras's has no direction yet, and fails with `save_best_only` and batches.
        callback._set_monitor_op()
    return callback


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(150))
def test_model_checkpoint_writes_the_files_that_keras_writes(theirs, seed, tmp_path):
    rng = np.random.default_rng(2000 + seed)
    by_batches, best_only, weights_only = rng.random(3) < [0.4, 0.6, 0.5]
    arguments = {
        **random_monitor(rng), "verbose": int(rng.integers(2)), "save_best_only": bool(best_only),
        "save_weights_only": bool(weights_only), "save_freq": int(rng.integers(1, 8)) if by_batches else "epoch",
        "initial_value_threshold": rng.choice([None, 0.5, 0.49]),
    }
    monitor = arguments["monitor"]
    in_batches = {} if monitor.startswith("val_") else {monitor: None}
    epochs = [([dict.fromkeys(in_batches, value) for value in random_values(rng, rng.integers(1, 9))], logs)
              for _, logs in random_epochs(rng, monitor)]
    if rng.random() < 0.1:
        epochs = [([{} for _ in batches], {"other": 1.0}) for batches, _ in epochs]
    names = ["model", "{epoch}", "deep/{epoch:03d}/model", "{epoch}-{other:.3f}", "{epoch}-{" + monitor + ":.3f}"]
    if by_batches:
        names += ["{epoch:02d}-{batch:02d}"]
        names.remove("{epoch}-{other:.3f}")
    if monitor not in (epochs[0][0][0] if by_batches else epochs[0][1]):
        names.remove("{epoch}-{" + monitor + ":.3f}")
    name = str(rng.choice(names))
    options = {"attributes": ("best", "_batches_seen_since_last_saving"), "fits": int(rng.integers(1, 3))}
    if not by_batches:
        options["attributes"] = ("best",)

    folders = tmp_path / "theirs", tmp_path / "ours"
    expected = run_in_folder(folders[0], checkpoint_of(theirs, folders[0], name, arguments), epochs, **options)
    is_refused = best_only and monitor not in (epochs[0][0][0] if by_batches else epochs[0][1])
    group = int(rng.integers(1, 9))
    is_saved = any(path.is_file() for path in folders[0].rglob("*"))
    if is_refused and is_saved:  # Keras writes each model over the one before
        with pytest.raises(ValueError, match="which no log has"):
            run_in_folder(folders[1], checkpoint_of(ours, folders[1], name, arguments), epochs, **options, group=group)
        assert [*folders[1].iterdir()] == []
        return
    received = run_in_folder(folders[1], checkpoint_of(ours, folders[1], name, arguments), epochs, **options,
                             group=group)
    assert received == expected


@pytest.mark.parametrize("name", ["{epoch}-{val_loss:.2f}", "{epoch}-{batch}", "{Epoch}"])
@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_a_name_that_is_no_log_raises_what_keras_raises(theirs, name, save_freq, tmp_path):
    epochs = [([{"loss": 0.5}], {"loss": 0.5, "accuracy": 0.5})]
    results = [run_in_folder(tmp_path, checkpoint_to(package, tmp_path / name, save_freq=save_freq), epochs, (), 1)
               for package in (theirs, ours)]
    assert results[0] == results[1]
    assert ("Failed to format" in results[0][0][1]) == (name != "{epoch}-{batch}" or save_freq == "epoch")


@pytest.mark.parametrize("save_freq", ["batch", 1.5, None])
def test_a_wrong_save_freq_is_refused_as_in_keras(theirs, save_freq):
    with pytest.raises(ValueError, match=r"Unrecognized save_freq: .* Expected save_freq are 'epoch' or integer"):
        checkpoint_to(theirs, "model", save_freq=save_freq)
    with pytest.raises(ValueError if save_freq == "batch" else TypeError, match="`save_freq` must be 'epoch' or a "):
        checkpoint_to(ours, "model", save_freq=save_freq)


def random_cell(rng):
    value = float(random_values(rng, 1)[0])
    return [value, np.float32(value), int(rng.integers(9)), "a,b", 'say "so"', [1, 2.5], np.arange(3), np.array(value),
            ("x", "y"), np.float64(value), 1e-12, True][rng.integers(12)]


@pytest.mark.parametrize("seed", range(80))
def test_csv_logger_writes_the_bytes_that_keras_writes(theirs, seed, tmp_path):
    rng = np.random.default_rng(3000 + seed)
    names = rng.permutation(["loss", "accuracy", "val_loss", "val_accuracy", "rate"])[:rng.integers(0, 6)]
    epochs = [([], {str(name): random_cell(rng) for name in names if rng.random() < 0.8})
              for _ in range(rng.integers(0, 5))]
    arguments = {"separator": str(rng.choice([",", ";", "\t"])), "append": bool(rng.integers(2))}
    before = [None, "", "epoch,loss\r\n", "unfinished"][rng.integers(2 if arguments["append"] else 4)]
    results = []
    for package in (theirs, ours):
        folder = tmp_path / package.__name__
        folder.mkdir()
        if before is not None:
            (folder / "log.csv").write_bytes(before.encode())
        logger = package.CSVLogger(folder / "log.csv", **arguments)
        results.append(run_in_folder(folder, logger, epochs, (), fits=int(1 + seed % 2)))
    assert results[0] == results[1]


# --- batches and hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_terminate_on_nan_stops_where_keras_stops(theirs, seed):
    rng = np.random.default_rng(4000 + seed)
    losses = [rng.choice([0.5, 0.25, NAN, np.inf, -np.inf], p=[0.4, 0.4, 0.1, 0.05, 0.05]) for _ in range(8)]
    losses = [np.float32(loss) if seed % 2 else float(loss) for loss in losses]
    raises = bool(rng.integers(2))

    def outcome(package):
        callback, model = package.TerminateOnNaN(raise_error=raises), Model()
        callback.set_model(model)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for batch, loss in enumerate(losses):
                try:
                    callback.on_train_batch_end(batch, {"loss": loss} if batch != 2 else {"other": loss})
                except RuntimeError as error:
                    return batch, str(error)
                if model.stop_training:
                    return batch, printed.getvalue()
        return None

    assert outcome(ours) == outcome(theirs)


HOOKS = {**{f"on_{phase}_{end}": () for phase in ("train", "test", "predict") for end in ("begin", "end")},
         **{f"on_{phase}batch_{end}": (5,) for phase in ("train_", "test_", "predict_", "")
            for end in ("begin", "end")},
         "on_epoch_begin": (3,), "on_epoch_end": (3,)}


@pytest.mark.parametrize("seed", range(20))
def test_lambda_callbacks_are_called_in_the_order_and_with_the_arguments_of_keras(theirs, seed):
    def calls_of(package):
        rng, calls = np.random.default_rng(5000 + seed), []

        def recorder(name, hook):
            return lambda *args, **kwargs: calls.append((name, hook, args, kwargs))

        made = []
        for name in "abc":
            hooks = [str(hook) for hook in rng.permutation(list(HOOKS))[:rng.integers(1, len(HOOKS))]]
            made.append(package.LambdaCallback(**{hook: recorder(name, hook) for hook in hooks}, note=name))
        callback_list = package.CallbackList(made)
        # Keras may call hooks from a thread, in no certain order.
        callback_list._async_train = callback_list._async_test = callback_list._async_predict = False
        for phase in ("train", "test", "predict"):
            getattr(callback_list, f"on_{phase}_begin")()
        for hook in rng.permutation([hook for hook in HOOKS if HOOKS[hook]]):
            getattr(callback_list, hook)(*HOOKS[hook], *([{"loss": 0.5}] if rng.integers(2) else []))
        for phase in ("train", "test", "predict"):
            getattr(callback_list, f"on_{phase}_end")({"loss": 0.25})
        return [callback.note for callback in made], calls

    assert calls_of(ours) == calls_of(theirs)


# --- differences by design -------------------------------------------------------------------------------------------


def test_a_monitor_that_no_log_has_is_refused_where_keras_warns_every_epoch(theirs):
    # A mistyped monitor would only be noticed when the training does not stop.
    for name in ("EarlyStopping", "ReduceLROnPlateau"):
        _, count = quietly(run, getattr(theirs, name)("val_los", mode="min"), [([], {"val_loss": 0.5})] * 3)
        assert count == 3
        with pytest.raises(ValueError, match=r"no log has. Did you mean 'val_loss'"):
            run(getattr(ours, name)("val_los", mode="min"), [([], {"val_loss": 0.5})] * 3)


def test_an_epoch_without_a_validation_does_not_overwrite_the_best_model(theirs, tmp_path):
    # Keras takes the missing value for a reason to save: the best model is lost.
    epochs = [([{}], {"loss": 0.5, "val_loss": 0.5}), ([{}], {"loss": 0.4})]
    _, count, files = run_in_folder(tmp_path, checkpoint_to(theirs, tmp_path / "best", save_best_only=True),
                                    epochs, (), 1)
    assert (count, files) == (1, {"best": b"all 2"})
    _, count, files = run_in_folder(tmp_path, checkpoint_to(ours, tmp_path / "best", save_best_only=True),
                                    epochs, (), 1)
    assert (count, files) == (0, {"best": b"all 1"})


def test_the_best_of_batches_can_be_saved_in_the_first_epoch(theirs, tmp_path):
    # Keras learns which direction is better at the end of the first epoch only.
    epochs = [([{"loss": loss} for loss in (0.5, 0.6, 0.4)], {"loss": 0.5})]
    arguments = {"path": tmp_path / "best", "monitor": "loss", "save_best_only": True, "save_freq": 1}
    with pytest.raises(TypeError, match="NoneType"):
        run(checkpoint_to(theirs, **arguments), epochs)
    _, _, files = run_in_folder(tmp_path, checkpoint_to(ours, **arguments), epochs, (), 1)
    assert files == {"best": b"all 3"}


def test_the_suffix_is_that_of_the_format(theirs, tmp_path):
    # Files are safetensors, where Keras writes HDF5 and archives of it.
    for name, arguments in (("model.weights.h5", {"save_weights_only": True}), ("model.keras", {})):
        theirs.ModelCheckpoint(tmp_path / name, **arguments)
        with pytest.raises(ValueError, match=f"has the suffix .*{name}"):
            ours.ModelCheckpoint(tmp_path / name, **arguments)
        with pytest.raises(ValueError, match="must end in"):
            theirs.ModelCheckpoint(tmp_path / "model.safetensors", **arguments)
        run(ours.ModelCheckpoint(tmp_path / "model.safetensors", **arguments), [([{}], {"loss": 0.5})])
    assert (tmp_path / "model.safetensors").exists()


def test_an_error_inside_a_schedule_reaches_the_user(theirs):
    # Keras takes a TypeError for a schedule of one argument, and reports the second call's.
    def schedule(epoch, learning_rate):
        raise TypeError("mine")

    for package, message in ((theirs, "missing 1 required positional argument"), (ours, "mine")):
        with pytest.raises(TypeError, match=message):
            run(package.LearningRateScheduler(schedule), [([], {})])


def test_a_misspelt_argument_is_refused(theirs):
    # Keras takes it and does nothing with it.
    theirs.ReduceLROnPlateau(patients=3)
    theirs.LambdaCallback(on_epoch_ends=print)
    with pytest.raises(TypeError, match="patients"):
        ours.ReduceLROnPlateau(patients=3)
    with pytest.raises(TypeError, match="no hook 'on_epoch_ends'"):
        ours.LambdaCallback(on_epoch_ends=print)
