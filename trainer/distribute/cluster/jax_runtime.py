"""JAX's distributed runtime: its key-value store, and the address of process 0.

Both are private names of JAX, in 0.10.2 and 0.12, because JAX has no public names for them. Multiple processes need the
store, so it has no switch; `tests/cluster/test_workarounds.py` fails when JAX has a public name.
"""

from __future__ import annotations

from typing import Any


def jax_store() -> Any:
    """Returns JAX's client of the store; None before `jax.distributed.initialize` and after its shutdown."""
    from jax._src import distributed

    return distributed.global_state.client


def coordinator_address() -> str:
    """Returns the address of process 0; only after `jax.distributed.initialize`."""
    from jax._src import distributed

    address = distributed.global_state.coordinator_address
    assert address is not None, "JAX's runtime has not been started"
    return address
