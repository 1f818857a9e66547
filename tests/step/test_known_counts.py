"""Programs of fused steps that know how many steps they have, as accelerators run them."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.engine.model.core.model_core import core_of
from trainer.engine.step import compiled_phase


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.relu(nn.BatchNorm(use_running_average=not training)(nn.Conv(4, (3, 3))(x)))
        x = nn.Dropout(0.2, deterministic=not training)(x.reshape(x.shape[0], -1))
        return nn.Dense(3)(x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(nn.LSTMCell(8))(x)[:, -1])


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)((x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))).mean(1))


MODELS = {"dense": (lambda: nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)]), (6,)), "cnn": (Cnn, (6, 6, 2)),
          "recurrent": (Recurrent, (5, 4)), "attention": (Attention, (5, 4))}


@pytest.fixture
def known(monkeypatch):
    """Makes phases as on an accelerator."""
    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.specializes_on_step_count = True

    made = compiled_phase.Programs.__init__
    monkeypatch.setattr(compiled_phase.Programs, "__init__", init)


def fitted(kind, rows=80, **options):
    make, shape = MODELS[kind]
    x, y = data(rows, shape)
    model = trainer.Model(make(), seed=0)
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                  steps_per_execution=4)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, **options)
    return model, history.history, model.evaluate(x, y, batch_size=8, verbose=0), model.predict(
        x, batch_size=8, verbose=0)


def data(rows, shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, *shape)).astype(np.float32), rng.integers(3, size=rows)


def counts_of(model, kind="train"):
    return sorted(count or 0 for _, count in core_of(model).configuration.phases[kind].programs.compiled)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_programs_for_any_number_of_steps(kind, request):
    expected = fitted(kind)
    request.getfixturevalue("known")
    found = fitted(kind)
    assert counts_of(found[0]) == [2, 4] and counts_of(expected[0]) == [0]
    jax.tree.map(np.testing.assert_array_equal, found[0].state, expected[0].state)
    assert found[1:3] == expected[1:3]
    np.testing.assert_array_equal(found[3], expected[3])


@pytest.mark.slow
def test_a_loop_says_how_often_it_turns(known):
    model, *_ = fitted("dense")
    for kind, counts in (("train", {"4", "2"}), ("test", {"4", "2"}), ("predict", {"4", "2"})):
        found = set()
        for executable in core_of(model).configuration.phases[kind].programs.compiled.values():
            loops = [line for line in executable.as_text().splitlines() if re.search(r" while\(", line)]
            found |= {re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)[1] for line in loops}
        assert found == counts, kind


@pytest.mark.slow
def test_other_counts_share_a_program(known):
    model = trainer.Model(MODELS["dense"][0](), seed=0)
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=8)
    for batches in (8, 5, 3, 6, 7):
        x, y = data(8 * batches, (6,))
        model.fit(((x[row:row + 8], y[row:row + 8]) for row in range(0, len(x), 8)), epochs=1, verbose=0)
    known_counts = [count for count in counts_of(model) if count]
    assert len(known_counts) <= compiled_phase.KNOWN_COUNTS and 0 in counts_of(model)
    assert int(model.state.step) == 29


def test_what_is_compiled_ahead_is_what_fit_runs(known):
    x, y = data(80, (6,))
    model = trainer.Model(MODELS["dense"][0](), seed=0)
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=4)
    model.compile_ahead((x, y), batch_size=8, epochs=2, phases=["train"])
    before = counts_of(model)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert counts_of(model) == before == [2, 4]
