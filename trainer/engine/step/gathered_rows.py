"""The data that a partitioned step gathers from other devices, besides its state: rows, or values computed from them.

Owns the single log message about them. Such a step is correct but may be slow: `on_each_replica` is the remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from trainer.core.compile.hlo_text import Program
from trainer.core.units import readable_bytes

LOGGER = logging.getLogger("trainer")
MUCH = 2**20  # bytes per step that justify a warning

_GATHERING = ("all-gather", "all-to-all", "collective-permute", "ragged-all-to-all")


def gathered_bytes(text: str, state_shapes: Collection[tuple[int, ...]]) -> int:
    """Returns the bytes that a step's program gathers or sends to other devices, except for arrays of the state.

    Args:
      text: the text of the compiled program.
      state_shapes: the shapes of the arrays of the state.

    Example:
      >>> gathered_bytes('''HloModule step
      ... ENTRY %main (x: f32[4,2]) -> f32[8,2] {
      ...   %x = f32[4,2]{1,0} parameter(0)
      ...   ROOT %all = f32[8,2]{1,0} all-gather(%x), dimensions={0}
      ... }''', [(3, 3)])
      64
    """
    return sum(each.arrays[-1].nbytes for each, _ in Program(text).instructions()
               if each.operation.removesuffix("-start") in _GATHERING and each.arrays
               and each.arrays[-1].shape not in state_shapes)


def log_gathered(kind: str, nbytes: int) -> None:
    """Logs the bytes that a step gathers, as a warning if there are many."""
    if nbytes:
        LOGGER.log(
            logging.WARNING if nbytes >= MUCH else logging.INFO,
            "Each %s step gathers %s of its batch, or of what is computed from it, from other devices: something in it "
            "needs all rows, or XLA cannot divide it. Where rows are independent, "
            "`trainer.distribute.on_each_replica(function)` computes them where they are.",
            kind, readable_bytes(nbytes))
