"""Meeting of all processes of a cluster before JAX starts, which compares their settings.

JAX ends a process that waits in vain by SIGABRT and does not name the missing process. It silently joins processes that
were started differently, and two jobs that share a port destroy each other. Here the processes meet first, in plain
Python: errors, which can be caught, name a process that is missing or differs.

Process 0 listens on its own address, on the same port that JAX uses afterwards. The port is bound exclusively, so that
a port in use is an error and never shared, and no process listens on it any more when `agree` returns or raises. For a
loopback address, only loopback is bound; otherwise all interfaces are bound, because the machine itself may not have
the address (a service or NAT). The connections remain: the watchdogs use them.

The network must be trusted. Nothing is encrypted, and a program that reaches the port and knows the protocol can make
the start fail, but cannot run code: messages are JSON of limited length. Connections that do not speak the protocol are
dropped and counted, and processes of another job are refused. JAX's own connections are not better protected.

Must not know JAX, nor the later work of the processes.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence

from trainer.core.arguments import require
from trainer.core.received_text import printable
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.cluster.description.package_versions import package_versions
from trainer.distribute.cluster.rendezvous import gather, join
from trainer.distribute.cluster.rendezvous.gloo_addresses import own_gloo_address
from trainer.distribute.cluster.rendezvous.hello import Hello
from trainer.distribute.cluster.rendezvous.star import Star
from trainer.distribute.cluster.rendezvous.wait import Wait

JOB_ID_VARIABLE = "TRAINER_JOB_ID"


def print_now(line: str) -> None:
    """Prints a line at once, also if standard output is a pipe."""
    print(line, flush=True)


def agree(
    description: ClusterDescription,
    timeout_secs: float,
    say: Callable[[str], None] = print_now,
    job_id: str | None = None,
    *,
    say_every_secs: float = 10.0,
    listeners: Sequence[socket.socket] = (),
) -> Star:
    """Returns connections to the others once every process knows that all are present, with the same settings.

    The processes compare the cluster's addresses, the job id, and the versions of trainer, jax and jaxlib. A process
    that leaves before the end may come back until the deadline. If two processes have different job ids, the process of
    the other job is refused, `say` is called with its name, and the start continues. A single process returns at once.

    The lookup of a host name takes as long as the system's resolver allows, which may exceed the deadline.

    Args:
      description: the cluster, and the number of this process.
      timeout_secs: seconds to wait for the others. The shortest timeout among the processes applies to all.
      say: function that is called from time to time with a line about the awaited processes and the reason.
      job_id: identifier that distinguishes jobs that meet by mistake. None uses the environment variable
        TRAINER_JOB_ID, or else the description's; "" if there is none.
      say_every_secs: seconds between calls of `say`.
      listeners: sockets on which process 0 awaits the others; by default, on the port of its address.

    Raises:
      ClusterError: if processes differ, two share a number, process 0 cannot listen on its port, or this process does
        not train. All reachable processes raise the same error. Also if this process is refused for its job.
      ClusterTimeout: if processes are missing at the deadline. The message names them.
      ValueError: if `timeout_secs` or `say_every_secs` is not positive.

    Example:
      >>> agree(ClusterDescription(("localhost:2222",), process_id=0), timeout_secs=60).close()
    """
    require({"timeout_secs": timeout_secs, "say_every_secs": say_every_secs}, "a number above 0", lambda secs: secs > 0)
    if description.process_id is None:
        raise ClusterError(f"A process with the role {description.role!r} does not meet those that train.")
    if description.num_processes == 1:
        return Star(selectors.DefaultSelector(), {}, description)
    hello = Hello(
        cluster=description.addresses,
        process_id=description.process_id,
        job_id=printable(job_id or os.environ.get(JOB_ID_VARIABLE) or description.job_id),  # as others receive it
        versions=package_versions(),
        process=f"pid {os.getpid()} on {socket.gethostname()}",
        nonce=secrets.token_hex(8),
        gloo_address=own_gloo_address(),
    )
    wait = Wait(timeout_secs, say, say_every_secs)
    if description.process_id == 0:
        return gather.gather(hello, description, wait, listeners)
    return join.join(hello, description, wait)
