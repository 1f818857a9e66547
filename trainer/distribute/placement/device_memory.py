"""The memory of devices in which arrays are kept from one run to the next: one budget for each device.

Owns what is let go of where memory is needed: arrays that are only kept, those first that were used longest ago. The
budget is one for all strategies and datasets of the process, as they share its devices. It must not know what the
arrays are, nor decide whether to keep some: what depends on the arrays that happen to be there would differ from one
process to the next.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax

from trainer.core.errors import see
from trainer.core.tracebacks import is_out_of_memory
from trainer.distribute.placement.devices import memory_bytes

T = TypeVar("T")

KEPT_FRACTION = 1 / 4  # of a device's memory, for all arrays that are kept there
_STATE_IS_LOST = ("The step had taken over the buffers of the model's state, which are gone. Load weights or a "
                  "checkpoint before the model is used again.")

_uses = itertools.count()


class KeptArrays:
    """A tree of arrays on devices that is let go of where memory is needed, and then placed again.

    What a run uses stays, as the run holds it too.
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
        """Returns the arrays, which `place()` returns where they are not there.

        Args:
          place: places them.
          devices: those of this process that they are placed on.
          nbytes: how many bytes they take on each.
        """
        tree = self._tree
        if tree is None:
            _make_room(devices, nbytes)
            tree = self._tree = place()
            self.devices, self.nbytes = devices, nbytes
            _kept.add(self)
        self.last_use = next(_uses)
        return tree

    def let_go(self) -> bool:
        """Lets go of the arrays unless something else holds them; returns whether they are gone."""
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
    """Lets go of arrays until so many bytes more are within the budget of each device, or all others are in use."""
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
    """Lets go of all arrays that are only kept, on all devices."""
    gc.collect()  # an error's traceback, or a model that is not used any more, may hold some
    for kept in list(_kept):
        kept.let_go()


def retried(call: Callable[..., T], *arguments: Any) -> T:
    """Returns what a call returns. Where the devices' memory runs out, it is made once more, without what is only kept.

    Args:
      call: runs or places something on devices.
      *arguments: its arguments. If some were donated to the call that failed, it is not made again.

    Raises:
      JaxRuntimeError: if memory runs out again; or any other error of `call`.
    """
    try:
        return call(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(arguments)):
            error.add_note(_STATE_IS_LOST)
            raise
    let_go_of_unused()  # outside of the block, whose error holds what the call has made
    try:
        return call(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            error.add_note(f"What a step needs, and what makes it less: {see('out-of-memory')}")
        raise
