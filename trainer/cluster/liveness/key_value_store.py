"""JAX's key-value store, in which the processes of a job exchange what needs no devices.

Its client is a private name of JAX, in 0.10.2 and 0.12, as JAX has no public name for it. Nothing over processes works
without it, so it has no switch; `tests/cluster/test_workarounds.py` fails when JAX has a public name.
"""

from __future__ import annotations

from typing import Any, Protocol


class Store(Protocol):
    """What the trainer needs of the store."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Stores a value."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the keys that begin with `key`, with their values, without waiting for any."""

    def key_value_delete(self, key: str) -> None:
        """Removes a value."""


def jax_store() -> Any:
    """Returns JAX's client of the store; None before `jax.distributed.initialize` and after its shutdown."""
    from jax._src import distributed

    return distributed.global_state.client


def coordinator_address() -> str:
    """Returns where process 0 is reached; only after `jax.distributed.initialize`."""
    from jax._src import distributed

    address = distributed.global_state.coordinator_address
    assert address is not None, "JAX's runtime has not been started"
    return address
