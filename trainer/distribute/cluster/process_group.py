"""Agreement between processes: each process sends a short text, and receives the texts of all.

Uses JAX's key-value store and no devices: a collective would hang on a process that differs or is missing, and only the
main thread may begin a collective. It must not know the meaning of the texts.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from trainer.core.received_text import printable, received
from trainer.data.prefetch import is_abandoned
from trainer.distribute.cluster.description.cluster_description import ClusterError
from trainer.distribute.cluster.description.process_names import process_name
from trainer.distribute.cluster.jax_runtime import jax_store
from trainer.distribute.cluster.liveness.watchdog import patience_secs

_KEYS = "trainer/process_group/"
_FIRST_WAIT_SECS, _LAST_WAIT_SECS = 0.0005, 0.02


class ProcessGroup:
    """Processes that make the same calls of this group, in the same order.

    `of` and `of_all` return a single shared group of the given processes, for calls of their main threads. With a
    single process all calls return at once.

    Args:
      members: numbers of the processes, in ascending order.
      name: name of the group; the same in all members, and different for each group.

    Attributes:
      index: position of this process among the members.
      count: number of members.

    >>> group = ProcessGroup.of([0])
    >>> group.all_gather("here"), group.any(False)
    (['here'], False)
    """

    def __init__(self, members: Sequence[int], name: str):
        self.index, self.count = members.index(jax.process_index()), len(members)
        self._members, self._name = members, name
        self._calls, self._subgroups = itertools.count(), itertools.count()

    def __deepcopy__(self, memo: object) -> ProcessGroup:
        return self  # which counts the calls of all its users

    @classmethod
    def of(cls, members: Sequence[int]) -> ProcessGroup:
        """Returns the group of these processes, in ascending order, which include this process."""
        return _group_of(tuple(members))

    @classmethod
    def of_all(cls) -> ProcessGroup:
        """Returns the group of all processes of the job."""
        return _group_of(tuple(range(jax.process_count())))

    def subgroup(self) -> ProcessGroup:
        """Returns a group of the same processes with its own order of calls, for example for a thread."""
        return ProcessGroup(self._members, f"{self._name}/group{next(self._subgroups)}")

    def all_gather(self, text: str, what: str = "data") -> list[str]:
        """Returns the texts of all processes, in the order of their numbers.

        Args:
          text: text of this process.
          what: subject of the text, which the processes compare.

        Raises:
          ClusterError: if another process makes another call.
          TimeoutError: if processes are missing; the watchdog, which names late processes, acts earlier.
          RuntimeError: if this is a prefetching thread whose data are no longer needed.
        """
        if self.count == 1:
            return [text]
        (first_what, first), *others = self._exchange([what, text])
        for member, (other_what, _) in zip(self._members[1:], others, strict=True):
            if other_what != first_what:
                raise ClusterError(f"The processes do not make the same calls: {process_name(self._members[0])} "
                                   f"prepares its {first_what}, {process_name(member)} its {other_what}. What runs "
                                   "over the devices of all must be called by all, in the same order.")
        return [first, *(other for _, other in others)]

    def any(self, flag: bool, what: str = "decision to stop") -> bool:
        """Returns whether `flag` is true in any process.

        Args:
          flag: flag of this process.
          what: as in `all_gather`.

        Raises:
          The errors of `all_gather`.
        """
        return any(self.all_gather("true" if flag else "", what))

    def assert_consistent(self, what: str, describe: Callable[[], Mapping[str, str]]) -> None:
        """Raises in all processes if a process differs from the others.

        Args:
          what: name of the described object in messages, such as "model".
          describe: returns short texts by name, which must be equal. Not called with a single process.

        Raises:
          ClusterError: if a process differs; the message has its name, the difference and both descriptions.
        """
        if self.count == 1:
            return
        first, *others = map(received, self.all_gather(json.dumps(dict(describe())), what))
        first_name = process_name(self._members[0])
        for member, other in zip(self._members[1:], others, strict=True):
            names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if names:
                differ = "; ".join(f"{name}: {first.get(name, 'none')} in {first_name}, "
                                   f"{other.get(name, 'none')} in {process_name(member)}" for name in names)
                raise ClusterError(f"The {what} of {process_name(member)} differs from {first_name}'s. {differ}. All "
                                   "processes must run the same script with the same arguments.")

    def _exchange(self, message: list[str]) -> list[list[str]]:
        store, call, deadline = jax_store(), next(self._calls), time.monotonic() + patience_secs()
        folder = f"{_KEYS}{self._name}/call{call}/"
        store.key_value_set(f"{folder}{self.index}", json.dumps(message))
        wait_secs = _FIRST_WAIT_SECS
        # Does not wait in the store itself, so that a thread whose data are no longer needed can return.
        while len(pairs := store.key_value_dir_get(folder)) < self.count:
            if is_abandoned():
                raise RuntimeError("These data are not needed any more.")
            if time.monotonic() > deadline:
                here = [self._members[place] for place in sorted(_place(key) for key, _ in pairs)]
                raise TimeoutError(f"DEADLINE_EXCEEDED: after {patience_secs():g} s only processes {here} have come.")
            time.sleep(wait_secs)
            wait_secs = min(1.5 * wait_secs, _LAST_WAIT_SECS)
        if call:  # all have come to this call, so they have read the one before
            store.key_value_delete(f"{_KEYS}{self._name}/call{call - 1}/{self.index}")
        messages = [json.loads(text) for _, text in sorted(pairs, key=lambda pair: _place(pair[0]))]
        return [[printable(what), text] for what, text in messages]


# A single object for each set of processes, because the calls of all their strategies share an order.
@functools.cache
def _group_of(members: tuple[int, ...]) -> ProcessGroup:
    return ProcessGroup(members, "-".join(map(str, members)))


def _place(key: str) -> int:
    return int(key.rpartition("/")[2])
