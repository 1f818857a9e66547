"""Processes of a job: their addresses, their meeting, their agreement, and the detection of ended processes.

Owns all communication between processes that uses no devices. It must not run collectives, nor know of models, data or
strategies. Other rooms use only the names that are exported here.

The life of a connection, of which each process has one to process 0:

    hello -> waiting* -> go | failed        the meeting: `agree`, before JAX starts
    report* of (step, phase)                heartbeats: `Watchdog`, while JAX starts ("start") and trains
    report with a diagnosis, or "stopped"   the last word of a process that fails, or whose script ends
    end of the connection                   without a last word, the process has died

Only process 0 hears all processes, so only it judges: it names the cause, and all leave with its diagnosis. The others
judge process 0. If a script has started JAX itself, the meeting follows later, at a port that a `ProcessGroup`
announces. JAX's key-value store serves only `ProcessGroup`: the texts that processes compare, and the decisions they
agree on.
"""

from trainer.distribute.cluster.description.cluster_description import ClusterError, ClusterTimeout, split_address
from trainer.distribute.cluster.description.cluster_resolver import VARIABLE as TF_CONFIG
from trainer.distribute.cluster.description.cluster_resolver import (
    TFConfigClusterResolver,
    detect_cluster,
    resolve_cluster,
)
from trainer.distribute.cluster.description.package_versions import package_versions
from trainer.distribute.cluster.liveness.process_end import PEER_LOST
from trainer.distribute.cluster.liveness.watchdog import waiting
from trainer.distribute.cluster.membership import cluster_devices, join_cluster
from trainer.distribute.cluster.preemption import reached_preemption_sync_point
from trainer.distribute.cluster.process_group import ProcessGroup
from trainer.distribute.cluster.rendezvous.connection import Connection, NotOurs, ready
from trainer.distribute.cluster.rendezvous.join import connect, why_unreachable
from trainer.distribute.cluster.rendezvous.listen import accepted
from trainer.distribute.cluster.rendezvous.wait import Wait

__all__ = ["PEER_LOST", "TF_CONFIG", "ClusterError", "ClusterTimeout", "Connection", "NotOurs", "ProcessGroup",
           "TFConfigClusterResolver", "Wait", "accepted", "cluster_devices", "connect", "detect_cluster",
           "join_cluster", "package_versions", "reached_preemption_sync_point", "ready", "resolve_cluster",
           "split_address", "waiting", "why_unreachable"]
