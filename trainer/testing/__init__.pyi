from trainer.testing.crashes import Kill as Kill, assert_resumes_exactly as assert_resumes_exactly, kill_at as kill_at
from trainer.testing.local_cluster import LocalCluster as LocalCluster, WorkerError as WorkerError
from trainer.testing.strategies_equal import assert_strategies_equal as assert_strategies_equal
