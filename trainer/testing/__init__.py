"""Helpers for tests of custom training code: equal results under every strategy, and after every crash."""

from trainer.testing.crashes import Kill, assert_resumes_exactly, kill_at
from trainer.testing.local_cluster import LocalCluster, WorkerError
from trainer.testing.strategies_equal import assert_strategies_equal

__all__ = ["Kill", "LocalCluster", "WorkerError", "assert_resumes_exactly", "assert_strategies_equal", "kill_at"]
