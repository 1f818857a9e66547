"""Detects steps that compile again and again.

Owns the expected compilations of a run, and the messages about all others.
"""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from typing import Any

import jax

from trainer.core import errors
from trainer.core.arguments import as_count
from trainer.core.tree_paths import argument_names
from trainer.core.types import PyTree

MODES = ("warn", "error", "off")


@dataclasses.dataclass
class CompileGuard:
    """Reports compilations of a step in a run that its data did not need.

    A run (one `fit`, `evaluate` or `predict`) may compile for its first batches, and once more for a last batch with
    fewer rows. Batches of ever new shapes compile each time, which costs seconds each and otherwise goes unnoticed.

    Attributes:
      mode: "warn" issues a RuntimeWarning, "error" raises before compiling, "off" does nothing; a number is "warn"
        after this number of shapes.
      step: name of the step, for messages.
      shapes: number of shapes that the data are known to have.
      compiled: the shapes of the batches that the step was compiled for.
    """

    mode: str | int
    step: str
    shapes: int
    compiled: list[PyTree] = dataclasses.field(default_factory=list)

    def check(self, batch: PyTree, number: int) -> None:
        """Records that the step is about to compile, and reports it if it is unexpected.

        Args:
          batch: shapes of the batch, a tree of `jax.ShapeDtypeStruct`s.
          number: number of the batch in its epoch.

        Raises:
          RuntimeError: the compilation is unexpected, and the mode is "error".
        """
        # The library, not the user, may stack or run another number of batches of a known shape.
        if self.mode == "off" or batch in self.compiled:
            return
        before = self.compiled
        self.compiled = [*before, batch]
        # A batch of fewer rows, the last of a pass, may also come first: in a resumed run, or of shuffled batches.
        is_tail = len(before) == 1 and (_is_shorter(batch, before[0]) or _is_shorter(before[0], batch))
        allowed = max(self.shapes, self.mode) if isinstance(self.mode, int) else self.shapes
        if len(before) < allowed or is_tail:
            return
        message = (f"The {self.step} compiles again (time {len(before) + 1} in this run) for batch {number}: "
                   f"{difference(before[-1], batch)}. Every new shape compiles once more. Give all batches equally "
                   "many rows (the last one of an epoch may have fewer) and pad them to few lengths, as "
                   "`trainer.data.bucketed` does, or allow a number of shapes with `compile(compile_guard=8)`, or any "
                   f"with `compile(compile_guard='off')`. {errors.see('compiles-again')}")
        self._report(message)

    def report_dropped(self, number: int, kept: int) -> None:
        """Reports that the step is about to compile a program that it had before.

        Args:
          number: number of the batch in its epoch.
          kept: number of programs that are kept.

        Raises:
          RuntimeError: the mode is "error".
        """
        self._report(f"The {self.step} compiles again for batch {number}, as for batches of the same shape before: "
                     f"programs of more than {kept} shapes are in use, and those last used are kept. Pad batches to "
                     f"fewer numbers of rows and lengths, or allow it with `compile(compile_guard='off')`. "
                     f"{errors.see('compiles-again')}")

    def _report(self, message: str) -> None:
        if self.mode == "off":
            return
        if self.mode == "error":
            raise RuntimeError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def check_mode(mode: object) -> str | int:
    """Returns `mode`, or raises ValueError for an unknown mode."""
    if isinstance(mode, numbers.Integral) and not isinstance(mode, bool):
        return as_count("compile_guard", mode)
    if not isinstance(mode, str) or mode not in MODES:
        raise errors.unknown_name("compile_guard", str(mode), MODES)
    return mode


def _is_shorter(batch: PyTree, than: PyTree) -> bool:
    if not _have_same_structure(batch, than):
        return False
    pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(than), strict=True))
    return all(mine.dtype == other.dtype and mine.shape[0] < other.shape[0] for mine, other in pairs)


def difference(before: PyTree, after: PyTree) -> str:
    """Returns the change between the shapes of two batches, as a clause."""
    if not _have_same_structure(before, after):
        return f"the batch was {errors.describe(before)} and is {errors.describe(after)}"
    names = argument_names(after)
    pairs = zip(names, jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    changes = [f"`{name}` was {old.dtype.name} {old.shape} and is {new.dtype.name} {new.shape}"
               for name, old, new in pairs if (old.shape, old.dtype) != (new.shape, new.dtype)]
    return ", ".join(changes)


def _have_same_structure(one: PyTree, other: PyTree) -> bool:
    structure: Any = jax.tree.structure(one)
    return structure == jax.tree.structure(other)
