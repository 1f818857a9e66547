"""The ports that process 0 listens on."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Iterable

from trainer.distribute.cluster.description.cluster_description import (
    ClusterDescription,
    ClusterError,
    is_loopback,
    split_address,
)

LOGGER = logging.getLogger(__name__)

BACKLOG = 128
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECS = 0.1  # until another attempt, if no descriptor is free: the listener stays ready meanwhile
_SAY_SECS = 15.0
_said_at = -_SAY_SECS


def listen(cluster: ClusterDescription) -> list[socket.socket]:
    """Returns sockets that listen exclusively on the port of process 0's address.

    They listen on loopback only for a loopback address, otherwise on all interfaces.

    Raises:
      ClusterError: if the port is in use or not permitted.
    """
    host, port = split_address(cluster.coordinator_address)
    owner = cluster.member(0)
    try:
        return bind_all(host if is_loopback(host) else "", port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"Port {port} is in use, and {owner} must listen on it. Another program holds it: an earlier run, "
                f"another job, or a second process with the same index. `ss -ltnp 'sport = :{port}'` shows which. End "
                f"it, or give another port in the {cluster.source} of all processes.") from None
        raise ClusterError(f"{owner} cannot listen on port {port}: {error.strerror or error}. Give another port in "
                           f"the {cluster.source} of all processes.") from None


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen on a port.

    Args:
      host: host name of this machine, whose addresses are all used; "" for all interfaces.
      port: port; 0 for any free port.

    Raises:
      OSError: if the port is not available.
    """
    if host:
        return _listen_on_each(host, port)
    if socket.has_dualstack_ipv6():
        return [socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)]
    return [socket.create_server(("", port), backlog=BACKLOG)]


def accepted(listener: socket.socket, make_room: Callable[[], bool] = lambda: False) -> socket.socket | None:
    """Returns the next connection of a listener that is ready.

    Args:
      listener: a listening socket.
      make_room: called if no file descriptor is free; closes connections that may be closed, if any, and returns
        whether it has.

    Returns:
      The connection; None if it has left already, or if no file descriptor is free: after a warning, and a pause if
      there was nothing to close.
    """
    global _said_at
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _NO_ROOM:
            if time.monotonic() - _said_at >= _SAY_SECS:
                _said_at = time.monotonic()
                LOGGER.warning("A connection waits, as this process has no file descriptor for it: %s. Raise the limit "
                               "(`ulimit -n`), or see who connects (`ss -tnp`).", error.strerror)
            if not make_room():
                time.sleep(_PAUSE_SECS)
        return None


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Closes sockets."""
    for sock in sockets:
        sock.close()


def _listen_on_each(host: str, port: int) -> list[socket.socket]:
    """Returns a socket for each of the host's IP addresses on this machine; raises if there are none."""
    families = {str(info[4][0]): info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    sockets: list[socket.socket] = []
    absent = None
    try:
        for ip, family in families.items():
            try:
                sockets.append(socket.create_server((ip, port), family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error  # "localhost" is often also ::1 where IPv6 is off
        if absent is not None and not sockets:
            raise absent
    except OSError:
        close_all(sockets)
        raise
    return sockets
