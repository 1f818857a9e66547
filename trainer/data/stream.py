"""A stream of batches: a pass of a source, with the current position.

Owns looking ahead at a batch without consuming it. It must not inspect batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from trainer.core.errors import see
from trainer.data.sources.arrays import Batch, DataError
from trainer.data.sources.groups import LocalRows

END: Any = object()
"""What comes after the last batch; None might be what a pipeline yields."""


@dataclasses.dataclass
class Mark:
    """A place in a pass from which its batches can be read.

    Attributes:
      position: number of batches of the pass before it.
      source_state: the state of the source there.
      digest: of the batch that follows; None if it has not been read.
    """

    position: int
    source_state: Any
    digest: str | None = None


class Stream:
    """An open iterator of batches and its position.

    Args:
      batches: the batches from the position on.
      pass_index: index of the pass of the source.
      position: number of batches of the pass before the position.
      source_state: the state of the source at the position, if known.

    Attributes:
      position: number of batches of the pass before the next batch.
      is_ahead: whether the state of the source is not the state before the next batch.
      mark: the last place at which the state of the source was known.
    """

    def __init__(
        self, batches: Generator[Any, None, None], pass_index: int, position: int, source_state: Any = None,
    ):
        self.pass_index = pass_index
        self.position = position
        self.is_ahead = True
        self.mark = None if source_state is None else Mark(position, source_state)
        self._batches = batches
        self._pushed_back = END

    def next(self) -> Any:
        """Returns the next element of the source; `END` after the last batch."""
        batch, self._pushed_back = self._pushed_back, END
        self.is_ahead = False
        if batch is END:
            batch = next(self._batches, END)
        if batch is not END:
            self.position += 1
        return batch

    def push_back(self, batch: Batch | LocalRows) -> None:
        """Makes the last batch the next batch again."""
        self._pushed_back, self.is_ahead = batch, True
        self.position -= 1

    def close(self) -> None:
        """Closes the iterator."""
        # A prefetching thread may still be in the user's code; then the generator ends with the thread.
        if not getattr(self._batches, "gi_running", False):  # `inspect` may be gone at exit
            self._batches.close()


def named(error: Exception, number: int) -> Exception:
    """Returns an error that names the batch at which another error was raised."""
    if isinstance(error, DataError):
        return DataError(f"The data cannot be used at batch {number}: {error}")
    named_error = RuntimeError(f"The data pipeline raised {type(error).__name__} at batch {number}: {error}")
    named_error.add_note(see("data-pipeline"))
    return named_error
