"""A stream of batches: pass after pass of a source, and the present position in it.

Owns how passes follow each other and how a batch is looked at without losing it. It must not look into batches.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from trainer.data.sources.arrays import DataError
from trainer.data.sources.batches import Batch, Part, ResumeToken
from trainer.data.sources.order import is_finite
from trainer.data.sources.sources import Source

END: Any = object()
"""What comes after the last batch; None might be what a pipeline yields."""


class Stream:
    """An open iterator of batches and where it stands.

    Args:
      batches: from there on.
      pass_index: the pass that it began with.
      position: how many batches come before.
      resume_token: the place that the next batch has, if the source was put there and has not told it yet.

    Attributes:
      pass_index: see above.
      position: how many batches come before the next batch.
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


def rest_of_passes(source: Source, state: Any) -> Generator[Any, None, None]:
    """Yields the batches of pass after pass of a source, from where its state was taken."""
    yield from source.read_from(state)
    yield from all_passes(source, 0, state["pass_index"] + 1)


def all_passes(source: Source, position: int, pass_index: int = 0) -> Generator[Any, None, None]:
    """Yields the batches of pass after pass of a source, from batch `position` of those from `pass_index` on."""
    num_batches = source.num_batches
    start = dropped = 0
    if num_batches == math.inf:
        start = position
    elif is_finite(num_batches) and num_batches > 0:
        skipped_passes, start = divmod(position, num_batches)
        pass_index += skipped_passes
    else:
        dropped = position
    while True:
        is_empty = start == 0
        batches = source.read(pass_index, start)
        try:
            for batch in batches:
                is_empty = False
                if dropped:
                    dropped -= 1
                else:
                    yield batch
        finally:
            batches.close()
        if is_empty:
            raise DataError("the dataset must yield at least one batch, and a pass over it yielded none.")
        pass_index, start = pass_index + 1, 0
