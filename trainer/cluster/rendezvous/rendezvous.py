"""All processes of a cluster meet and compare notes before JAX starts.

JAX ends a process that waits in vain by SIGABRT and does not say for whom it waited. It joins processes that were
started differently without a word, and two jobs that share a port destroy each other. Here the processes meet first,
in plain Python: a process that is missing or differs is named, in errors that can be caught.

Process 0 listens on its own address, on the very port that JAX uses afterwards. The port is bound exclusively, so
that a port in use is an error and never shared, and no process listens on it any more when `agree` returns or raises.
If process 0's address is a loopback address, only loopback is bound; otherwise all interfaces are, since the address
may be one that the machine itself does not have (a service or NAT). The connections stay: the watchdogs talk over them.

What the network must guarantee: it is trusted. Nothing is encrypted, and a program that reaches the port and knows
the protocol can make the start fail, though not run code: messages are JSON of limited length. Connections that do not
speak the protocol are dropped and counted, and processes of another job are refused. JAX's own connections are no
better protected.

Must not know JAX, nor what the processes do afterwards.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence

from trainer.cluster.description.cluster_description import ClusterDescription, ClusterError
from trainer.cluster.description.package_versions import package_versions
from trainer.cluster.rendezvous import gather, join
from trainer.cluster.rendezvous.gloo_addresses import own_gloo_address
from trainer.cluster.rendezvous.hello import Hello
from trainer.cluster.rendezvous.star import Star
from trainer.cluster.rendezvous.wait import Wait
from trainer.core.arguments import require
from trainer.core.received_text import printable

JOB_ID_VARIABLE = "TRAINER_JOB_ID"


def print_now(line: str) -> None:
    """Prints a line at once, also where standard output is a pipe."""
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
    """Returns the connections to the others once every process knows that all are there and were started alike.

    Compared are the cluster's addresses, the job id, and the versions of trainer, jax and jaxlib. A process that leaves
    before the end may come back until the deadline. Where both have a job id, a process with another one is refused,
    and `say` is called with its name: the start goes on without it. With one process there is nothing to do.

    Looking up a host name takes as long as the system's resolver allows, which may exceed the deadline.

    Args:
      description: the cluster, and which process this is.
      timeout_secs: how long to wait for the others. The shortest timeout among the processes counts for all.
      say: is called with a line about who is awaited, and why, from time to time.
      job_id: distinguishes jobs that meet by mistake. None takes the environment variable TRAINER_JOB_ID, or else the
        description's; "" if there is none.
      say_every_secs: how often `say` is called while waiting.
      listeners: where process 0 awaits the others; by default, sockets on the port of its address.

    Raises:
      ClusterError: if processes differ, two have one number, process 0 cannot listen on its port, or this process
        does not train. All that can be reached raise the same. Or if this process is refused as one of another job.
      ClusterTimeout: if not all met in time. The text names who is missing.
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
    wait = Wait(description, timeout_secs, say, say_every_secs)
    if description.process_id == 0:
        return gather.gather(hello, wait, listeners)
    return join.join(hello, wait)
