"""Every strategy gives one device's numbers, whatever trains under it, and keeps the state where it says.

`strategy_cases.py` says which combinations are tried.
"""

from __future__ import annotations

import itertools

import pytest

from tests import strategy_cases
from tests.strategy_cases import CASES, STRATEGIES
from trainer.testing import assert_strategies_equal

TOLERANCES = {"bfloat16": {"rtol": 2e-2, "atol": 2e-3}}


@pytest.mark.parametrize(("case", "names"), CASES.items(), ids=map(str, CASES))
def test_every_strategy_gives_one_devices_numbers(case, names):
    assert_strategies_equal(
        case.build, case.data, [STRATEGIES[name] for name in names], batch_size=strategy_cases.BATCH_SIZE,
        epochs=strategy_cases.EPOCHS, train=case.train_by_hand if case.way == "loop" else None,
        evaluate=case.option == "sample_weights", predict=case.option == "plain",
        **TOLERANCES.get(case.option, {}))
