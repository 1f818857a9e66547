"""Joining the processes of a cluster to one JAX program, once per process.

Owns the start of JAX's distributed runtime and the end of a process that failed. What a cluster is, and that its
processes were started in the same way, is known before JAX is asked for anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from trainer.cluster.description.cluster_description import ClusterError, is_loopback, split_address
from trainer.cluster.description.cluster_resolver import detect_cluster, resolve_cluster
from trainer.cluster.description.process_names import set_process_names
from trainer.cluster.workarounds import put_off_aborts, threads_that_wait_their_turn
from trainer.core.errors import see

if TYPE_CHECKING:
    from trainer.cluster.liveness.watchdog import Watchdog
    from trainer.cluster.rendezvous.startup_monitor import StartupMonitor

# What only clusters need, the rendezvous and the watchdog, is imported where a cluster is joined.

DEFAULT_TIMEOUT_SECS = 300.0
REFUSED_EXIT_CODE = 2  # as of a wrong command line; `trainer.launch` does not start again after it
_HEARTBEAT_SECS = 60
_PATIENCE = 12  # times the limit: the watchdog gives those that compile or save ten
_SHUTDOWN_SECS = 3600  # the chief may have late work, such as a checkpoint, that must not abort those who are done

_LINGER_SECS = 2.0  # for the others to print their errors: the end of process 0 aborts them

_watchdog: Watchdog | None = None  # a process joins one cluster, once


def join_cluster(timeout_secs: float | None = None) -> None:
    """Lets all devices of the cluster that this process belongs to become JAX's; does nothing outside of a cluster.

    The cluster is what TF_CONFIG, Open MPI or SLURM describe, or else what JAX finds (Kubernetes, TPU).
    From then on a watchdog looks after its processes. May be called again; later limits are ignored.

    Args:
      timeout_secs: how long to wait for the other processes, now and while training; None for the default.

    Raises:
      ClusterError: if what describes the cluster is wrong, the processes were started with different clusters, jobs
        or versions, or their CPU devices cannot reach each other. If it is not caught, the process's exit code is 2.
      ClusterTimeout: if not all processes come; it names those that are missing.
      RuntimeError: if JAX has used its devices already.
    """
    monitor, timeout_secs = None, timeout_secs or DEFAULT_TIMEOUT_SECS
    if not jax.distributed.is_initialized():
        try:
            monitor = _join(timeout_secs)
        except ClusterError:
            if getattr(sys.excepthook, "func", None) is not _exit_if_refused:
                sys.excepthook = functools.partial(_exit_if_refused, sys.excepthook)
            raise
    if jax.distributed.is_initialized():
        _watch(timeout_secs)
    if monitor is not None:
        monitor.started()
        if monitor.unconnected and _uses_gloo():
            monitor.await_others()  # so that none takes the end of another, by the same error, for the cause
            raise ClusterError(monitor.unconnected)


def _join(timeout_secs: float) -> StartupMonitor | None:
    """Joins the cluster; returns the processes that this process has met for that, if they have."""
    description = resolve_cluster()
    if description is None and (kind := detect_cluster()) is not None:
        from trainer.cluster.description.detected_cluster import detected_cluster

        try:
            description = detected_cluster(kind, timeout_secs)
        except ImportError:
            _initialize(initialization_timeout=math.ceil(timeout_secs))
    if description is None:
        return None
    if description.process_id is None:
        advice = ("To evaluate the training's checkpoints, use `trainer.SidecarEvaluator` under a strategy "
                  "of one process, such as `MirroredStrategy`." if description.role == "evaluator" else
                  "Run it without `MultiWorkerMirroredStrategy`.")
        raise ClusterError(f"TF_CONFIG says that this process is the {description.role!r}, which does not train. "
                           f"{advice}")
    if description.num_processes == 1:
        return None
    _check_unused()  # before the others count on this process
    from trainer.cluster.liveness.process_end import end_process
    from trainer.cluster.rendezvous.rendezvous import agree
    from trainer.cluster.rendezvous.startup_monitor import DRAIN_SECS

    monitor = agree(description, timeout_secs)
    set_process_names([description.name(number) for number in range(description.num_processes)])
    who = f"{description.name(description.process_id)} ends"
    monitor.watch(timeout_secs, lambda text, code, linger: end_process(text, who, linger, DRAIN_SECS, code))
    address = description.coordinator_address
    options: dict[str, Any] = {"cluster_detection_method": "deactivate"}  # it might find another cluster
    if is_loopback(split_address(address)[0]):  # by default, JAX's coordinator listens on all interfaces
        options["coordinator_bind_address"] = address
    if description.local_id is not None and not os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        options["local_device_ids"] = [description.local_id]
    try:
        _initialize(initialization_timeout=2 * math.ceil(timeout_secs), coordinator_address=address,
                    num_processes=description.num_processes, process_id=description.process_id, **options)
    except BaseException as error:
        if isinstance(error, Exception):
            monitor.await_end()
        if jax.distributed.is_initialized():  # JAX would abort this process when the others have ended
            monitor.give_up()
        else:
            monitor.leave()
        if monitor.unconnected and "gloo" in str(error):
            raise RuntimeError(monitor.unconnected) from error
        raise
    return monitor


def _uses_gloo() -> bool:
    config: Any = jax.config  # JAX declares its attributes at run time
    return jax.default_backend() == "cpu" and config.jax_cpu_collectives_implementation == "gloo"


def cluster_devices(timeout_secs: float | None = None) -> list[jax.Device]:
    """Returns all devices of the cluster that this process belongs to, which it joins; outside of a cluster, its own.

    Args:
      timeout_secs: see `join_cluster`.
    """
    join_cluster(timeout_secs)
    return list(jax.devices() if jax.process_count() > 1 else jax.local_devices())


def watchdog() -> Watchdog | None:
    """Returns what watches over the processes of the cluster; None outside of a cluster."""
    return _watchdog


@contextlib.contextmanager
def waiting(phase: str) -> Iterator[None]:
    """Lets the watchdog know what a custom training loop waits for while the block runs.

    Args:
      phase: "data", for those of the next step; or "device", for all other processes.
    """
    if _watchdog is None:
        yield
        return
    with _watchdog.waiting(phase):
        yield


def patience_secs() -> float:
    """Returns how long to wait for other processes, longer than the watchdog, which names who is late."""
    return _PATIENCE * (DEFAULT_TIMEOUT_SECS if _watchdog is None else _watchdog.timeout_secs)


def _watch(timeout_secs: float) -> None:
    global _watchdog
    if _watchdog is None and jax.process_count() > 1:
        from trainer.cluster.liveness.watchdog import Watchdog

        _watchdog = Watchdog(timeout_secs)


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
        raise _too_late(error) from None  # the message has what JAX says
    with threads_that_wait_their_turn(_uses_gloo):
        jax.devices()  # at once: the processes wait for each other in it


def _check_unused() -> None:
    """Raises if JAX has devices already. JAX has no public way to ask, but refuses to change how many it will have."""
    config: Any = jax.config  # JAX declares its attributes at run time
    count = config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError as error:
        raise _too_late(error) from None  # the message has what JAX says
    jax.config.update("jax_num_cpu_devices", count)


def _too_late(error: RuntimeError) -> RuntimeError:
    return RuntimeError("`MultiWorkerMirroredStrategy` must be made before JAX is used for anything else: make it at "
                        f"the beginning of the script. {see('strategy-too-late')} JAX says: {error}")


def _exit_if_refused(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None,
) -> None:
    """Ends a process by an uncaught `ClusterError` with the exit code that says not to start it again."""
    before(kind, error, trace)
    if issubclass(kind, ClusterError):
        sys.exit(REFUSED_EXIT_CODE)


def _exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends a process that failed. At a normal exit it would wait for the others, which wait for it."""
    from trainer.cluster.liveness.process_end import PEER_LOST
    from trainer.cluster.liveness.watchdog import is_peer_error

    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    if issubclass(kind, ClusterError):  # which all processes raise
        if _watchdog is not None:
            _watchdog.stop()
        if jax.process_index() == 0:
            time.sleep(_LINGER_SECS)
        os._exit(REFUSED_EXIT_CODE)
    lost_peer = is_peer_error(error)
    if _watchdog is not None and lost_peer:
        _watchdog.await_diagnosis()  # names who is lost, and ends this process; or none is, as with a firewall
    if _watchdog is not None and isinstance(error, Exception):
        _watchdog.fail(error)
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else PEER_LOST if lost_peer else 1)
