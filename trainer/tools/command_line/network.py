"""The cluster in the environment, and whether this process can reach the other processes.

It opens connections to their addresses and closes them; it joins nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

from trainer.tools.command_line.findings import Finding

_SECTION = "cluster"
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def cluster(timeout_secs: float) -> Iterator[Finding]:
    """Yields the cluster according to TF_CONFIG, SLURM, Open MPI or JAX's own detection, and the reachable addresses.

    Args:
      timeout_secs: seconds to wait for each answer.
    """
    from trainer.distribute.cluster import TF_CONFIG, ClusterError, detect_cluster, resolve_cluster

    try:
        described = resolve_cluster()
    except ClusterError as error:
        yield Finding(_SECTION, "description", "problem", str(error))
        return
    if described is None:
        kind = detect_cluster()
        yield Finding(_SECTION, "description", "note", "none: this process trains alone" if kind is None else
                      f"JAX detects {kind!r}, and learns of the processes when it starts. Not looked at")
        return
    source = TF_CONFIG if TF_CONFIG in os.environ else described.source
    me = "no process that trains" if described.process_id is None else described.member(described.process_id)
    yield Finding(_SECTION, "description", "ok", f"{source}: {described.num_processes} processes; this is {me}, role "
                  f"{described.role!r}")
    if described.num_processes == 1:
        return
    for number, address in enumerate(described.addresses):
        if not address:
            continue
        is_mine = number == described.process_id
        yield _own(described.member(number), address) if is_mine else (
            _other(described.member(number), address, timeout_secs))
    unknown = described.addresses.count("")
    if unknown:
        yield Finding(_SECTION, "addresses", "note", f"{unknown} are not known before the processes meet")


def _own(name: str, address: str) -> Finding:
    """Returns whether this process can listen at its address."""
    from trainer.distribute.cluster import split_address

    host, port = split_address(address)
    try:
        resolved = _resolved(host, port)
    except socket.gaierror as error:
        return Finding(_SECTION, name, "problem", f"this process: its host name does not resolve ({error.strerror})")
    for family, kind, protocol, _, where in resolved:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                if error.errno in _NOT_OURS:
                    continue
                in_use = error.errno == errno.EADDRINUSE
                return Finding(_SECTION, name, "warning" if in_use else "problem", f"this process: port {port} " + (
                    "is in use, by a training that runs or by another program" if in_use else
                    f"cannot be listened on ({error.strerror})"))
            return Finding(_SECTION, name, "ok", f"this process: port {port} is free")
    return Finding(_SECTION, name, "problem", f"this process: {where[0]} is no address of this machine. Is this the "
                   "process that its description says, and on that machine?")


def _other(name: str, address: str, timeout_secs: float) -> Finding:
    """Returns whether another process's machine answers; nothing need listen there yet."""
    from trainer.distribute.cluster import split_address

    host, port = split_address(address)
    try:
        _resolved(host, port)
        with socket.create_connection((host, port), timeout_secs):
            return Finding(_SECTION, name, "ok", f"answers, and listens on port {port}")
    except socket.gaierror as error:
        return Finding(_SECTION, name, "problem", f"the host name does not resolve ({error.strerror})")
    except ConnectionRefusedError:
        return Finding(_SECTION, name, "ok", f"the machine answers; nothing listens on port {port} yet")
    except TimeoutError:
        return Finding(_SECTION, name, "problem", f"no answer within {timeout_secs:g} s: the address is wrong, the "
                       "machine is off, or a firewall drops packets")
    except OSError as error:
        return Finding(_SECTION, name, "problem", f"cannot be reached ({error.strerror or type(error).__name__})")


def _resolved(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
