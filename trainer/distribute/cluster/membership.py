"""Joins the processes of a cluster to a single JAX program, once per process.

Owns the start of JAX's distributed runtime and the end of a failed process. The description of the cluster, and the
equal start of its processes, are checked before any call of JAX. The connections of this check remain, for the
watchdogs.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from trainer.core.ambient.jax_options import jax_config
from trainer.core.errors import see
from trainer.distribute.cluster.description.cluster_description import (
    ClusterDescription,
    ClusterError,
    is_loopback,
    split_address,
)
from trainer.distribute.cluster.description.cluster_resolver import (
    TFConfigClusterResolver,
    detect_cluster,
    resolve_cluster,
)
from trainer.distribute.cluster.description.process_names import process_name, set_process_names
from trainer.distribute.cluster.jax_runtime import coordinator_address
from trainer.distribute.cluster.liveness.process_end import FAILED, PEER_LOST, REFUSED
from trainer.distribute.cluster.liveness.watchdog import (
    DEFAULT_TIMEOUT_SECS,
    Watchdog,
    is_peer_error,
    set_watchdog,
    watchdog,
)
from trainer.distribute.cluster.process_group import ProcessGroup
from trainer.distribute.cluster.rendezvous.listen import bind_all, close_all
from trainer.distribute.cluster.rendezvous.rendezvous import agree
from trainer.distribute.cluster.rendezvous.star import Star
from trainer.distribute.cluster.workarounds import put_off_aborts, threads_that_wait_their_turn

_HEARTBEAT_SECS = 60
_SHUTDOWN_SECS = 3600  # the chief may have late work, such as a checkpoint, that must not abort processes that are done
_LINGER_SECS = 2.0  # for the others to print their errors: the end of process 0 aborts them
_DIAGNOSIS_SECS = 1.0  # for the end of another process, and its consequences, to be noticed
_MEETING_SECS = 30.0  # of processes that are all there


def join_cluster(timeout_secs: float | None = None, resolver: TFConfigClusterResolver | None = None) -> None:
    """Joins this process's cluster, so that JAX sees all its devices; does nothing outside of a cluster.

    The cluster is described by TF_CONFIG, Open MPI or SLURM, or detected by JAX (Kubernetes, TPU). A watchdog then
    monitors its processes. May be called again; later limits are ignored.

    Args:
      timeout_secs: seconds to wait for the other processes, now and during training; None for the default.
      resolver: the cluster, instead of the detected cluster.

    Raises:
      ClusterError: if the description of the cluster is wrong, the processes were started with different clusters, jobs
        or versions, their CPU devices cannot reach each other, or this process has joined another cluster than the
        resolver's. If the error is not caught, the exit code is 2.
      ClusterTimeout: if processes are missing; the message names them.
      RuntimeError: if JAX has used its devices already.
    """
    timeout_secs = timeout_secs or DEFAULT_TIMEOUT_SECS
    try:
        if not jax.distributed.is_initialized():
            _join(timeout_secs, resolver)
        elif resolver is not None:
            _check_joined(resolver)
        if watchdog() is None and jax.distributed.is_initialized() and jax.process_count() > 1:
            star = _star_over_jax()
            if star is not None:
                _begin(Watchdog(timeout_secs, star), star)
    except ClusterError:
        if getattr(sys.excepthook, "func", None) is not _exit_if_refused:
            sys.excepthook = functools.partial(_exit_if_refused, sys.excepthook)
        raise


def _check_joined(resolver: TFConfigClusterResolver) -> None:
    joined = jax.process_index(), jax.process_count()
    if (resolver.process_id, resolver.num_workers) != joined:
        raise ClusterError(
            f"`cluster_resolver` says that this process is number {resolver.process_id} of {resolver.num_workers}, but "
            f"it has joined a cluster already, as number {joined[0]} of {joined[1]}. Give the first strategy this "
            "resolver.")


def _join(timeout_secs: float, resolver: TFConfigClusterResolver | None = None) -> None:
    description = resolve_cluster() if resolver is None else resolver.description()
    if description is None and (kind := detect_cluster()) is not None:
        from trainer.distribute.cluster.description.detected_cluster import detected_cluster

        try:
            description = detected_cluster(kind, timeout_secs)
        except ImportError:
            _initialize(initialization_timeout=math.ceil(timeout_secs))
    if description is None:
        return
    if description.process_id is None:
        advice = ("To evaluate the training's checkpoints, use `trainer.SidecarEvaluator` under a strategy "
                  "of one process, such as `MirroredStrategy`." if description.role == "evaluator" else
                  "Run it without `MultiWorkerMirroredStrategy`.")
        raise ClusterError(f"TF_CONFIG says that this process is the {description.role!r}, which does not train. "
                           f"{advice}")
    if description.num_processes == 1:
        return
    _check_unused()  # before the others count on this process
    star = agree(description, timeout_secs)
    set_process_names([description.name(number) for number in range(description.num_processes)])
    watching = Watchdog(timeout_secs, star)
    try:
        _initialize(initialization_timeout=2 * math.ceil(timeout_secs), **_jax_options(description))
    except BaseException as error:
        cause = RuntimeError(star.unconnected) if star.unconnected and "gloo" in str(error) else error
        if isinstance(cause, Exception):
            watching.await_diagnosis(_DIAGNOSIS_SECS)  # it may be that another process has ended
        watching.fail(cause)
        if not jax.distributed.is_initialized():  # else JAX would abort this process when the others have ended
            watching.stop()
        if cause is not error:
            raise cause from error
        raise
    _begin(watching, star)


def _jax_options(description: ClusterDescription) -> dict[str, Any]:
    """Returns JAX's options for a cluster."""
    address = description.coordinator_address
    options: dict[str, Any] = {
        "coordinator_address": address, "num_processes": description.num_processes,
        "process_id": description.process_id, "cluster_detection_method": "deactivate"}  # it might find another one
    if is_loopback(split_address(address)[0]):  # by default, JAX's coordinator listens on all interfaces
        options["coordinator_bind_address"] = address
    if description.local_id is not None and not os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        options["local_device_ids"] = [description.local_id]
    return options


def _begin(watching: Watchdog, star: Star) -> None:
    """Tells the watchdog that JAX has started."""
    watching.started()
    set_watchdog(watching)
    if star.unconnected and _uses_gloo():
        raise ClusterError(star.unconnected)


def _star_over_jax() -> Star | None:
    """Returns the connections of processes that JAX has started without the trainer; None behind a firewall."""
    group, host = ProcessGroup.of_all(), split_address(coordinator_address())[0]
    listeners = bind_all(host if is_loopback(host) else "", 0) if group.index == 0 else []
    close_all(listeners[1:])  # "localhost" may be two addresses, and each has a port of its own
    port = listeners[0].getsockname()[1] if listeners else 0
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address, job_id = json.loads(group.all_gather(json.dumps([address, secrets.token_hex(16)]), "meeting")[0])
    description = ClusterDescription(
        (address, *[""] * (group.count - 1)), group.index, source="call of `jax.distributed.initialize`",
        names=tuple(map(process_name, range(group.count))))
    try:
        return agree(description, _MEETING_SECS, job_id=job_id, listeners=listeners[:1])
    except TimeoutError as error:
        warnings.warn(f"Nothing notices it when a process ends or stalls, as not all of them can meet. {error}",
                      stacklevel=2)
        return None


def _uses_gloo() -> bool:
    return jax.default_backend() == "cpu" and jax_config.jax_cpu_collectives_implementation == "gloo"


def cluster_devices(
    timeout_secs: float | None = None, resolver: TFConfigClusterResolver | None = None
) -> list[jax.Device]:
    """Returns all devices of this process's cluster, which it joins; outside of a cluster, its own devices.

    Args:
      timeout_secs: see `join_cluster`.
      resolver: see `join_cluster`.
    """
    join_cluster(timeout_secs, resolver)
    return list(jax.devices() if jax.process_count() > 1 else jax.local_devices())


def _initialize(**options: Any) -> None:
    put_off_aborts()
    before, sys.excepthook = sys.excepthook, _exit_at_once  # at a normal exit, this process would wait for the others
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=_HEARTBEAT_SECS, shutdown_timeout_seconds=_SHUTDOWN_SECS, **options)
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        sys.excepthook = before
        raise _too_late(error) from None  # the message has the text of the JAX error
    with threads_that_wait_their_turn(_uses_gloo):
        jax.devices()  # at once: the processes wait for each other in it


def _check_unused() -> None:
    """Raises if JAX has devices already, detected by its refusal to change their number for lack of a public query."""
    count = jax_config.jax_num_cpu_devices
    try:
        jax_config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError as error:
        raise _too_late(error) from None  # the message has the text of the JAX error
    jax_config.update("jax_num_cpu_devices", count)


def _too_late(error: RuntimeError) -> RuntimeError:
    return RuntimeError("`MultiWorkerMirroredStrategy` must be made before JAX is used for anything else: make it at "
                        f"the beginning of the script. {see('strategy-too-late')} JAX says: {error}")


def _exit_if_refused(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None,
) -> None:
    """Ends a process with an uncaught `ClusterError` with the exit code that prevents a restart."""
    before(kind, error, trace)
    if issubclass(kind, ClusterError):
        sys.exit(REFUSED)


def _exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends a failed process, because at a normal exit it would wait for the others, which wait for it."""
    watching = watchdog()
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    if issubclass(kind, ClusterError):  # which all processes raise
        if watching is not None:
            watching.stop()
        if jax.process_index() == 0:
            time.sleep(_LINGER_SECS)
        os._exit(REFUSED)
    lost_peer = is_peer_error(error)
    if watching is not None and lost_peer:
        watching.await_diagnosis()  # names who is lost, and ends this process; or none is, as with a firewall
    if watching is not None and isinstance(error, Exception):
        watching.fail(error)
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else PEER_LOST if lost_peer else FAILED)
