"""Steps that compile again and again are reported, with what changed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import trainer
from tests.support.networks import classification, compiled_mlp
from trainer.engine.model.core.model_core import core_of

GROWING = [8, 6, 7, 5]


def batches(sizes):
    x, y, _ = classification(16)
    return ((x[:size], y[:size].astype(np.int32)) for size in sizes)


@pytest.mark.slow
def test_a_batch_of_a_third_size_is_reported_with_its_number_and_what_changed():
    with pytest.warns(RuntimeWarning) as caught:
        compiled_mlp().fit(batches(GROWING), verbose=0)
    assert len(caught) == 2
    first, second = (str(warning.message) for warning in caught)
    assert first.startswith("The train step compiles again (time 3 in this run) for batch 2: `x` was float32 (6, 6) "
                            "and is float32 (7, 6), `y` was int32 (6,) and is int32 (7,).")
    assert "compile_guard='off'" in first
    assert second.startswith("The train step compiles again (time 4 in this run) for batch 3: `x` was float32 (7, 6)")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_shorter_batch_may_come_first():
    x, y, _ = classification(22)
    model = compiled_mlp(compile_guard="error")
    model.fit(x, y, batch_size=8, steps_per_epoch=2, initial_epoch=1, epochs=3, verbose=0)
    with pytest.raises(RuntimeError, match=r"\(time 3 in this run\) for batch 2: `x` was float32 \(9, 6\)"):
        model.fit(batches([5, 9, 10]), verbose=0)


@pytest.mark.slow
def test_evaluate_is_watched_too():
    with pytest.warns(RuntimeWarning, match=r"The test step compiles again \(time 3 in this run\)"):
        compiled_mlp().evaluate(batches([8, 7, 6]), verbose=0)


@pytest.mark.slow
def test_in_the_mode_error_nothing_compiles_and_the_weights_of_the_last_step_stay():
    model = compiled_mlp(compile_guard="error")
    with pytest.raises(RuntimeError, match=r"time 3 in this run\) for batch 2"):
        model.fit(batches(GROWING), verbose=0)
    assert len(core_of(model).configuration.phases["train"].programs.compiled) == 2
    assert int(model.state.step) == 2


@pytest.mark.slow
def test_turned_off_it_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_mlp(compile_guard="off").fit(batches(GROWING), verbose=0)


@pytest.mark.slow
def test_a_shorter_last_batch_another_run_and_what_was_compiled_before_are_expected():
    x, y, _ = classification(30)
    model = compiled_mlp(compile_guard="error")
    for _ in range(2):
        model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), validation_batch_size=16, verbose=0)

    class OfSizes(list):
        def __iter__(self):
            return batches(super().__iter__())

    model.fit(OfSizes([7, 7, 7, 2]), verbose=0)
    model.fit(OfSizes([8, 6, 7, 2]), verbose=0)  # a shorter one, and two that the last run compiled
    # 8 and 6 rows gathered on the device, and 7, 2, 8 and 6 rows sent there.
    assert len(core_of(model).configuration.phases["train"].programs.compiled) == 6


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="compile_guard"):
        compiled_mlp(compile_guard="loud")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("mode", ["warn", "off"])
def test_an_evaluation_by_a_callback_is_a_run_of_its_own(mode):
    x, y, weights = classification(16)
    model = compiled_mlp(compile_guard=mode)
    once = []

    def evaluate(batch, logs):
        if not once:
            once.append(model.evaluate(x, y, batch_size=4, verbose=0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y, weights), verbose=0,
                  callbacks=trainer.callbacks.LambdaCallback(on_train_batch_end=evaluate))
    assert once
