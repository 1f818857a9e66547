"""Every strategy gives one device's numbers, whatever trains under it, and keeps the state where it says.

`strategy_cases.py` says which combinations are tried.
"""

from __future__ import annotations

import itertools

import pytest

from tests import strategy_cases
from tests.strategy_cases import CASES, STRATEGIES, Case, applies, pairs_of
from trainer.testing import assert_strategies_equal

TOLERANCES = {"bfloat16": {"rtol": 2e-2, "atol": 2e-3}}


def test_each_pair_of_factors_occurs():
    everything = [Case(option, way, library, is_even) for option, way, library, is_even in itertools.product(
        strategy_cases.OPTIONS, strategy_cases.WAYS, strategy_cases.NETS, (True, False)) if applies(option, way)]
    possible = {pair for case in everything for name in STRATEGIES for pair in pairs_of(case, name)}
    assert possible == {pair for case, names in CASES.items() for name in names for pair in pairs_of(case, name)}


@pytest.mark.parametrize(("case", "names"), CASES.items(), ids=map(str, CASES))
def test_every_strategy_gives_one_devices_numbers(case, names):
    assert_strategies_equal(
        case.build, case.data, [STRATEGIES[name] for name in names], batch_size=case.batch_size,
        epochs=strategy_cases.EPOCHS, train=case.train_by_hand if case.way == "loop" else None,
        evaluate=case.option == "sample_weights", predict=case.option == "plain",
        **TOLERANCES.get(case.option, {}))
