"""Small texts that processes tell each other through JAX's key-value store.

It goes without the devices: a collective would hang on a process that differs or does not come, and only the main
thread may begin one.
"""

from __future__ import annotations

import time

import jax

from trainer.cluster.join_cluster import patience_secs
from trainer.cluster.liveness.key_value_store import jax_store
from trainer.data.prefetch import is_abandoned

_KEYS = "trainer/exchange/"
_FIRST_WAIT_SECS, _LAST_WAIT_SECS = 0.0005, 0.02


def exchanged(count: int, key: str, text: str, before: str | None) -> list[str]:
    """Returns the texts of all processes for a key, in their order.

    Args:
      count: how many processes take part.
      key: what they all call this exchange.
      text: what this one says.
      before: the key of an exchange that all have made, for which this process's text is removed.

    Raises:
      TimeoutError: if some do not come; the watchdog, which names who is late, comes first.
      RuntimeError: if this is a thread that reads ahead, and nobody waits for it any more.
    """
    store, folder, deadline = jax_store(), f"{_KEYS}{key}/", time.monotonic() + patience_secs()
    store.key_value_set(f"{folder}{jax.process_index()}", text)
    wait_secs = _FIRST_WAIT_SECS
    # No waiting in the store itself: a thread that nobody waits for any more must come back from it.
    while len(pairs := store.key_value_dir_get(folder)) < count:
        if is_abandoned():
            raise RuntimeError("Nobody waits for these data any more.")
        if time.monotonic() > deadline:
            here = sorted(int(name.rpartition("/")[2]) for name, _ in pairs)
            raise TimeoutError(f"DEADLINE_EXCEEDED: after {patience_secs():g} s only processes {here} have come.")
        time.sleep(wait_secs)
        wait_secs = min(1.5 * wait_secs, _LAST_WAIT_SECS)
    if before is not None:
        store.key_value_delete(f"{_KEYS}{before}/{jax.process_index()}")
    texts = {int(name.rpartition("/")[2]): value for name, value in pairs}
    return [texts[index] for index in sorted(texts)]
