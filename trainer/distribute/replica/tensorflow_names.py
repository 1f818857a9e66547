"""Names of `tf.distribute` that `trainer.distribute` lacks, and their replacements.

Owns these rows of the table in docs/strategies.md#from-tfdistribute, for the errors of packages and strategies.
"""

from __future__ import annotations

# : The replacements, by the name below `tf.distribute`.
MISSING = {
    "Strategy.cluster_resolver": "`TFConfigClusterResolver()`; `strategy.is_chief` is True where files are written",
    "Strategy.extended": "variables are plain arrays in a state, and need no hooks",
    "Strategy.experimental_run_v2": "`Strategy.run`, its new name",
    "StrategyExtended": "variables are plain arrays in a state, and need no hooks",
    "TPUStrategy.experimental_assign_to_logical_device": "`ModelParallelStrategy` splits by rules",
    "TPUStrategy.experimental_split_to_logical_devices": "`ModelParallelStrategy` splits by rules",
    "TPUStrategy.experimental_replicate_to_logical_devices": "`ModelParallelStrategy` splits by rules",
    "experimental_set_strategy": "a strategy ends with its `scope`",
    "ReplicaContext.merge_call": "a compiled step has no code outside of the replicas; use `all_reduce`",
    "ReplicaContext.strategy": "`get_strategy`, inside the strategy's scope",
    "ReplicaContext.devices": "the compiler places the computation of a replica",
    "DistributedIterator": "`iter(dataset)` is a plain Python iterator",
    "DistributedValues": "`PerReplica`, its name here",
    "InputOptions": "leave it out: batches are always prefetched to the devices",
    "InputReplicationMode": "leave it out: there is one input pipeline per process",
    "RunOptions": "leave it out: XLA compiles every step, with static shapes",
    "Server": "JAX has no servers: each process runs the script",
    "cluster_resolver.ClusterResolver": "`TFConfigClusterResolver`; other clusters are found without a resolver",
    "cluster_resolver.SimpleClusterResolver": '`TFConfigClusterResolver({"cluster": ..., "task": ...})` takes a dict',
    "cluster_resolver.SlurmClusterResolver": "leave it out: the tasks of a step of SLURM are found without it",
    "cluster_resolver.KubernetesClusterResolver": "leave it out: JAX detects Kubernetes by itself",
    "cluster_resolver.GCEClusterResolver": "set `TF_CONFIG`",
    "cluster_resolver.TPUClusterResolver": "leave it out: JAX finds the slice by itself",
    "cluster_resolver.UnionResolver": "clusters are not joined: give one resolver",
    "coordinator.PerWorkerValue": "an iterator of a per-worker dataset is an argument as it is",
    "coordinator.experimental_get_current_worker_index": "`strategy.worker_index` in a scheduled function",
    "experimental.coordinator": "`coordinator`, without `experimental`",
    "experimental.rpc": "use an RPC library",
    "experimental.PreemptionCheckpointHandler": "`trainer.callbacks.BackupAndRestore` saves on SIGTERM, and resumes",
    "experimental.PreemptionWatcher": "`trainer.callbacks.BackupAndRestore` saves on SIGTERM, and resumes",
    "experimental.TerminationConfig": "`trainer.callbacks.BackupAndRestore` saves on SIGTERM, and resumes",
}


def missing(owner: str = "") -> dict[str, str]:
    """Returns sentences about the names that a module or class of `tf.distribute` has and its counterpart lacks.

    >>> missing("cluster_resolver")["GCEClusterResolver"]
    'Instead of `tf.distribute.cluster_resolver.GCEClusterResolver`: set `TF_CONFIG`.'
    """
    found = {}
    for full, instead in MISSING.items():
        of, _, name = full.rpartition(".")
        if of == owner:
            found[name] = f"Instead of `tf.distribute.{full}`: {instead}."
    return found
