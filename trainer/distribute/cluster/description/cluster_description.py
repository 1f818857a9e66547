"""Description of the processes that train together: their addresses, their order, and the index of this process.

Owns the form of an address and the errors about wrong clusters. Must not know the source of a description, nor JAX.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re

MAX_PORT = 65535
EXAMPLE_ADDRESS = "10.0.0.1:2222"
# Underscores are allowed because container names have them.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_NAME = 253  # characters
_LOOPBACK_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")
_LIKE_IPV4 = re.compile(r"[0-9.]+")


class ClusterError(ValueError):
    """The description of a cluster is wrong, or its processes were started with different descriptions."""


class ClusterTimeout(TimeoutError):
    """Not all processes of a cluster met before the deadline."""


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of "host:port"; an IPv6 host is in brackets.

    Args:
      address: address such as "10.0.0.1:2222", "worker-0.jobs:2222" or "[fd00::1]:2222".

    Returns:
      The host without brackets, and the port.

    Raises:
      ClusterError: if the address has no port, an unusable port, or an unreachable host.

    Example:
      >>> split_address("[fd00::1]:2222")
      ('fd00::1', 2222)
    """
    if "://" in address:
        raise ClusterError(f"{address!r} has a scheme. Write host and port only, such as {EXAMPLE_ADDRESS!r}.")
    host, colon, port = address.rpartition(":")
    if not colon or (address.startswith("[") and address.endswith("]")):
        raise ClusterError(f"{address!r} has no port. Write it as host:port, such as {EXAMPLE_ADDRESS!r}.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not is_ip(host, version=6):
            raise ClusterError(f"{address!r} has no IPv6 address in its brackets.")
    elif ":" in host:
        raise ClusterError(f"{address!r} has several colons. Write an IPv6 host in brackets, such as '[fd00::1]:2222'.")
    elif not _is_host_name(host) or (_LIKE_IPV4.fullmatch(host) and not is_ip(host, version=4)):
        raise ClusterError(f"{address!r} has no valid host name or IP address before the port.")
    if not (port.isascii() and port.isdecimal() and len(port) <= len(str(MAX_PORT)) and 1 <= int(port) <= MAX_PORT):
        raise ClusterError(f"{address!r} has the port {port!r}, which is no whole number from 1 to {MAX_PORT}.")
    if is_ip(host) and _ip(host).is_unspecified:
        raise ClusterError(f"{address!r} stands for all interfaces. Write the address that the other processes reach.")
    if is_ip(host) and (_ip(host).is_multicast or str(_ip(host)) == "255.255.255.255"):
        raise ClusterError(f"{address!r} stands for many hosts. Write the address of one.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Returns whether a host is reachable only from its own machine: localhost, 127.*, ::1.

    Example:
      >>> [is_loopback(host) for host in ("localhost", "127.0.1.1", "::1", "10.0.0.1", "worker-0")]
      [True, True, True, False, False]
    """
    host = host.lower().removesuffix(".")
    return host in _LOOPBACK_NAMES or host.endswith(".localhost") or (is_ip(host) and _ip(host).is_loopback)


def normal_form(address: str) -> tuple[str, int]:
    """Returns host and port in a normal form, equal for all spellings of an address.

    Example:
      >>> normal_form("LOCALHOST:80") == normal_form("127.0.0.1:80")
      True
    """
    host, port = split_address(address)
    host = host.lower().removesuffix(".")
    if host == "localhost":
        host = "127.0.0.1"
    return str(_ip(host)) if is_ip(host) else host, port


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address


def _is_host_name(host: str) -> bool:
    return len(host) <= _MAX_NAME and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))


def is_ip(host: str, version: int | None = None) -> bool:
    """Returns whether a host is an IP address, optionally of a given version."""
    try:
        return version in (None, ipaddress.ip_address(host).version)
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class ClusterDescription:
    """The processes that train together, as seen by one of them.

    Attributes:
      addresses: "host:port" of every process, in the order of their numbers; "" if unknown. All processes meet at the
        first address.
      process_id: number of this process; None for a process that does not train, such as an evaluator.
      role: task type of this process, such as "worker".
      names: name of each process in messages, such as "worker 1"; empty for "process 0", "process 1", ...
      source: source of the description in each process, for messages.
      job_id: identifier that distinguishes this job from others, if the source has it; else "".
      local_id: number of this process on its machine; the process uses the accelerator with this number. None if
        processes use all visible accelerators.

    Raises:
      ClusterError: if there is no address, an address is wrong, or `process_id` or `names` do not fit the addresses.

    Example:
      >>> cluster = ClusterDescription(("10.0.0.1:2222", "10.0.0.2:2222"), process_id=1, names=("chief", "worker 0"))
      >>> cluster.coordinator_address, cluster.member(1)
      ('10.0.0.1:2222', 'worker 0 (10.0.0.2:2222)')
    """

    addresses: tuple[str, ...]
    process_id: int | None
    role: str = "worker"
    names: tuple[str, ...] = ()
    source: str = "TF_CONFIG"
    job_id: str = ""
    local_id: int | None = None

    def __post_init__(self):
        if not self.addresses:
            raise ClusterError("A cluster needs the address of at least one process. Received: none.")
        for address in (self.addresses[0], *filter(None, self.addresses[1:])):
            split_address(address)
        if self.process_id is not None and not 0 <= self.process_id < len(self.addresses):
            raise ClusterError(f"`process_id` is {self.process_id}, but the {len(self.addresses)} processes have the "
                               f"numbers 0 to {len(self.addresses) - 1}.")
        if len(self.names) not in (0, len(self.addresses)):
            raise ClusterError(f"`names` has {len(self.names)} names for {len(self.addresses)} addresses.")

    @property
    def num_processes(self) -> int:
        """Number of processes that train together."""
        return len(self.addresses)

    @property
    def coordinator_address(self) -> str:
        """Address of process 0, where all processes meet."""
        return self.addresses[0]

    def name(self, process_id: int) -> str:
        """Returns the name of a process in messages."""
        return self.names[process_id] if self.names else f"process {process_id}"

    def member(self, process_id: int) -> str:
        """Returns a process's name in messages, with its address if known."""
        address = self.addresses[process_id]
        return f"{self.name(process_id)} ({address})" if address else self.name(process_id)
