"""What the processes of a job must have alike or decide alike, told to each other while they train.

Processes that differ could hang in a collective, so it goes without the devices. It must not know what is compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from trainer.cluster.description.cluster_description import ClusterError
from trainer.cluster.description.process_names import process_name
from trainer.cluster.exchange import exchanged

_numbers = itertools.count()  # of the exchanges, which all processes make in the same order


def anywhere(is_so: bool) -> bool:
    """Returns whether something is so in any process; all of them must ask.

    Raises:
      ClusterError: if another process makes another call.

    >>> anywhere(False)
    False
    """
    if jax.process_count() == 1:
        return is_so
    return any(_exchanged("decision to stop", is_so))


def check_alike(what: str, describe: Callable[[], Mapping[str, str]]) -> None:
    """Raises in all processes if one says something else than the others; all of them must call this.

    Args:
      what: what is described, for the message, such as "model".
      describe: returns what this process has to say, short texts by name. Not called where there is one process.

    Raises:
      ClusterError: it names a process that differs, in what, and what both said.

    >>> check_alike("model", lambda: {"parameters": "2 arrays"})
    """
    if jax.process_count() == 1:
        return
    first_name, (first, *others) = process_name(0), _exchanged(what, describe())
    for process, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            differ = "; ".join(f"{name}: {first.get(name, 'none')} in {first_name}, "
                               f"{other.get(name, 'none')} in {process_name(process)}" for name in names)
            raise ClusterError(f"The {what} of {process_name(process)} is not that of {first_name}. {differ}. All "
                               "processes must run the same script with the same arguments.")


def _exchanged(what: str, said: Any) -> list[Any]:
    """Returns what all processes say, once it is clear that it is about the same."""
    number = next(_numbers)
    before = f"agreement/{number - 1}" if number else None
    texts = exchanged(jax.process_count(), f"agreement/{number}", json.dumps([what, said]), before)
    (first_what, first), *others = map(json.loads, texts)
    for process, (other_what, _) in enumerate(others, start=1):
        if other_what != first_what:
            raise ClusterError(f"The processes do not make the same calls: {process_name(0)} prepares its "
                               f"{first_what}, {process_name(process)} its {other_what}. What runs over the devices of "
                               "all must be called by all, in the same order.")
    return [first, *(other for _, other in others)]
