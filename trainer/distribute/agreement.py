"""What the processes of a job must have alike or decide alike, told to each other while they train.

Owns the exchange, by JAX's key-value store and without the devices: processes that differ could hang in a collective.
It must not know what is compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping

import jax

from trainer.distribute.cluster_description import ClusterError
from trainer.distribute.join_cluster import patience_secs
from trainer.distribute.store import jax_store

_KEYS = "trainer/agreement"
_numbers = itertools.count()  # of the exchanges, which all processes make in the same order
_last_key = ""


def anywhere(is_so: bool) -> bool:
    """Returns whether something is so in any process; all of them must ask.

    >>> anywhere(False)
    False
    """
    if jax.process_count() == 1:
        return is_so
    return any(map(json.loads, _exchanged(json.dumps(is_so)).values()))


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
    texts = {process: json.loads(text) for process, text in sorted(_exchanged(json.dumps(describe())).items())}
    first = texts[0]
    for process, other in texts.items():
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            differ = "; ".join(f"{name}: {first.get(name, 'none')} in worker 0, {other.get(name, 'none')} in worker "
                               f"{process}" for name in names)
            raise ClusterError(f"The {what} of worker {process} is not that of worker 0. {differ}. All processes must "
                               "run the same script with the same arguments.")


def _exchanged(text: str) -> dict[int, str]:
    """Returns what each process has given, by its index."""
    global _last_key
    store, folder = jax_store(), f"{_KEYS}/{next(_numbers)}/"
    key = f"{folder}{jax.process_index()}"
    store.key_value_set(key, text)
    store.wait_at_barrier(f"{folder}all", round(1000 * patience_secs()))
    if _last_key:  # everybody is here, so everybody has read the exchange before
        store.key_value_delete(_last_key)
    _last_key = key
    return {int(key.rpartition("/")[2]): value for key, value in store.key_value_dir_get(folder)}
