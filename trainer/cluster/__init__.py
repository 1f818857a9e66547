"""The processes of a job: which there are, how they meet, how they agree, and how the end of a process is noticed.

Owns all communication between processes that uses no devices. It must not run collectives, nor know of models, data or
strategies. Other rooms use what is exported here, and nothing else.
"""

from trainer.cluster.description.cluster_description import ClusterError, ClusterTimeout, split_address
from trainer.cluster.description.cluster_resolver import VARIABLE as TF_CONFIG
from trainer.cluster.description.cluster_resolver import TFConfigClusterResolver, detect_cluster, resolve_cluster
from trainer.cluster.description.package_versions import package_versions
from trainer.cluster.liveness.process_end import PEER_LOST
from trainer.cluster.liveness.watchdog import waiting, watchdog
from trainer.cluster.membership import cluster_devices, join_cluster
from trainer.cluster.preemption import reached_preemption_sync_point
from trainer.cluster.process_group import ProcessGroup

__all__ = ["PEER_LOST", "TF_CONFIG", "ClusterError", "ClusterTimeout", "ProcessGroup", "TFConfigClusterResolver",
           "cluster_devices", "detect_cluster", "join_cluster", "package_versions", "reached_preemption_sync_point",
           "resolve_cluster", "split_address", "waiting", "watchdog"]
