"""Generators in `fit`: what happens when they end, for training and for validation."""

import itertools
import warnings

import numpy as np
import pytest
from flax import linen as nn

import trainer

RAN_OUT = "Your input ran out of data"


def fit(x, **options):
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    return model.fit(x, verbose=0, **options).history


def batches(count):
    """A generator whose batch i has rows of i: the loss of an untrained layer tells which batches it saw."""
    for number in range(1, count + 1):
        yield np.full((4, 2), number, np.float32), np.zeros((4, 1), np.float32)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("count", "steps", "epochs_run"), [(3, None, 1), (4, 2, 2), (5, 2, 3)], ids=["one pass", "even", "uneven"])
def test_an_epoch_without_batches_is_not_recorded(count, steps, epochs_run):
    seen = []
    watcher = trainer.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    with pytest.warns(UserWarning, match=RAN_OUT):
        history = fit(batches(count), steps_per_epoch=steps, epochs=5, callbacks=[watcher])
    assert len(history["loss"]) == epochs_run
    assert all(loss > 0 for loss in history["loss"])
    assert seen == list(range(epochs_run))


def test_fit_takes_from_a_generator_no_more_than_its_epochs():
    generator = batches(5)
    fit(generator, steps_per_epoch=2, epochs=2)
    assert next(generator)[0][0, 0] == 5


@pytest.mark.parametrize("validation_freq", [1, 2, [1, 3]])
def test_a_generator_for_several_whole_validations_is_refused_before_training(validation_freq):
    validation = batches(3)
    with pytest.raises(ValueError, match=r"`validation_data` is a generator.* 2 validations.*`validation_steps`"):
        fit(batches(9), steps_per_epoch=1, epochs=2 if validation_freq == 1 else 4,
            validation_data=validation, validation_freq=validation_freq)
    assert next(validation)[0][0, 0] == 1


@pytest.mark.slow
def test_a_generator_for_one_whole_validation_is_read_to_its_end():
    validation = batches(3)
    history = fit(batches(9), steps_per_epoch=1, epochs=2, validation_data=validation, validation_freq=2)
    assert len(history["val_loss"]) == 1
    assert next(validation, None) is None


@pytest.mark.slow
def test_validation_steps_take_the_next_batches_of_a_generator_until_it_runs_out():
    # The weights are frozen in effect: rows of zeros have no gradient.
    zeros = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)
    history = fit(iter([zeros] * 9), steps_per_epoch=1, epochs=2, validation_data=batches(4), validation_steps=2)
    ratio = history["val_loss"][1] / history["val_loss"][0]
    assert ratio == pytest.approx((3**2 + 4**2) / (1**2 + 2**2))
    with pytest.raises(ValueError, match="no batch left after the 4 that were read"):
        fit(iter([zeros] * 9), steps_per_epoch=1, epochs=3, validation_data=batches(4), validation_steps=2)


@pytest.mark.slow
def test_each_validation_of_a_re_iterable_has_the_same_batches():
    class ReIterable:
        def __iter__(self):
            return batches(3)

    zeros = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)
    history = fit(iter([zeros] * 9), steps_per_epoch=1, epochs=3, validation_data=ReIterable(), validation_steps=2)
    assert len(set(history["val_loss"])) == 1


BATCH = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)


@pytest.mark.parametrize("make", [lambda: itertools.repeat(BATCH), lambda: itertools.cycle([BATCH])],
                         ids=["repeat", "cycle"])
def test_iterators_that_are_known_to_be_endless_need_a_number_of_steps(make):
    with pytest.raises(ValueError, match=r"The data are endless: .*`steps_per_epoch`"):
        fit(make())
    with pytest.raises(ValueError, match=r"`validation_data`.*|The data are endless"):
        fit([BATCH], validation_data=make())
    assert len(fit(make(), steps_per_epoch=2, epochs=2)["loss"]) == 2
    assert len(fit(itertools.repeat(BATCH, 3))["loss"]) == 1


@pytest.mark.parametrize(("options", "warns"), [
    ({}, True), ({"steps_per_epoch": 5}, False), ({"max_steps": 5}, False), ({"limit_batches": 5}, False)], ids=str)
def test_an_epoch_without_an_end_in_sight_is_told(monkeypatch, options, warns):
    monkeypatch.setattr("trainer.data.reader._MANY_BATCHES", 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(batches(5), **options)
    assert any("yielded 4 batches, and their number is unknown" in str(one.message) for one in caught) == warns
