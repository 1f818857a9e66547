"""Functions that a coordinator schedules: they run under the caller's JAX options, and in the strategy's scope."""

from __future__ import annotations

import jax
import pytest

from tests.support.inline_cluster import InlineEngine, InlineStrategy
from trainer.distribute import MirroredStrategy, ParameterServerStrategy, get_strategy, has_strategy
from trainer.distribute.parameter_server import strategy as strategy_module
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator


def around():
    return type(get_strategy()).__name__, has_strategy(), jax.config.jax_numpy_rank_promotion


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.setattr(strategy_module, "LocalProcesses", InlineEngine)
    with ParameterServerStrategy(num_workers=1, num_ps=1) as made:
        yield made


def test_a_function_runs_in_the_scope_in_which_it_was_scheduled(strategy):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope(), jax.numpy_rank_promotion("raise"):
        inside = coordinator.schedule(around)
    outside = coordinator.schedule(around)
    assert inside.fetch() == ("WorkerStrategy", True, "raise")
    assert outside.fetch() == ("Strategy", False, "allow")


def test_a_function_that_asks_for_another_strategy_is_refused(devices):
    coordinator = InlineStrategy()._coordinator
    with MirroredStrategy(devices[:2]).scope():
        coordinator.schedule(around)
    with pytest.raises(RuntimeError, match=r"where MirroredStrategy.* is in scope.*pass it as an argument"):
        coordinator.join()
    coordinator.close()
