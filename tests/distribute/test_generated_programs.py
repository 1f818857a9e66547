"""S1: whatever a training program computes, any number of devices gives one device's numbers.

Programs are generated (`tests/support/generated_programs.py`): many look at the batch as a whole, draw at random, or
branch on values. To look at one: `python -c "from tests.support.generated_programs import *; print(generate(17))"`.
"""

from __future__ import annotations

import pytest

from tests.support.generated_modules import FUNCTIONS, LINEN
from tests.support.generated_programs import (
    FORMS,
    GOALS,
    OPTIMIZERS,
    OPTIONS,
    ORDINARY_GOALS,
    SIZES,
    STRATEGIES,
    generate,
)
from tests.support.generated_steps import METRICS, STEPS
from trainer.core.rng import stream_key
from trainer.distribute import OneDeviceStrategy
from trainer.distribute.replica import collectives
from trainer.distribute.replica.partitioned import PartitionedContext
from trainer.engine.model.core import model_core
from trainer.engine.step import lowering, steps
from trainer.engine.step.step_functions import StepFunctions
from trainer.testing import assert_strategies_equal

FEW, ALL = range(30), range(300)
QUICK = (1, 4, 5, 10, 11, 12, 18, 22, 23)
TOLERANCE = {"rtol": 5e-4, "atol": 5e-5}
ROUNDING = 2e-7  # of float32


def difference(program, strategies, train=None, share=1.0):
    """Returns how trainings under strategies differ from one device's by more than a share of the tolerance, or None.
    """
    tolerance = {name: share * value for name, value in TOLERANCE.items()}
    try:
        assert_strategies_equal(program.build, None, strategies,
                                train=train or program.train, evaluate=False, predict=False, **tolerance)
    except AssertionError as error:
        return str(error)
    except Exception as error:
        error.add_note(f"The program is {program}.")
        raise
    return None


def is_chaotic(program):
    """Returns whether rounding of the first weights alone moves a program by more than a quarter of the tolerance.

    Several devices round differently in each sum. Adafactor, for example, scales a gradient that is rounding alone.
    """
    moved = OneDeviceStrategy("cpu:1")

    def train(strategy, model, data):
        return program.train(strategy, model, data, ROUNDING if strategy is moved else 0.0)

    return difference(program, [moved], train, share=0.25) is not None


def check(seed, only_first=False):
    for number in (seed, seed + 1000, seed + 2000):
        program = generate(number)
        names = program.strategies[:1] if only_first else program.strategies
        found = difference(program, [STRATEGIES[name] for name in names])
        if found is None:
            return
        assert is_chaotic(program), f"{program}\n{found}"
    pytest.fail(f"Three programs, of which {program} is the last, are too sensitive to rounding to be compared.")


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize("seed", QUICK)
def test_a_generated_program_gives_one_devices_numbers(seed):
    check(seed, only_first=True)


@pytest.mark.slow
@pytest.mark.sampled(72)
@pytest.mark.parametrize("seed", [seed for seed in ALL if seed not in QUICK])
def test_many_generated_programs_give_one_devices_numbers(seed):
    check(seed)


def draws(program):
    return any(block in ("dropout", "dropped_rows", "noise") for block in program.blocks)


def is_replicated(program):
    """Returns whether replicas compute their rows for themselves: nothing draws, loops over rows or is its own."""
    return (program.seed % 4 == 0 and program.sizes[0] % 2 == 0 and not draws(program)
            and "mapped" not in program.blocks and program.loss != "crossentropy_weighted"
            and not {"deviation", "peak"}.intersection(program.metrics))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in ALL if is_replicated(generate(seed))])
def test_a_replicated_program_that_is_partitioned_gives_one_devices_numbers(seed, monkeypatch):
    reasons = []
    monkeypatch.setattr(model_core, "why_not_replicated", lambda *args: reasons.append(
        lowering.why_not_replicated(*args)) or "both are tried")
    for name in ("mirrored_2", "fully_sharded_2"):
        program = generate(seed)
        found = difference(program, [STRATEGIES[name]])
        assert found is None or is_chaotic(program), f"{program}\n{found}"
    assert None in reasons, reasons


def test_a_seed_always_gives_the_same_program():
    assert [generate(seed) for seed in FEW] == [generate(seed) for seed in FEW]


def parts(programs):
    return {(field, part) for program in programs for field, value in vars(program).items()
            for part in (value if field in ("blocks", "options", "metrics") else [value])}


@pytest.mark.parametrize(("field", "expected"), [
    ("library", ("linen", "nnx")), ("inputs", ("rows", "tokens", "rnn", "nn_scan", "lax_scan")),
    ("blocks", (*FUNCTIONS, *LINEN)), ("step", STEPS), ("optimizer", OPTIMIZERS), ("options", OPTIONS),
    ("metrics", METRICS), ("form", FORMS), ("sizes", SIZES), ("weights", ("none", "sample_weight", "class_weight"))])
def test_a_few_programs_in_a_row_have_each_part(field, expected):
    assert {part for name, part in parts(map(generate, FEW)) if name == field} == set(expected)


def test_quick_programs_have_each_kind_of_strategy_and_of_training():
    programs = [generate(seed) for seed in QUICK]
    assert {program.strategies[0].rpartition("_")[0] for program in programs} == {
        name.rpartition("_")[0] for name in STRATEGIES}
    for field, expected in (("library", {"linen", "nnx"}), ("form", set(FORMS)),
                            ("weights", {"none", "sample_weight", "class_weight"})):
        assert {getattr(program, field) for program in programs} == expected
    assert any("microbatches" in program.options for program in programs)
    assert any(is_replicated(program) for program in programs)
    assert any(draws(program) for program in programs)  # which is partitioned
    assert {program.step == "default" for program in programs} == {True, False}
    assert {len(set(program.sizes)) == 1 for program in programs} == {True, False}


def test_all_programs_have_each_loss_and_each_strategy():
    programs = [generate(seed) for seed in ALL]
    assert {(program.task, program.loss) for program in programs} == {*GOALS, *ORDINARY_GOALS}
    assert {name for program in programs for name in program.strategies} == set(STRATEGIES)
    assert {program.strategies[0] for program in programs[:len(FEW)]} == set(STRATEGIES)


# What the quick part must find: a program of the kind that each error concerns differs with it, and not without.

def without_collectives(monkeypatch):
    monkeypatch.setattr(collectives, "_sums", lambda arrays, axis_name, packs: arrays)


def with_repeated_rows(monkeypatch):
    one_batch = StepFunctions._one_batch
    monkeypatch.setattr(StepFunctions, "_one_batch", lambda self, rows, state, batch: one_batch(
        self, steps.rows_of(batch), state, batch))


def with_keys_by_devices(monkeypatch):
    monkeypatch.setattr(PartitionedContext, "random_key", lambda self, seed, stream, step: stream_key(
        seed, stream, step, self._strategy.mesh.size))


def is_plain(program):
    return program.seed % 4 == 0 and program.sizes[0] % 8 == 0


def is_uneven(program):
    return program.sizes[-1] % 8 != 0 and program.form == "arrays"


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("plant", "concerns"), [
    (without_collectives, is_plain), (with_repeated_rows, is_uneven), (with_keys_by_devices, draws)])
def test_a_planted_error_is_found(plant, concerns, monkeypatch):
    program = next(program for program in map(generate, ALL) if concerns(program)
                   and difference(program, [STRATEGIES["mirrored_8"]]) is None)
    plant(monkeypatch)
    assert difference(program, [STRATEGIES["mirrored_8"]]) is not None
