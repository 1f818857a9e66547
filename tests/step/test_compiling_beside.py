"""Programs that an epoch will need, compiled while its first executions run, as on accelerators."""

from __future__ import annotations

import concurrent.futures
import threading

import jax
import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer.core.compile.jit import begin_compiling
from trainer.engine.step import compiled_phase

x, y, _ = classification(21)


@pytest.fixture
def beside(monkeypatch):
    """Makes phases as on an accelerator; gives the executions in the order of their compilations, and who made them."""
    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.specializes_on_step_count = True

    def noting(lowered, options=None):
        compiled.append("main" if threading.current_thread() is threading.main_thread() else "thread")
        return compile_lowered(lowered, options)

    def begin(lowered, options=None):
        pool = concurrent.futures.ThreadPoolExecutor(1)
        return pool.submit(noting, lowered, options)

    compiled, made, compile_lowered = [], compiled_phase.Programs.__init__, compiled_phase.compile_lowered
    monkeypatch.setattr(compiled_phase.Programs, "__init__", init)
    monkeypatch.setattr(compiled_phase, "compile_lowered", noting)
    monkeypatch.setattr(compiled_phase, "begin_compiling", begin)
    return compiled


def new_model(replicas=2, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(LinenMLP(batch_norm=True, dropout=0.1), seed=1)
        model.compile("sgd", logits_loss(), metrics=["accuracy"], **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("steps", "programs"), [(1, 4), (2, 4), (4, 4), (3, 5)])
def test_only_the_first_program_is_waited_for(beside, steps, programs, epochs):
    model = new_model(steps_per_execution=steps)
    model.fit(x, y, batch_size=4, epochs=epochs, validation_data=(x[:14], y[:14]), verbose=0)
    assert beside[0] == "main" and set(beside[1:]) == {"thread"}
    expected = len(beside)
    model.fit(x, y, batch_size=4, epochs=epochs, validation_data=(x[:14], y[:14]), verbose=0)
    assert len(beside) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}])
def test_the_numbers_are_those_of_programs_compiled_one_after_the_other(options, request):
    def fit():
        model = new_model(**options)
        history = model.fit(x, y, batch_size=4, epochs=2, validation_data=(x[:14], y[:14]), verbose=0).history
        return history, model.get_weights(), model.predict(x, batch_size=4, verbose=0)

    expected = fit()
    compiled = request.getfixturevalue("beside")
    jax.tree.map(np.testing.assert_array_equal, fit(), expected)
    assert "thread" in compiled


@pytest.mark.slow
def test_evaluate_and_predict_compile_their_last_batch_beside(beside):
    model = new_model(steps_per_execution=1)
    model.evaluate(x, y, batch_size=4, verbose=0)
    assert beside == ["main", "thread"]
    model.predict(x, batch_size=4, verbose=0)
    assert beside == ["main", "thread"] * 2


@pytest.mark.slow
def test_callbacks_that_see_each_batch_need_no_other_program(beside):
    model = new_model(steps_per_execution=4)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[trainer.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: None)])
    assert beside == ["main", "thread"]


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_is_an_error_when_it_is_due(beside, monkeypatch):
    def begin(lowered, options=None):
        future = concurrent.futures.Future()
        future.set_exception(ValueError("out of registers"))
        return future

    monkeypatch.setattr(compiled_phase, "begin_compiling", begin)
    model = new_model(steps_per_execution=1)
    with pytest.raises(ValueError, match="out of registers"):
        model.fit(x, y, batch_size=4, verbose=0)
    assert int(model.state.step) == 5


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["error", "warn"])
def test_the_compile_guard_takes_a_last_batch_as_expected(beside, guard):
    model = new_model(steps_per_execution=1, compile_guard=guard)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert beside == ["main", "thread"]


def test_a_thread_compiles_under_the_callers_jax_options():
    class Lowered:
        def compile(self, compiler_options):
            return threading.current_thread() is threading.main_thread(), jax.config.jax_log_compiles

    with jax.log_compiles():
        executable = begin_compiling(Lowered())
    assert executable.result() == (False, True)
