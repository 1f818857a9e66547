"""Device memory for arrays that stay between runs, with one budget per device.

Owns the release of arrays when memory is needed: only cached arrays, least recently used first. All strategies and
datasets of the process share the budget, as they share its devices. It must not know the contents of the arrays, nor
decide whether to keep them: a decision that depends on the present arrays would differ between processes.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Collection
from typing import Any

import jax

from trainer.distribute.placement.devices import memory_bytes

KEPT_FRACTION = 1 / 4  # of a device's memory, for all arrays kept there

_uses = itertools.count()


class KeptArrays:
    """A tree of arrays on devices that is released when memory is needed, and then placed again.

    Arrays in use by a run stay, because the run holds them too.
    """

    def __init__(self) -> None:
        self._tree: Any = None
        self.devices: Collection[jax.Device] = ()
        self.nbytes = 0
        self.last_use = -1

    @property
    def is_there(self) -> bool:
        """Whether the arrays are on the devices."""
        return self._tree is not None

    def get_or_place(self, place: Callable[[], Any], devices: Collection[jax.Device], nbytes: int) -> Any:
        """Returns the arrays; if they are gone, `place()` puts them on `devices` of this process, `nbytes` on each."""
        tree = self._tree
        if tree is None:
            _make_room(devices, nbytes)
            tree = self._tree = place()
            self.devices, self.nbytes = devices, nbytes
            _kept.add(self)
        self.last_use = next(_uses)
        return tree

    def let_go(self) -> bool:
        """Releases the arrays unless something else holds them; returns whether they are gone."""
        leaves, structure = jax.tree.flatten(self._tree)
        references = [weakref.ref(leaf) for leaf in leaves]
        self._tree = None
        del leaves
        held = [reference() for reference in references]
        if held and all(leaf is not None for leaf in held):
            self._tree = jax.tree.unflatten(structure, held)
            return False
        return True


_kept: weakref.WeakSet[KeptArrays] = weakref.WeakSet()


def _make_room(devices: Collection[jax.Device], nbytes: int) -> None:
    """Releases arrays until `nbytes` more fit into the budget of each device, or all others are in use."""
    excess = {device: nbytes - memory_bytes(device) * KEPT_FRACTION for device in devices}
    present = sorted((kept for kept in _kept if kept.is_there), key=lambda kept: kept.last_use)
    for kept in present:
        for device in excess.keys() & set(kept.devices):
            excess[device] += kept.nbytes
    for kept in present:
        crowded = [device for device in kept.devices if excess.get(device, 0) > 0]
        if crowded and kept.let_go():
            for device in excess.keys() & set(kept.devices):
                excess[device] -= kept.nbytes


def let_go_of_unused() -> None:
    """Releases all arrays on all devices that only the cache holds."""
    gc.collect()  # the traceback of an error, or an unused model, may hold some
    for kept in list(_kept):
        kept.let_go()
