"""One rule for arguments: a wrong type is a TypeError, a wrong value a ValueError, and both name the argument."""

import datetime
import inspect
import re

import flax.linen as nn
import numpy as np
import pytest

from trainer import Model, callbacks, optimizers
from trainer.core import arguments
from trainer.data import Dataset
from trainer.distribute import CommunicationOptions
from trainer.testing import assert_strategies_equal

X, Y = np.zeros((8, 2), np.float32), np.zeros((8, 1), np.float32)
NAN = float("nan")
# No whole number, and none of at least 0; where 0 is allowed.
COUNTS = [(1.5, TypeError), (2.0, TypeError), (True, TypeError), ("3", TypeError), (-1, ValueError)]
POSITIVE_COUNTS = [*COUNTS, (0, ValueError)]
NUMBERS = [("0.1", TypeError), (True, TypeError), (np.zeros(2), TypeError), (NAN, ValueError)]
POSITIVE_NUMBERS = [*NUMBERS, (0, ValueError), (-1.0, ValueError)]
# Not to be had in float32, in which devices compute; the last becomes 0 there.
LARGE = [(1e39, ValueError), (float("inf"), ValueError)]
SMALL = [(1e-50, ValueError)]
SWITCHES = [(1, TypeError), ("yes", TypeError)]
PATHS = [(3, TypeError), (None, TypeError), ("", ValueError)]
TEXTS = [(3, TypeError), (None, TypeError)]


@pytest.fixture(scope="module")
def model():
    model = Model(nn.Dense(1))
    model.compile(optimizer="sgd", loss="mse")
    return model


def method(name, *data):
    return lambda model, **given: getattr(model, name)(*data, **given)


def made(make, *positional, **needed):
    return lambda model, **given: make(*positional, **needed, **given)


DATA = Dataset.from_arrays((X, Y))
FIT, EVALUATE, PREDICT = method("fit", X, Y), method("evaluate", X, Y), method("predict", X)
COMPILE = method("compile", "sgd", "mse")
CHECKPOINT, BACKUP = made(callbacks.ModelCheckpoint, "weights"), made(callbacks.BackupAndRestore, "folder")
STOPPING, PLATEAU = made(callbacks.EarlyStopping, "loss"), made(callbacks.ReduceLROnPlateau, "loss")
TABLE = [
    *((FIT, name, COUNTS) for name in ("epochs", "initial_epoch")),
    *((FIT, name, POSITIVE_COUNTS) for name in (
        "batch_size", "steps_per_epoch", "validation_steps", "validation_batch_size", "validation_freq", "max_steps",
        "limit_batches")),
    (FIT, "max_time", [*POSITIVE_NUMBERS, (datetime.timedelta(), ValueError)]),
    (FIT, "validation_split", [("half", TypeError), (True, TypeError), (NAN, ValueError), (1.0, ValueError)]),
    (FIT, "verbose", [(1.5, TypeError), (None, TypeError), (3, ValueError), ("loud", ValueError)]),
    (FIT, "class_weight", [([1.0], TypeError), ({0.5: 1.0}, TypeError), ({0: "a"}, TypeError), ({0: NAN}, ValueError),
                            ({0: 1e39}, ValueError), ({}, ValueError)]),
    (EVALUATE, "batch_size", POSITIVE_COUNTS), (EVALUATE, "steps", POSITIVE_COUNTS),
    (PREDICT, "batch_size", POSITIVE_COUNTS), (PREDICT, "steps", POSITIVE_COUNTS),
    (made(Model, nn.Dense(1)), "seed", [*COUNTS, (2**32, ValueError)]),
    (COMPILE, "steps_per_execution", [*POSITIVE_COUNTS[:3], (0, ValueError), ("all", ValueError)]),
    (COMPILE, "microbatches", POSITIVE_COUNTS), (COMPILE, "ema_decay", [*NUMBERS, (1.0, ValueError)]),
    (COMPILE, "loss_weights", [*NUMBERS[1:], *LARGE]),
    (COMPILE, "remat", [(1, TypeError)]), (COMPILE, "skip_non_finite", SWITCHES),
    (made(DATA.batch), "batch_size", POSITIVE_COUNTS), (made(DATA.repeat), "times", POSITIVE_COUNTS),
    (made(DATA.take), "count", POSITIVE_COUNTS), (made(DATA.shuffle), "seed", COUNTS),
    *((STOPPING, name, COUNTS) for name in ("patience", "start_from_epoch")),
    (STOPPING, "min_delta", [*NUMBERS, *LARGE]), (STOPPING, "baseline", NUMBERS),
    (STOPPING, "restore_best_weights", SWITCHES), (STOPPING, "verbose", [(1.5, TypeError), (3, ValueError)]),
    (made(callbacks.EarlyStopping), "monitor", [(None, TypeError)]), (STOPPING, "mode", [(1, TypeError)]),
    *((PLATEAU, name, COUNTS) for name in ("patience", "cooldown")),
    *((PLATEAU, name, [*NUMBERS, *LARGE]) for name in ("min_delta", "min_lr")),
    (made(callbacks.ModelCheckpoint), "filepath", PATHS), (CHECKPOINT, "monitor", [(0, TypeError), ([], TypeError)]),
    (PLATEAU, "factor", [*POSITIVE_NUMBERS, (1, ValueError)]),
    (CHECKPOINT, "max_to_keep", POSITIVE_COUNTS), (CHECKPOINT, "initial_value_threshold", NUMBERS),
    (CHECKPOINT, "save_freq", [*POSITIVE_COUNTS[:3], (0, ValueError), ("batch", ValueError)]),
    (CHECKPOINT, "save_best_only", SWITCHES), (CHECKPOINT, "save_weights_only", SWITCHES),
    (BACKUP, "save_freq", [*POSITIVE_COUNTS[:3], (0, ValueError), ("batch", ValueError),
                           (datetime.timedelta(), ValueError)]),
    (BACKUP, "save_on_error", SWITCHES),
    (BACKUP, "double_checkpoint", SWITCHES), (BACKUP, "delete_checkpoint", SWITCHES),
    (made(callbacks.BackupAndRestore), "backup_dir", PATHS),
    (BACKUP, "preemption_signal", [("SIGTERM", TypeError), (True, TypeError), (0, ValueError), (2**20, ValueError)]),
    (made(callbacks.CSVLogger, "log.csv"), "append", SWITCHES), (made(callbacks.CSVLogger), "filename", PATHS),
    (made(callbacks.CSVLogger, "log.csv"), "separator", [
        (None, TypeError), ("", ValueError), ("::", ValueError), ("\n", ValueError), ('"', ValueError)]),
    *((made(callbacks.LambdaCallback), name, [(3, TypeError), ("x", TypeError)])
      for name in ("on_epoch_end", "on_train_batch_end", "on_test_begin")),
    *((made(callbacks.RemoteMonitor), name, TEXTS) for name in ("root", "path", "field")),
    (made(callbacks.RemoteMonitor), "headers", [("a: b", TypeError)]),
    (made(callbacks.RemoteMonitor), "send_as_json", SWITCHES),
    (made(callbacks.Profile, steps=(1, 2)), "log_dir", PATHS), (made(callbacks.TensorBoard), "log_dir", PATHS),
    (made(callbacks.LearningRateScheduler), "schedule", [(0.1, TypeError)]),
    (made(callbacks.Profile, "logs"), "steps", [
        (3, TypeError), ((1.5, 2), TypeError), ((0, 2), ValueError), ((2, 1), ValueError), ((1,), ValueError)]),
    (made(callbacks.SkipNonFinite), "max_consecutive", POSITIVE_COUNTS),
    (made(callbacks.SkipNonFinite), "raise_error", SWITCHES), (made(callbacks.TerminateOnNaN), "raise_error", SWITCHES),
    (made(callbacks.SwapEMAWeights), "swap_on_epoch", SWITCHES),
    *((made(callbacks.CallbackList), name, SWITCHES) for name in ("add_history", "add_progbar")),
    (made(callbacks.Throughput), "peak_flops_per_sec", POSITIVE_NUMBERS),
    (made(callbacks.ValidateEvery), "steps", POSITIVE_COUNTS),
    (made(callbacks.ValidateEvery), "minutes", POSITIVE_NUMBERS),
    *((made(callbacks.TensorBoard), name, COUNTS) for name in ("histogram_freq", "embeddings_freq")),
    (made(callbacks.TensorBoard), "update_freq", [*POSITIVE_COUNTS[:3], (0, ValueError), ("step", ValueError)]),
    (made(callbacks.TensorBoard), "profile_batch", [
        (1.5, TypeError), ((1, 2.5), TypeError), ("1,b", ValueError), ((2, 1), ValueError), (-1, ValueError)]),
    (made(callbacks.TensorBoard), "write_graph", SWITCHES),
    *((made(optimizers.Adam), name, [*NUMBERS, (1.0, ValueError)]) for name in ("beta_1", "beta_2")),
    (made(optimizers.Adam), "learning_rate", [*NUMBERS[:3], (NAN, ValueError), (-1.0, ValueError), *LARGE]),
    *((made(optimizers.Adam), name, [*POSITIVE_NUMBERS, *LARGE, *SMALL])
      for name in ("epsilon", "clipnorm", "clipvalue", "global_clipnorm")),
    (made(optimizers.Adam), "weight_decay", [*NUMBERS, (-1.0, ValueError), *LARGE]),
    (made(optimizers.Adam), "amsgrad", SWITCHES), (made(optimizers.SGD), "nesterov", SWITCHES),
    (made(optimizers.RMSprop), "centered", SWITCHES),
    (made(CommunicationOptions), "bytes_per_pack", COUNTS),
    (made(CommunicationOptions), "timeout_seconds", POSITIVE_NUMBERS),
    *((made(assert_strategies_equal, lambda: None, (X, Y), [None]), name, [*NUMBERS, (-1.0, ValueError)])
      for name in ("rtol", "atol")),
]
CASES = [pytest.param(call, name, value, error, id=f"{number}-{name}-{type(value).__name__}-{error.__name__}")
         for number, (call, name, values) in enumerate(TABLE) for value, error in values]


@pytest.mark.parametrize(("call", "name", "value", "error"), CASES)
def test_a_bad_argument_raises_the_error_of_its_kind_and_names_itself(model, call, name, value, error):
    with pytest.raises(error, match=f"`{name}\\b"):
        call(model, **{name: value})


@pytest.mark.parametrize(("call", "function"), [
    (FIT, Model.fit), (EVALUATE, Model.evaluate), (PREDICT, Model.predict), (STOPPING, callbacks.EarlyStopping),
    (CHECKPOINT, callbacks.ModelCheckpoint)])
def test_the_table_has_all_numbers_that_a_run_or_a_callback_takes(call, function):
    numbers = {name for name, parameter in inspect.signature(function).parameters.items()
               if re.search(r"\b(int|float)\b", str(parameter.annotation))}
    assert numbers <= {name for each, name, _ in TABLE if each is call}


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3)])
def test_numpys_whole_numbers_are_whole_numbers(value):
    arguments.check_count("count", value)
    assert type(arguments.as_count("count", value)) is int
    assert callbacks.EarlyStopping("loss", patience=value).patience == 3


def test_a_number_may_be_infinite_and_an_array_without_axes():
    arguments.require_number(baseline=np.inf, other=np.float32(0.5))
    assert arguments.as_number("rate", np.array(0.5)) == 0.5


def test_a_word_that_is_nearly_right_is_named():
    with pytest.raises(ValueError, match=r"Received: save_freq='epochs'\. Did you mean 'epoch'\?$"):
        arguments.as_count_or_word("save_freq", "epochs", ["epoch"])


@pytest.mark.parametrize(("value", "number"), [(0, 0), (2, 2), ("auto", 1), (True, 1), (np.int64(2), 2)])
def test_verbose_is_a_number(value, number):
    assert arguments.check_verbose(value) == number
