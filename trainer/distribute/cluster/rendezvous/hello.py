"""The first message of a process: its identity, and the settings that must be equal in all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.distribute.cluster.description.cluster_description import ClusterDescription, is_ip
from trainer.distribute.cluster.rendezvous.connection import NotOurs, shortened

MAX_SHOWN = 8  # of many processes or differences
_MAX_VALUE = 200  # characters of a single value that is shown


def first_of(texts: Sequence[str]) -> list[str]:
    """Returns the first of many texts, and the number of the others."""
    more = len(texts) - MAX_SHOWN
    return [*texts[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])]


class Hello(NamedTuple):
    """A process's description of itself.

    Attributes:
      cluster: addresses of all processes, as known to this process.
      process_id: number of the process among them.
      job_id: identifier of its job; "" if unknown.
      versions: versions that must be equal in all processes, by name.
      process: location of the process, for messages.
      nonce: identifier of the process, which stays the same when it reconnects.
      gloo_address: address of its CPU devices, see `own_gloo_address`.
    """

    cluster: tuple[str, ...]
    process_id: int
    job_id: str
    versions: dict[str, str]
    process: str
    nonce: str
    gloo_address: str = ""

    def to_message(self) -> dict[str, Any]:
        """Returns the description as a message."""
        return {"kind": "hello", **self._asdict()}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Hello:
        """Returns the description in a message.

        Raises:
          NotOurs: if a value has an unexpected type.
        """
        cluster, versions, process_id = (message.get(key) for key in ("cluster", "versions", "process_id"))
        texts = {key: message.get(key) for key in ("job_id", "process", "nonce", "gloo_address")}
        if not (message.get("kind") == "hello" and isinstance(cluster, list) and isinstance(versions, dict)
                and isinstance(process_id, int) and not isinstance(process_id, bool)
                and all(isinstance(text, str) for text in (*cluster, *versions.values(), *texts.values()))):
            raise NotOurs("It sent a message of another form.")
        if not is_ip(texts["gloo_address"] or "::"):
            raise NotOurs("It sent an address of another form.")
        return cls(cluster=tuple(cluster), versions=versions, process_id=process_id, **texts)  # type: ignore[arg-type]

    def differences(self, other: Hello, other_name: str) -> list[str]:
        """Returns the differences between this process and another, each as part of a sentence."""
        found = []
        if self.job_id != other.job_id:
            mine, theirs = _value(self.job_id or None), _value(other.job_id or None)
            found.append(f"its job id is {mine}, not {theirs} as on {other_name}")
        if len(self.cluster) != len(other.cluster):
            found.append(f"its cluster has {len(self.cluster)} processes, not {len(other.cluster)} as on {other_name}")
        else:
            found += [f"its cluster has {_value(mine)} as address {index}, not {_value(theirs)} as on {other_name}"
                      for index, (mine, theirs) in enumerate(zip(self.cluster, other.cluster, strict=True))
                      if mine != theirs]
        for name in sorted(self.versions.keys() | other.versions.keys()):
            mine, theirs = _value(self.versions.get(name)), _value(other.versions.get(name))
            if self.versions.get(name) != other.versions.get(name):
                found.append(f"its {shortened(name, _MAX_VALUE)} is {mine}, not {theirs} as on {other_name}")
        return first_of(found)

    def described(self, cluster: ClusterDescription) -> str:
        """Returns the name of the sender, for messages."""
        known = 0 <= self.process_id < cluster.num_processes
        name = cluster.member(self.process_id) if known else f"process {self.process_id}"
        return f"{name}, {shortened(self.process, _MAX_VALUE)}"


def _value(value: str | None) -> str:
    return "none" if value is None else f"'{shortened(value, _MAX_VALUE)}'"
