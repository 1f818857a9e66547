"""The same work runs in the same program, wherever its data are, and nothing is compiled or traced twice."""

from __future__ import annotations

import numpy as np
import pytest

import trainer
from tests.loop.test_compilation import count_compilations, make_model
from tests.support.networks import classification
from trainer.distribute.placement import placement

GATHERS = "gather_stack"  # copies rows on the devices to where a step takes them


@pytest.fixture(params=[False, True], ids=["sent", "kept_on_the_devices"])
def keeps_arrays(request, monkeypatch):
    """Data that are read more than once are sent each time, as to CPU devices, or stay on the devices."""
    monkeypatch.setattr(trainer.distribute.Strategy, "keeps_arrays", request.param)
    return request.param


def steps_among(compiled):
    """Returns how many of some compilations are not of gathers alone."""
    return sum(GATHERS not in details["fun_name"] for details in compiled)


def test_evaluate_after_fit_compiles_nothing(keeps_arrays):
    x, y, _ = classification(21)
    model = make_model()
    history = model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0).history
    with count_compilations() as compiled:
        logs = model.evaluate(x, y, batch_size=8, verbose=0)
    assert not compiled
    assert logs["loss"] == history["val_loss"][-1]


def test_one_epoch_several_and_an_evaluation_share_two_programs_of_each_phase(keeps_arrays):
    x, y, _ = classification(53)
    validation = x[:21].copy(), y[:21].copy()
    placement._gathering.cache_clear()
    model = make_model()
    model.fit(x, y, batch_size=8, verbose=0)
    with count_compilations() as several:
        model.fit(x, y, batch_size=8, epochs=3, validation_data=validation, verbose=0)
    assert steps_among(several) == 2, "whole batches to validate on, and a shorter last one"
    assert (len(several) > 2) == keeps_arrays, "the counter sees gathers"
    with count_compilations() as evaluated:
        model.evaluate(*validation, batch_size=8, verbose=0)
    assert not evaluated
    assert {kind: phase.num_programs for kind, phase in model._configuration.phases.items()} == {"train": 2, "test": 2}


def test_evaluate_sees_what_was_written_to_the_arrays_of_fit(keeps_arrays):
    x, y, _ = classification(21)
    model, written = make_model(), x.copy()
    model.fit(x, y, batch_size=8, epochs=2, validation_data=(written, y), verbose=0)
    before = model.evaluate(written, y, batch_size=8, verbose=0)
    written *= -1
    after = model.evaluate(written, y, batch_size=8, verbose=0)
    assert after != before
    assert after == model.evaluate(-x, y, batch_size=8, verbose=0)
    np.testing.assert_array_equal(model.predict(written, verbose=0), model.predict(-x, verbose=0))
