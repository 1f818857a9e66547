"""A phase keeps the programs that it used last; the programs of a model go with the model."""

import gc
import warnings
import weakref

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.engine.model.core.model_core import core_of
from trainer.engine.step import compiled_phase, step_functions

X = np.linspace(-1, 1, 240, dtype=np.float32).reshape(120, 2)
KEPT = 3


def built(**arguments):
    model = trainer.Model(nn.Dense(1), seed=0)
    model.compile("sgd", "mse", **arguments)
    model.build(X)
    return model


def phase(model, kind):
    return core_of(model).configuration.phases[kind]


@pytest.fixture
def _few(monkeypatch):
    monkeypatch.setattr(compiled_phase, "MAX_PROGRAMS", KEPT)
    monkeypatch.setattr(step_functions, "MAX_PROGRAMS", KEPT)


@pytest.mark.slow
def test_a_hundred_numbers_of_rows_keep_the_documented_number_of_programs():
    model = built()
    for rows in range(1, 101):
        assert model.predict_on_batch(X[:rows]).shape == (rows, 1)
    kept = phase(model, "predict").programs.compiled
    assert len(kept) == compiled_phase.MAX_PROGRAMS == 64


@pytest.mark.slow
@pytest.mark.usefixtures("_few")
def test_the_programs_last_used_are_kept_and_the_others_are_freed():
    model = built(compile_guard="off")
    expected = model.predict_on_batch(X)[:, 0]
    seen = []
    for rows in (1, 2, 3, 4, 1, 5, 6):
        np.testing.assert_allclose(model.predict_on_batch(X[:rows])[:, 0], expected[:rows], rtol=1e-6)
        seen += map(weakref.ref, phase(model, "predict").programs.compiled.values())
    kept = phase(model, "predict").programs
    gc.collect()
    assert len(kept.compiled) == len({id(program()) for program in seen if program() is not None}) == KEPT
    before = kept.count
    model.predict_on_batch(X[:6])
    assert kept.count == before
    assert kept.functions.function.cache_info().currsize <= KEPT


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("guard", ["warn", "error", "off"])
def test_a_program_that_is_compiled_again_is_reported(guard):
    model = built(compile_guard=guard)
    for rows in (1, 2, 3, 4):
        model.predict_on_batch(X[:rows])
    message = "compiles again for batch 0, as for batches of the same shape before: programs of more than 3 shapes"
    if guard == "error":
        with pytest.raises(RuntimeError, match=message):
            model.predict_on_batch(X[:1])
    elif guard == "warn":
        with pytest.warns(RuntimeWarning, match=message):
            model.predict_on_batch(X[:1])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.predict_on_batch(X[:1])


@pytest.mark.slow
@pytest.mark.usefixtures("_few")
def test_fit_with_more_shapes_than_programs_gives_the_same_weights(monkeypatch):
    def weights(model):
        batches = [(X[:rows], X[:rows, :1]) for rows in (8, 7, 6, 5, 4)]
        model.fit(batches, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()[1]

    few = built(compile_guard="off")
    received = weights(few)
    assert len(phase(few, "train").programs.compiled) <= KEPT < phase(few, "train").programs.count
    monkeypatch.undo()
    np.testing.assert_array_equal(received, weights(built(compile_guard="off")))


@pytest.mark.slow
def test_a_model_that_is_dropped_frees_its_programs_and_arrays():
    model = built()
    history = model.fit(X, X[:, :1], verbose=0)
    model.evaluate(X, X[:, :1], verbose=0)
    model.predict(X, verbose=0)
    phases = [phase(model, kind) for kind in ("train", "test", "predict")]
    kept = [program for each in phases for program in each.programs.compiled.values()]
    freed = [weakref.ref(each) for each in (core_of(model), model.state.params["kernel"], *kept)]
    assert len(freed) >= 5
    del model, history, kept, phases
    gc.collect()
    assert [each() for each in freed if each() is not None] == []


@pytest.mark.slow
def test_clear_session_resets_what_was_set_and_models_in_use_go_on():
    model = built()
    before = model.predict(X, verbose=0)
    trainer.utils.set_random_seed(7)
    trainer.utils.disable_interactive_logging()
    trainer.utils.clear_session()
    assert trainer.utils.is_interactive_logging_enabled()
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)
    fresh = trainer.Model(nn.Dense(1))  # of the default seed again, 0
    fresh.build(X)
    np.testing.assert_array_equal(fresh.predict(X, verbose=0), before)
    with pytest.raises(TypeError, match="`free_memory` must be True or False"):
        trainer.utils.clear_session(free_memory=1)


@pytest.mark.slow
def test_clear_session_drops_what_jax_keeps(monkeypatch):
    import jax

    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    trainer.utils.clear_session(free_memory=False)
    assert cleared == []
    trainer.utils.clear_session()
    assert cleared == [True]
