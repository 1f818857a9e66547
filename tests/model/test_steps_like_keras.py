"""Which batches make up an epoch under `steps_per_epoch` and `validation_steps`: the same as in Keras.

Where we differ on purpose, a test at the end says how and why.
"""

import functools
import itertools
import warnings

import grain
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer

ROWS = 2


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


class Recorder:
    """Notes the number of each batch, which is its loss; logs have the mean over the epoch so far."""

    def __init__(self):
        self.epochs, self.validations = [], []

    def callback(self, callbacks):
        return callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.epochs.append([]),
            on_train_batch_end=lambda batch, logs: self.note(self.epochs[-1], batch, logs),
            on_test_begin=lambda logs: self.validations.append([]),
            on_test_batch_end=lambda batch, logs: self.note(self.validations[-1], batch, logs))

    @staticmethod
    def note(batches, batch, logs):
        assert batch == len(batches)
        batches.append(round(float(logs["loss"]) * (batch + 1) - sum(batches)))


def batch(number):
    return np.full((ROWS, 1), number, np.float32), np.zeros((ROWS, 1), np.float32)


def arrays(count, keras):
    return {"x": np.repeat(np.arange(count, dtype=np.float32), ROWS)[:, None],
            "y": np.zeros((count * ROWS, 1), np.float32), "batch_size": ROWS}


def arrays_without_batch_size(count, keras):
    return {**arrays(count, keras), "batch_size": None}


def generator(count, keras):
    return {"x": (batch(number) for number in range(count))}


def py_dataset(count, keras):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return count

        def __getitem__(self, index):
            return batch(index)

    return {"x": Batches()}


def endless_py_dataset(count, keras):
    class Batches(keras.utils.PyDataset):
        num_batches = property(lambda self: None)

        def __getitem__(self, index):
            return batch(index)

    return {"x": Batches()}


def re_iterable(count, keras):
    """Of the iterables that can be read again, Keras takes those of other libraries."""
    return {"x": grain.MapDataset.range(count).map(batch)}


def re_iterable_of_unknown_length(count, keras):
    return {"x": grain.MapDataset.range(count).map(batch).to_iter_dataset()}


@functools.cache
def model_of_keras(keras):
    """Returns a model that no training changes: compiled once, it serves all cases."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), loss=lambda y, y_pred: y_pred[:, 0])
    return model


def in_keras(keras, call, **options):
    return recorded(model_of_keras(keras), keras.callbacks, call, options)


def here(keras, call, **options):
    model = trainer.Model(nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones))
    model.compile(optax.sgd(0.0), loss=lambda y, y_pred: y_pred[:, 0])
    return recorded(model, trainer.callbacks, call, options)


def recorded(model, callbacks, call, options):
    """Returns the batches of each epoch and of each validation, and whether the data ran out."""
    recorder = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(model, call)(**options, verbose=0, callbacks=[recorder.callback(callbacks)])
    return recorder.epochs, recorder.validations, sum("ran out of data" in str(found.message) for found in caught)


def train(run, keras, make, count, steps):
    return run(keras, "fit", **make(count, keras), steps_per_epoch=steps, epochs=4, shuffle=False)


# Batches of the data, and of an epoch: fewer, not dividing by it (with one epoch between or not), as many, parts.
SHAPES = [(3, 5), (6, 4), (9, 4), (3, 3), (6, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [arrays, arrays_without_batch_size, py_dataset])
@pytest.mark.parametrize(("count", "steps"), [*SHAPES, (3, None)])
def test_epochs_have_the_batches_that_they_have_in_keras(keras, make, count, steps):
    assert train(here, keras, make, count, steps) == train(in_keras, keras, make, count, steps)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [re_iterable, re_iterable_of_unknown_length])
@pytest.mark.parametrize(("count", "steps"), [(3, 5), (6, 4), (9, 4)])
def test_epochs_of_iterables_that_can_be_read_again_have_those_of_keras(keras, make, count, steps):
    assert train(here, keras, make, count, steps) == train(in_keras, keras, make, count, steps)


def test_an_endless_py_dataset_is_read_on(keras):
    assert train(here, keras, endless_py_dataset, None, 3) == train(in_keras, keras, endless_py_dataset, None, 3)


@pytest.mark.slow
@pytest.mark.parametrize("make", [arrays, arrays_without_batch_size, py_dataset, re_iterable,
                                  re_iterable_of_unknown_length])
@pytest.mark.parametrize(("count", "steps"), [(3, 5), (6, 4), (6, 3)])
def test_each_validation_has_the_batches_that_it_has_in_keras(keras, make, count, steps):
    def validate(run):
        data = make(count, keras)
        validation = (data["x"], data["y"]) if "y" in data else data["x"]
        return run(keras, "fit", **arrays(2, keras), epochs=3, validation_data=validation, validation_steps=steps,
                   validation_batch_size=data.get("batch_size"), shuffle=False)

    assert validate(here) == validate(in_keras)


@pytest.mark.slow
@pytest.mark.parametrize("make", [arrays, generator, py_dataset, re_iterable_of_unknown_length])
@pytest.mark.parametrize(("count", "steps"), [(3, 5), (6, 4)])
def test_evaluate_and_predict_take_as_many_batches_as_there_are(keras, make, count, steps):
    assert (here(keras, "evaluate", **make(count, keras), steps=steps)
            == in_keras(keras, "evaluate", **make(count, keras), steps=steps))
    data = {name: value for name, value in make(count, keras).items() if name != "y"}
    model = trainer.Model(nn.Dense(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(model.predict(**data, steps=steps, verbose=0)) == ROWS * min(count, steps)


# --- on purpose otherwise ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [re_iterable, re_iterable_of_unknown_length])
def test_no_epoch_is_empty_where_the_end_of_a_pass_shows_only_by_reading_on(keras, make):
    # Keras has an epoch without batches there, whose logs are those of nothing.
    assert train(in_keras, keras, make, 6, 3)[0] == [[0, 1, 2], [3, 4, 5], [], [0, 1, 2]]
    assert train(here, keras, make, 6, 3) == ([[0, 1, 2], [3, 4, 5]] * 2, [], 0)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("count", "steps", "expected", "of_keras"), [
    (5, 2, [[0, 1], [2, 3], [4]], [[0, 1], [2, 3], [4], [0, 1]]),
    (6, 3, [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5], [], [0, 1]]),
    (3, None, [[0, 1, 2]], [[0, 1, 2], [0, 1], [0, 1], [0, 1]]),
])
def test_a_generator_that_has_ended_ends_the_training(keras, count, steps, expected, of_keras):
    # Keras trains again on the two batches that it had looked at.
    assert train(in_keras, keras, generator, count, steps)[0] == of_keras
    assert train(here, keras, generator, count, steps) == (expected, [], 1)


def validate_on_generator(run, keras, count, steps, epochs):
    numbers = range(count) if count else itertools.cycle(range(steps))
    return run(keras, "fit", **arrays(2, keras), epochs=epochs, validation_data=(batch(number) for number in numbers),
               validation_steps=steps, shuffle=False)[1]


@pytest.mark.slow
def test_a_generator_that_repeats_its_batches_is_validated_on_all_of_them_each_time(keras):
    # Keras begins each validation with the two batches that it had looked at, and reads on after them.
    assert validate_on_generator(in_keras, keras, None, 4, 3) == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert validate_on_generator(here, keras, None, 4, 3) == [[0, 1, 2, 3]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("count", "steps", "of_keras"), [
    (3, 2, [[0, 1], [0, 1], [0, 1]]),
    (3, 5, [[0, 1, 2], [0, 1], [0, 1]]),
])
def test_a_generator_that_ends_before_the_last_validation_is_an_error(keras, count, steps, of_keras):
    assert validate_on_generator(in_keras, keras, count, steps, 3) == of_keras
    with pytest.raises(ValueError, match=r"no batch left after the 3 .*Make it yield more, or pass data"):
        validate_on_generator(here, keras, count, steps, 3)


def test_reading_on_beyond_the_end_is_asked_for(keras):
    data = arrays(3, keras)
    endless = trainer.data.Dataset.from_arrays((data["x"], data["y"])).batch(ROWS).repeat()
    assert here(keras, "fit", x=endless, steps_per_epoch=2, epochs=3) == ([[0, 1], [2, 0], [1, 2]], [], 0)
