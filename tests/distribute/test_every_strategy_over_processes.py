"""Strategies whose devices are those of several processes give one device's numbers, whatever trains under them.

All cases, which are those of `strategy_cases.py`, run in one cluster of two processes with two devices each, and in one
test: each start takes seconds, and test runners in parallel would each start their own.
"""

from __future__ import annotations

import inspect
import traceback

import jax
import numpy as np
import pytest

from tests.distribute.test_every_strategy import TOLERANCES
from tests.support import strategy_cases
from tests.support.strategy_cases import ONE_PROCESS, SEVERAL_PROCESSES
from trainer import distribute
from trainer.testing import LocalCluster, assert_strategies_equal

pytestmark = pytest.mark.processes

CASES = {str(case): case for case in strategy_cases.cases_over_processes()}
PARTS = [list(CASES)[::2], pytest.param(list(CASES)[1::2], marks=pytest.mark.exhaustive)]
PROCESSES, DEVICES = 2, 2
TIMEOUT_SECS = 600.0  # for a busy machine


def trained_on_one_device(case):
    """Returns the weights that a case gives on one device of this process."""
    with distribute.OneDeviceStrategy().scope():
        model = case.build()
        model.fit(*case.data, batch_size=case.batch_size, epochs=strategy_cases.EPOCHS, verbose=0)
    return model.get_weights()


def train_apart(strategy, model, data):
    """Trains, and lets this process have weights that differ from those of the others by less than is tolerated."""
    logs = model.fit(*data, verbose=0).history
    if strategy.num_replicas_in_sync > 1:
        own = np.float32(1 + 1e-6 * jax.process_index())
        model.state = model.state.replace(params=jax.tree.map(lambda leaf: own * np.asarray(leaf), model.state.params))
    return logs


def failure_of_processes_apart(case, strategy):
    """Returns what is said of weights that should be equal in all processes and are not."""
    with pytest.raises(AssertionError) as raised:
        assert_strategies_equal(case.build, case.data, [strategy], train=train_apart, evaluate=False, predict=False)
    return str(raised.value)


def compare(names):
    """Compares every strategy over the processes with one device, in each case; returns what one process found."""
    strategies = {name: make() for name, make in SEVERAL_PROCESSES.items()}
    failures = {}
    for name in names:
        case = CASES[name]
        try:
            assert_strategies_equal(
                case.build, case.data, list(strategies.values()), batch_size=case.batch_size,
                epochs=strategy_cases.EPOCHS, train=case.train_by_hand if case.way == "loop" else None,
                evaluate=case.option == "sample_weights", predict=case.option == "plain",
                **TOLERANCES.get(case.option, {}))
        except Exception:
            failures[name] = traceback.format_exc()
    return {
        "processes": jax.process_count(), "devices": (len(jax.local_devices()), len(jax.devices())),
        "spans all": {name: len(strategy.mesh.devices.flat) == len(jax.devices())
                      for name, strategy in strategies.items()},
        "chiefs": [strategy.is_chief for strategy in strategies.values()],
        "local replicas": {name: strategy.local_replicas for name, strategy in strategies.items()},
        "failures": failures,
        "apart": failure_of_processes_apart(CASES[names[0]], strategies["multi_worker"]),
        "one device": trained_on_one_device(CASES[names[0]]),
    }


def test_each_strategy_meets_each_option_way_library_and_kind_of_last_batch():
    everything = {(field, value) for case in strategy_cases.CASES for field, value in vars(case).items()}
    assert {(field, value) for case in CASES.values() for field, value in vars(case).items()} == everything


def test_all_strategies_are_tried_or_cannot_span_processes():
    def classes(strategies):
        return {type(strategy()).__name__ for strategy in strategies}

    exported = {name: getattr(distribute, name) for name in distribute.__all__}
    known = {name for name, value in exported.items()
             if inspect.isclass(value) and issubclass(value, distribute.Strategy) and value is not distribute.Strategy}
    # In this process alone, the shapes of their meshes do not fit.
    makers = [make for name, make in SEVERAL_PROCESSES.items()
              if not name.startswith("model_") and name not in ("hybrid", "sharded_model")]
    spanning = classes(makers) | {"ModelParallelStrategy"}
    assert spanning | ONE_PROCESS.keys() == known, "say in SEVERAL_PROCESSES or ONE_PROCESS if it spans processes"
    assert not spanning & ONE_PROCESS.keys()


def assert_processes_train_together(one):
    """The process sees the devices of all, and every strategy has them."""
    assert (one["processes"], one["devices"]) == (PROCESSES, (DEVICES, PROCESSES * DEVICES))
    assert one["spans all"] == dict.fromkeys(SEVERAL_PROCESSES, True)
    assert one["local replicas"] == {
        **dict.fromkeys(SEVERAL_PROCESSES, DEVICES), "model_parallel": 1, "sharded_model": 1}


def assert_same_on_one_device(one, case):
    """What strategies are compared with is what a process that is alone gives."""
    for ours, theirs in zip(one["one device"], trained_on_one_device(case), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def assert_processes_apart_are_found(one):
    """Weights that differ between processes do not pass."""
    first, *lines = one["apart"].splitlines()
    assert first.startswith("MultiWorkerMirroredStrategy(") and len(lines) == 4
    assert all(line.endswith("differs between devices that should hold copies of it.") for line in lines)
    assert "weight 'Dense_0/kernel' differs" in one["apart"]


@pytest.mark.parametrize("names", PARTS)
def test_every_strategy_over_processes_gives_one_devices_numbers(names):
    found = LocalCluster(PROCESSES, DEVICES, TIMEOUT_SECS).run(compare, names)
    assert [one["chiefs"] for one in found] == [
        [process == 0] * len(SEVERAL_PROCESSES) for process in range(PROCESSES)]
    for one in found:
        assert_processes_train_together(one)
        assert_same_on_one_device(one, CASES[names[0]])
        assert_processes_apart_are_found(one)
    failures = [f"{name} in process {process}:\n{text}"
                for process, one in enumerate(found) for name, text in one["failures"].items()]
    assert not failures, "\n".join(failures)
