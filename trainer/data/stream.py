"""A stream of batches: a pass of a source, with the current position.

Owns looking ahead at a batch without consuming it. It must not inspect batches.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from trainer.data.sources.arrays import DataError
from trainer.data.sources.batches import Batch, LocalRows, ResumeToken

END: Any = object()
"""What comes after the last batch; None might be what a pipeline yields."""


class Stream:
    """An open iterator of batches and its position.

    Args:
      batches: the batches from the position on.
      pass_index: index of the pass of the source.
      position: number of batches of the pass before the position.
      resume_token: the position of the next batch, if the source was set to it and does not report it yet.

    Attributes:
      position: number of batches of the pass before the next batch.
      is_ahead: whether the state of the source is not the state before the next batch.
      next_token: the position of the next batch in this case, if known.
    """

    def __init__(
        self, batches: Generator[Any, None, None], pass_index: int, position: int,
        resume_token: ResumeToken | None = None,
    ):
        self.pass_index = pass_index
        self.position = position
        self.is_ahead = True
        self.next_token = resume_token
        self._batches = batches
        self._pushed_back = END

    def next(self) -> Any:
        """Returns the next element of the source; `END` after the last batch."""
        batch, self._pushed_back = self._pushed_back, END
        self.is_ahead, self.next_token = False, None
        if batch is END:
            batch = next(self._batches, END)
        if batch is not END:
            self.position += 1
        return batch

    def push_back(self, batch: Batch | LocalRows, resume_token: ResumeToken | None) -> None:
        """Makes the last batch the next batch again, with its position."""
        self._pushed_back, self.is_ahead, self.next_token = batch, True, resume_token
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
    return RuntimeError(f"The data pipeline raised {type(error).__name__} at batch {number} "
                        f"(docs/errors.md#data-pipeline): {error}")
