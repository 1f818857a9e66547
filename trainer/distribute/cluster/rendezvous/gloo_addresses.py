"""Whether the CPU devices of several machines can reach each other, which JAX itself finds out only in the first step.

JAX's CPU devices exchange data by Gloo. In each process it listens at the first bindable address of the machine's own
host name; of two processes, the process with the larger address connects to the other. Many systems give the host name
a loopback address in /etc/hosts, which leads others to themselves. `GLOO_SOCKET_IFNAME` changes nothing. Measured with
jax 0.10.2 and 0.12, on machines with addresses below and above 127.0.0.0.

Owns that rule. Must not know the devices that JAX will use.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

_ADVICE = ("Let the host name of each machine lead to the address at which the others reach it, such as by the line "
           "'10.0.0.1 host1' in its /etc/hosts in the place of '127.0.1.1 host1'.")


class Place(NamedTuple):
    """The machine of a process, and its Gloo address.

    Attributes:
      name: name of the process, for messages.
      machine: identifier of the machine.
      gloo_address: return value of `own_gloo_address` there.
    """

    name: str
    machine: str
    gloo_address: str


def own_gloo_address() -> str:
    """Returns the address at which Gloo listens in this process; "" if the host name has none."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(os.fsencode(socket.gethostname()), None, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family) as sock:
                sock.bind(address)
                return str(address[0])
    return ""


def why_not_connected(places: Sequence[Place]) -> str:
    """Returns the reason why the CPU devices of some processes cannot reach each other; "" if none is known.

    Args:
      places: places of all processes.

    Example:
      >>> one, other = Place("worker 0", "machine 0", "127.0.1.1"), Place("worker 1", "machine 1", "10.0.0.2")
      >>> why_not_connected([one, other])  # worker 0 connects to worker 1
      ''
      >>> why_not_connected([one, other._replace(gloo_address="192.168.0.2")])[:67]
      'The CPU devices of worker 0 (127.0.1.1) and worker 1 (192.168.0.2) '
    """
    for place in places:
        if not place.gloo_address:
            return (f"The CPU devices of {place.name} cannot be reached: the host name of its machine has no address "
                    f"there. {_ADVICE}")
    ips = [ipaddress.ip_address(place.gloo_address) for place in places]
    for one, ip in zip(places, ips, strict=True):
        if not ip.is_loopback and ip.version == ips[0].version:
            continue
        for other, its_ip in zip(places, ips, strict=True):
            reaches = ip.version == its_ip.version and not (ip <= its_ip and ip.is_loopback)  # type: ignore[operator]
            if one.machine != other.machine and not reaches:
                first, second = sorted((one, other), key=places.index)
                return (f"The CPU devices of {first.name} ({first.gloo_address}) and {second.name} "
                        f"({second.gloo_address}) cannot reach each other: JAX connects them at these addresses, which "
                        f"belong to their machines' own host names. {_ADVICE}")
    return ""
