"""The cluster in the environment: TF_CONFIG, Open MPI, SLURM, or a cluster that JAX detects.

Owns the rules of TF_CONFIG, which are all checked before any network call. Must not know JAX: it opens no connection
and starts nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from trainer.core import errors
from trainer.distribute.cluster.description.cluster_description import (
    ClusterDescription,
    ClusterError,
    is_loopback,
    normal_form,
    split_address,
)
from trainer.distribute.cluster.description.open_mpi import in_open_mpi, open_mpi_cluster
from trainer.distribute.cluster.description.slurm import in_slurm, slurm_cluster

VARIABLE = "TF_CONFIG"
ROLES = ("chief", "worker", "ps", "evaluator")
TRAINING_ROLES = ("chief", "worker")  # in the order of their process numbers
EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
MAX_SHOWN = 60  # characters of a value, in a message


class TFConfigClusterResolver:
    """The cluster that TF_CONFIG describes, and this process's place in it.

    TF_CONFIG is JSON, as in TensorFlow:
    `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`. Roles are "chief" (at most
    a single process), "worker", "ps" and "evaluator". Chief and workers train together: process 0 is the chief, or
    worker 0 without a chief.

    An evaluator is not part of the cluster, as in TensorFlow's guide: its own TF_CONFIG has the training cluster and
    the task {"type": "evaluator", "index": 0}. An "evaluator" list inside of "cluster" is an error, because the other
    processes would wait for it.

    Args:
      tf_config: text of TF_CONFIG, or the parsed object. None reads the environment variable.

    Attributes:
      task_type: role of this process.
      task_id: index among the processes of its role.
      environment: TF_CONFIG's "environment", or "".

    Raises:
      ClusterError: if TF_CONFIG is not set, or has any error that is detectable without the network.

    Example:
      >>> resolver = TFConfigClusterResolver({"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
      ...                                     "task": {"type": "worker", "index": 1}})
      >>> resolver.num_workers, resolver.process_id, resolver.coordinator_address, resolver.is_chief
      (3, 2, 'a:2222', False)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    def __init__(self, tf_config: str | Mapping[str, Any] | None = None):
        if tf_config is None:
            tf_config = os.environ.get(VARIABLE)
            if tf_config is None:
                raise _error(f"is not set. Set it, such as {VARIABLE}='{EXAMPLE}'")
        config = _parsed(tf_config) if isinstance(tf_config, str) else tf_config
        if not isinstance(config, Mapping):
            raise _error(f"must be a JSON object. Received: {_kind(config)}. Expected: {EXAMPLE}")
        self._cluster = _checked_cluster(config)
        self.task_type, self.task_id = _checked_task(config, self._cluster)
        environment = config.get("environment", "")
        self.environment = environment if isinstance(environment, str) else ""

    def cluster_spec(self) -> dict[str, list[str]]:
        """Returns the addresses of each role, as listed in TF_CONFIG."""
        return {role: list(addresses) for role, addresses in self._cluster.items()}

    @property
    def num_workers(self) -> int:
        """Number of processes that train together: the chief and the workers."""
        return len(_trainers(self._cluster))

    @property
    def process_id(self) -> int | None:
        """Number of this process among the training processes, the chief first; None for "ps" and "evaluator"."""
        if self.task_type not in TRAINING_ROLES:
            return None
        return self.task_id + (len(self._cluster.get("chief", ())) if self.task_type == "worker" else 0)

    @property
    def coordinator_address(self) -> str:
        """Address of process 0."""
        return _trainers(self._cluster)[0][1]

    @property
    def is_chief(self) -> bool:
        """Whether this is process 0, which writes shared files."""
        return self.process_id == 0

    def description(self) -> ClusterDescription:
        """Returns the processes that train together."""
        names, addresses = zip(*_trainers(self._cluster), strict=True)
        return ClusterDescription(addresses, self.process_id, self.task_type, names)


def resolve_cluster() -> ClusterDescription | None:
    """Returns the cluster of TF_CONFIG, or else of Open MPI or SLURM; None without any of them.

    A TF_CONFIG that is set but empty is an error, because each process would otherwise silently train alone.

    Raises:
      ClusterError: if TF_CONFIG or the variables of Open MPI or SLURM are wrong.
    """
    if VARIABLE in os.environ:
        return TFConfigClusterResolver().description()
    kind = detect_cluster()
    if kind == "ompi":
        return open_mpi_cluster()
    return slurm_cluster() if kind == "slurm" else None


def detect_cluster() -> str | None:
    """Returns the kind of cluster that `jax.distributed.initialize()` would detect, or None.

    JAX has no public function for this, so the same environment variables are checked in the same order. Nothing is
    started and no network is used; a Cloud TPU's metadata server, which JAX queries, is therefore assumed to answer.
    JAX detects Open MPI 5 from version 0.12 on.

    Returns:
      JAX's name for the cluster: "ompi", "slurm", "gketpu", "gcetpu" or "k8s".

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
    """
    return next((name for name, is_here in _JAX_CLUSTERS.items() if is_here()), None)


def _on_tpu() -> bool:
    return _has_package("libtpu") and any(os.path.exists(path) for path in TPU_DEVICES)


def _in_gke_tpu() -> bool:
    names = ("TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    return any(name in os.environ for name in names) and _on_tpu()


def _in_cloud_tpu() -> bool:
    return "TPU_SKIP_MDS_QUERY" not in os.environ and _on_tpu()


def _in_kubernetes() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and _has_package("kubernetes")


_JAX_CLUSTERS: dict[str, Callable[[], bool]] = {  # in JAX's order
    "ompi": in_open_mpi, "slurm": in_slurm, "gketpu": _in_gke_tpu, "gcetpu": _in_cloud_tpu, "k8s": _in_kubernetes}


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _error(text: str) -> ClusterError:
    return ClusterError(f"{VARIABLE} {text}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number",
            dict: "an object", type(None): "null"}.get(type(value), f"a value of type {type(value).__name__}")


def _parsed(text: str) -> Any:
    if not text.strip():
        raise _error(f"is set but empty, which is not JSON. Unset it to train in one process, or set {EXAMPLE}")
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 10):error.pos + 20]
        raise _error(f"is not JSON: {error.msg} at character {error.pos}, near {near!r}. Keys and strings need double "
                     f"quotes. Expected: {EXAMPLE}") from None
    except RecursionError:
        raise _error(f"is not JSON of this form: it is nested too deeply. Expected: {EXAMPLE}") from None
    except ClusterError:
        raise
    except ValueError:  # Python has a limit for the digits of a number
        raise _error(f"is not JSON of this form: it has a number of too many digits. Expected: {EXAMPLE}") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _error(f"has the key {_shown(key)} twice in one object. Keep one of them.")
        result[key] = value
    return result


def _required(config: Mapping[str, Any], key: str, where: str, example: str) -> Any:
    if key not in config:
        found = ", ".join(_shown(name) for name in config) or "nothing"
        raise _error(f"has no {where!r}. Received only: {found}. Add {example}.")
    return config[key]


def _unknown_role(where: str, role: object) -> ClusterError:
    if not isinstance(role, str):
        return _error(f"has {_kind(role)} as {where}. Expected one of: {', '.join(ROLES)}.")
    if role.lower() == "master":  # TensorFlow 1's name, which does not look like the new one
        return _error(f"has the {where} {role!r}. It is called 'chief' now.")
    unknown = errors.unknown_name(where, role[:MAX_SHOWN], ROLES)
    return _error(f"has a task type that does not exist: {unknown}")


def _checked_cluster(config: Mapping[str, Any]) -> dict[str, list[str]]:
    cluster = _required(config, "cluster", "cluster", '"cluster": {"worker": ["host:port", ...]}')
    if not isinstance(cluster, Mapping):
        raise _error(f"has {_kind(cluster)} as 'cluster'. Expected an object such as "
                     '{"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}.')
    for role, addresses in cluster.items():
        if role not in ROLES:
            raise _unknown_role("role in 'cluster'", role)
        if role == "evaluator":
            raise _error("has 'evaluator' in 'cluster'. An evaluator is not part of the training cluster. Remove the "
                         'list; the evaluator\'s own TF_CONFIG has "task": {"type": "evaluator", "index": 0}.')
        if not isinstance(addresses, list):
            raise _error(f"has {_kind(addresses)} as the cluster's {role!r}. Expected a list of \"host:port\".")
        if not addresses:
            raise _error(f"has an empty list as the cluster's {role!r}. List its addresses, or remove {role!r}.")
        for index, address in enumerate(addresses):
            _check_address(role, index, address)
    if not any(role in cluster for role in TRAINING_ROLES):
        raise _error("has a cluster without 'chief' and 'worker'. List at least one, such as "
                     '{"worker": ["10.0.0.1:2222"]}.')
    if len(cluster.get("chief", ())) > 1:
        raise _error(f"lists {len(cluster['chief'])} chiefs. A cluster has at most one: list the others as 'worker'.")
    _check_together(cluster)
    return {role: list(addresses) for role, addresses in cluster.items()}


def _check_address(role: str, index: int, address: object) -> None:
    if not isinstance(address, str):
        raise _error(f"has {_kind(address)} as the address of {role} {index}. Expected a string \"host:port\".")
    try:
        split_address(address)
    except ClusterError as error:
        raise _error(f"has a wrong address of {role} {index}: {error}") from None


def _check_together(cluster: Mapping[str, list[str]]) -> None:
    """Raises for valid addresses that conflict with each other."""
    owners: dict[tuple[str, int], str] = {}
    loopback: list[str] = []
    others: list[str] = []
    for role, addresses in cluster.items():
        for index, address in enumerate(addresses):
            owner = f"{role} {index}"
            first = owners.setdefault(normal_form(address), owner)
            if first != owner:
                raise _error(f"gives {address!r} to both {first} and {owner}. Each process needs an address of its "
                             "own: change the host or the port of one of them.")
            (loopback if is_loopback(split_address(address)[0]) else others).append(f"{owner} ({address})")
    if loopback and others:
        raise _error(f"mixes addresses that only their own machine reaches with others: {loopback[0]} and {others[0]}. "
                     "Write the host's name or IP address instead of the loopback address.")


def _checked_task(config: Mapping[str, Any], cluster: Mapping[str, list[str]]) -> tuple[str, int]:
    example = '"task": {"type": "worker", "index": 0}'
    task = _required(config, "task", "task", example)
    if not isinstance(task, Mapping):
        raise _error(f"has {_kind(task)} as 'task'. Expected {example}.")
    role = _required(task, "type", "task.type", f"one of: {', '.join(ROLES)}")
    if role not in ROLES:
        raise _unknown_role("task.type", role)
    index = _required(task, "index", "task.index", "the process's place in its role's list, from 0")
    if not isinstance(index, int) or isinstance(index, bool):
        hint = " Write it without quotes." if isinstance(index, str) else ""
        raise _error(f"has {_kind(index)} as task.index. Expected a whole number. Received: {_shown(index)}.{hint}")
    if role != "evaluator" and role not in cluster:
        raise _error(f"has the task.type {role!r}, but its cluster lists only: {', '.join(cluster)}. "
                     f"Add a list {role!r} to 'cluster', or change task.type.")
    count = 1 if role == "evaluator" else len(cluster[role])
    if not 0 <= index < count:
        expected = "must be 0" if count == 1 else f"must be from 0 to {count - 1}"
        raise _error(f"has the task.index {_shown(index)}, which {expected}: the number of {role!r} tasks is {count}.")
    return role, index


def _trainers(cluster: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Returns name and address of all training processes, in the order of their process numbers."""
    return [("chief" if role == "chief" else f"{role} {index}", address)
            for role in TRAINING_ROLES for index, address in enumerate(cluster.get(role, ()))]
