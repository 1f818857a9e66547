"""The same work runs in the same program, wherever its data are, and nothing is compiled or traced twice."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.loop.test_compilation import count_compilations, make_model
from tests.support.networks import NNXMLP, classification, mirrored
from trainer.distribute.placement import placement
from trainer.engine.model.core.model_core import core_of

GATHERS = "gather_stack"  # copies rows on the devices to where a step takes them


@pytest.fixture(params=[False, True], ids=["sent", "kept_on_the_devices"])
def keeps_arrays(request, monkeypatch):
    """Data that are read more than once are sent each time, as to CPU devices, or stay on the devices."""
    monkeypatch.setattr(trainer.distribute.Strategy, "keeps_arrays", request.param)
    return request.param


def steps_among(compiled):
    """Returns how many of some compilations are not of gathers alone."""
    return sum(GATHERS not in details["fun_name"] for details in compiled)


@pytest.mark.slow
def test_evaluate_after_fit_compiles_nothing(keeps_arrays):
    x, y, _ = classification(21)
    model = make_model()
    history = model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0).history
    with count_compilations() as compiled:
        logs = model.evaluate(x, y, batch_size=8, verbose=0)
    assert not compiled
    assert logs["loss"] == history["val_loss"][-1]


@pytest.mark.slow
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
    phases = core_of(model).configuration.phases
    assert {kind: phase.programs.count for kind, phase in phases.items()} == {"train": 2, "test": 2}


class CountedLinen(nn.Module):
    """An MLP that counts its calls: each is a trace, or a part of one."""

    calls = 0

    @nn.compact
    def __call__(self, x):
        CountedLinen.calls += 1
        return nn.Dense(3)(nn.relu(nn.Dense(8)(x)))


class CountedNNX(NNXMLP):
    """The same in NNX."""

    calls = 0

    def __call__(self, x):
        CountedNNX.calls += 1
        return super().__call__(x)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "proofs"), [(1, 0), (2, 8)])
@pytest.mark.parametrize("module", [CountedLinen, CountedNNX])
def test_a_session_traces_the_module_once_for_each_program(module, replicas, proofs):
    """Besides twice to make the weights, once to prove that the logits are no probabilities, and, to prove that rows
    stay apart in training and in inference, on any rows.

    Such a proof needs a trace for the rows of each whole batch and of a replica's part, here eight, four and two, too.
    """
    x, y, _ = classification(20)
    model, before = make_model(module(), replicas), module.calls
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, verbose=0)
        model.fit(x, y, batch_size=8, epochs=3, validation_data=(x.copy(), y.copy()), verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
    steps = 2 + 2 + 2  # of whole batches, and of a last one of four rows: to train, test and predict
    assert module.calls - before == 3 + proofs + steps
    names = collections.Counter(details["fun_name"] for details in compiled)
    assert names["jit(_execution)"] == steps
    assert set(names) == {"jit(_make)", "jit(results)", "jit(_execution)"}, "nothing is computed eagerly"


@pytest.mark.slow
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


class Classifier(nn.Module):
    """A module that ends with a function of its logits."""

    last: Any

    @nn.compact
    def __call__(self, x):
        return self.last(nn.Dense(3)(nn.relu(nn.Dense(8)(x))))


def fit_on_probabilities(last):
    x, y, _ = classification(16)
    with mirrored(1).scope():
        model = trainer.Model(Classifier(last), seed=1)
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, verbose=0)
    return [details["fun_name"] for details in compiled]


@pytest.mark.slow
def test_what_the_trace_proves_of_outputs_is_not_computed():
    names = fit_on_probabilities(nn.softmax)
    assert sum("_execution" in name for name in names) == 1
    assert not any("apply" in name for name in names)
    assert any("apply" in name for name in fit_on_probabilities(lambda logits: jnp.clip(logits, 0, 1)))


@pytest.mark.slow
def test_a_fit_writes_the_weights_back_to_an_nnx_module_without_a_program():
    x, y, _ = classification(16)
    module = NNXMLP()
    model = make_model(module)
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, verbose=0)
    assert not any("copy" in details["fun_name"] for details in compiled)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))]
    model.fit(x, y, batch_size=8, verbose=0)  # donates the buffers of the state
    for old, leaf in zip(before, jax.tree.leaves(nnx.state(module, nnx.Param)), strict=True):
        assert not np.array_equal(old, leaf)


@pytest.mark.slow
def test_a_state_that_is_lent_is_copied_without_a_program():
    x, y, _ = classification(16)
    model = make_model()
    model.fit(x, y, batch_size=8, verbose=0)
    lent = model.state
    values = jax.device_get(lent.params)
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, verbose=0)
    assert not compiled
    jax.tree.map(np.testing.assert_array_equal, lent.params, values)
