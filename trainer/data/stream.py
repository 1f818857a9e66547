"""A stream of batches: a pass of a source, and the present position in it.

Owns how a batch is looked at without losing it. It must not look into batches.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from trainer.data.sources.arrays import DataError
from trainer.data.sources.batches import Batch, Part, ResumeToken

END: Any = object()
"""What comes after the last batch; None might be what a pipeline yields."""


class Stream:
    """An open iterator of batches and where it stands.

    Args:
      batches: from there on.
      pass_index: which pass of its source.
      position: how many batches of the pass come before.
      resume_token: the place that the next batch has, if the source was put there and has not told it yet.

    Attributes:
      pass_index: see above.
      position: how many batches of the pass come before the next batch.
      is_ahead: whether the source does not stand before the next batch.
      next_token: where it would, if it is known.
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
        """Returns the next batch, as the source yields it; `END` after the last batch."""
        batch, self._pushed_back = self._pushed_back, END
        self.is_ahead, self.next_token = False, None
        if batch is END:
            batch = next(self._batches, END)
        if batch is not END:
            self.position += 1
        return batch

    def push_back(self, batch: Batch | Part, resume_token: ResumeToken | None) -> None:
        """Lets the batch that came last be the next batch again, at the place that it has."""
        self._pushed_back, self.is_ahead, self.next_token = batch, True, resume_token
        self.position -= 1

    def close(self) -> None:
        """Closes the iterator."""
        # A prefetching thread may still be in the user's code; then the generator ends with that thread.
        if not getattr(self._batches, "gi_running", False):  # `inspect` may be gone as Python ends
            self._batches.close()


def named(error: Exception, number: int) -> Exception:
    """Returns an error that names the batch at which another error was raised."""
    if isinstance(error, DataError):
        return DataError(f"The data cannot be used at batch {number}: {error}")
    return RuntimeError(f"The data pipeline raised {type(error).__name__} at batch {number} "
                        f"(docs/errors.md#data-pipeline): {error}")
