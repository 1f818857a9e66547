"""Epochs and groups: the batches of a source that form an epoch, and the number of batches per stack.

Owns the definition of an epoch, the comparison of each batch with the first, and errors that name a batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np

from trainer.core.arguments import as_count
from trainer.core.tree_paths import argument_names
from trainer.core.types import PyTree
from trainer.data.sources.arrays import Batch, DataError, HostArrays, as_batch
from trainer.data.sources.dataset import DatasetSource
from trainer.data.sources.groups import (
    BatchSpec,
    Group,
    GroupBuffer,
    LocalRows,
    ResumeToken,
    all_rows,
    digest_of,
    rows_here,
)
from trainer.data.sources.sources import Source
from trainer.data.stream import END, Mark, Stream, named

_ROWS_AT_ONCE = 2**15  # number of rows whose indices are computed ahead
# Minimum capacity of a group in bytes, of rows and of row indices: short arrays of any length then share a program.
_LEAST_BYTES, _LEAST_NUMBER_BYTES = 2**20, 2**14
_MANY_BATCHES = 100_000  # of an epoch, after which the data may be endless
_LEAST_STACK_BYTES = 2**24  # that stacks of larger batches may always take


class Reader:
    """Reads epochs of a source as groups of batches.

    Without `steps_per_epoch`, epoch e is pass e of the source. Otherwise, each epoch takes the next `steps_per_epoch`
    batches of a pass, as in Keras: when the pass ends early, the epoch ends with a warning, and the next epoch starts
    the next pass. A one-shot source has a single pass: each epoch continues where the last epoch stopped.

    A reader keeps iterators open from one epoch to the next: close it, or use it as a context manager.

    Args:
      source: a result of `adapt`.
      steps_per_epoch: maximum number of batches per epoch; None for all batches of a pass.
      group_size: maximum number of batches per group; may be assigned between epochs.
      first_epoch: the number of the first epoch to read, where a one-shot source starts.
      limit_batches: maximum number of batches that an epoch takes of its pass; None for all.
      may_be_endless: whether the caller ends epochs.

    Attributes:
      arrays: the arrays whose rows form the batches; None without arrays, or if batches are computed from them.
      batch_rows: number of rows per batch, except for the last, if the data define it; otherwise 0.
      num_batches: maximum number of batches per epoch; None if unknown before reading.
      num_shapes: number of shapes of batches that the data are known to have.
      limit_batches: a limit of a dry run that neither `steps_per_epoch` nor `Dataset.take` expresses; otherwise None.
      exhausted: whether a one-shot source ended before its epoch; there are no further batches.
      keeps_resume_tokens: whether groups get a `resume_token` if it helps to resume; may be assigned between epochs.

    Raises:
      ValueError: if the source is endless and nothing ends an epoch, or an argument is not a positive integer.
    """

    def __init__(
        self, source: Source, steps_per_epoch: int | None = None, group_size: int = 1, first_epoch: int = 0,
        limit_batches: int | None = None, may_be_endless: bool = False,
    ):
        if limit_batches is not None and (
                steps_per_epoch is not None or source.is_one_shot or source.num_batches == math.inf):
            steps_per_epoch, limit_batches = min(steps_per_epoch or limit_batches, limit_batches), None
        if limit_batches is not None and isinstance(source, DatasetSource):
            source, limit_batches = DatasetSource(source.dataset.take(limit_batches)), None
        if steps_per_epoch is not None:
            steps_per_epoch = as_count("steps_per_epoch", steps_per_epoch)
        elif source.num_batches == math.inf and not may_be_endless:
            raise ValueError("The data are endless: say how many batches an epoch has by `steps_per_epoch` "
                             "(`validation_steps`, `steps`).")
        self._source = source
        self.arrays: HostArrays | None = None
        self.batch_rows = 0
        if isinstance(source, DatasetSource):
            self.arrays, self.batch_rows = source.arrays, source.dataset.batch_size or 0
        self.num_batches = steps_per_epoch
        if source.num_batches is not None and source.num_batches != math.inf:
            self.num_batches = int(min(source.num_batches, steps_per_epoch or math.inf, limit_batches or math.inf))
        self.num_shapes = source.num_shapes
        self._steps = steps_per_epoch
        self.limit_batches = limit_batches
        self._first_epoch = first_epoch if source.is_one_shot else 0
        self._epochs_before = first_epoch
        self.group_size = as_count("group_size", group_size)
        self.exhausted = False
        self.keeps_resume_tokens = False
        self._stream: Stream | None = None
        self._may_be_endless = may_be_endless
        self._starts: dict[int, tuple[int, int]] = {}  # starts of epochs within passes, found by reading
        self._is_being_read = False
        self._spec: BatchSpec | None = None

    @property
    def epoch_rows(self) -> int | None:
        """Number of rows per epoch; None if unknown before reading."""
        return self._source.rows if self._steps is None and self.limit_batches is None else None

    @property
    def capacity(self) -> int:
        """Capacity of the stacks of a pipeline in batches: a power of two, to limit the shapes, or `group_size`."""
        return self._capacity_of(self.group_size)

    @property
    def stack_capacity(self) -> int:
        """Capacity of stacks of rows of `arrays` in batches, which is larger for short rows."""
        assert self.arrays is not None, "there are no arrays"
        return self._capacity_of(self.group_size, _LEAST_BYTES, self.arrays.nbytes // self.arrays.rows)

    def _capacity_of(self, group_size: int, least_bytes: int = 0, row_bytes: int = 1) -> int:
        # At least two: XLA simplifies the slicing of a stack of a single batch, which may change rounding, and the bits
        # of a step must not depend on its group.
        enough = 2 ** max(((self.num_batches or group_size) - 1).bit_length(), 1)
        return min(max(enough, least_bytes // max(row_bytes * (self.batch_rows or 1), 1)), group_size)

    def _capacity_for(self, batch: Batch | LocalRows) -> int:
        """Returns the capacity of stacks of batches like `batch`: fewer batches that are larger than the first."""
        if self._spec is None or isinstance(batch, LocalRows):  # equal in all processes, whose rows differ
            return self.capacity
        affordable = max(self.capacity * self._spec.nbytes, _LEAST_STACK_BYTES)
        return min(max(affordable // max(BatchSpec.of(batch).nbytes, 1), 2), self.capacity)

    @property
    def is_single_pass(self) -> bool:
        """Whether a single epoch reads all data."""
        return self._source.is_one_shot and self._steps is None

    def rows_at(self, numbers: np.ndarray) -> Batch:
        """Returns the rows of `arrays` at given indices; `arrays` must not be None."""
        assert self.arrays is not None, "there are no arrays"
        return self.arrays.gather(numbers)

    def read(
        self, epoch: int, start: int = 0, index_batches: int | None = None,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> Generator[Group, None, None]:
        """Yields the batches of an epoch in order, in groups of batches with the same shapes.

        A group ends at `group_size` or `index_batches`, before a batch with other shapes or dtypes, at the end of the
        epoch, and when it is urgent. Groups share no memory with the user's arrays.

        Args:
          epoch: index of the epoch, from 0.
          start: number of batches to skip at the beginning. Arrays skip them; other data are read and dropped.
          index_batches: maximum number of batches per group of row indices into `arrays`, which must not be None; by
            default, groups have the rows, of at most `group_size` batches.
          is_urgent: called after each batch of a pipeline; returns whether to end the group early.

        Raises:
          ValueError: if a batch differs from the first batch of the run or is inconsistent in itself, or there is no
            batch.
          RuntimeError: if the user's pipeline raised, as the cause. Both errors name the batch by its index in the
            epoch.
        """
        if isinstance(self._source, DatasetSource) and self.arrays is not None:
            return self._read_arrays(self._source, epoch, start, index_batches)
        return self._read_stream(epoch, start, is_urgent)

    def draw_ahead(self, epoch: int) -> None:
        """Starts a slow computation of the row order of an epoch; the epoch before may still be read."""
        if isinstance(self._source, DatasetSource) and (start := self._start_of(epoch)) is not None:
            self._source.dataset.draw_ahead(*start)

    def peek(self) -> Batch:
        """Returns a copy of the first batch of epoch 0, or of a one-shot source's next batch, without consuming it.

        Call it before `read` or between epochs: it closes a stream that is being read, unless the source is one-shot.
        """
        if isinstance(self._source, DatasetSource) and self.arrays is not None:
            try:
                return self.arrays.gather(self._source.dataset.index_block(0, 0, 1)[0])
            except DataError as error:
                raise named(error, 0) from error
        stream, batch = self._look_ahead()
        if batch is None:
            raise self._empty_error(stream)
        return jax.tree.map(np.array, all_rows(batch))

    def check_exhausted(self) -> bool:
        """Returns whether a one-shot source has no batch left for another epoch, after a warning.

        The next `read` yields the batch that this check may read.
        """
        if self._source.is_one_shot and not self.exhausted:
            stream, batch = self._look_ahead()
            if batch is None:
                self._report_end(stream)
        return self.exhausted

    @property
    def consumed(self) -> int:
        """Number of batches read from a one-shot source; 0 for other data, which can be read again."""
        return self._stream.position if self._source.is_one_shot and self._stream is not None else 0

    @property
    def is_exact(self) -> bool:
        """Whether another process can read the same batches again; known after the first batch was looked at."""
        return self._source.is_exact

    def fingerprint(self) -> dict[str, Any]:
        """Returns plain data that identify the data by their first batch and their length."""
        first = self.peek()
        leaves, structure = jax.tree.flatten(first)
        digest = hashlib.sha256(str(structure).encode())
        for leaf in leaves:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        names = argument_names(first)
        types = ", ".join(f"{name}: {leaf.dtype}" for name, leaf in zip(names, leaves, strict=True))
        return {"types": types, "batches of an epoch": self.num_batches, "rows": self._source.rows,
                "steps of the pipeline": self._source.pipeline, "first batch": digest.hexdigest()}

    def position(self, epoch: int, batch: int, resume_token: ResumeToken | None = None) -> dict[str, Any]:
        """Returns plain data from which `resume` continues at a batch.

        Args:
          epoch: the epoch of the batch.
          batch: the index of the batch in the epoch.
          resume_token: the token of the group with the previous batch, if any.
        """
        stream, start = self._stream, self._start_of(epoch)
        # While another thread is reading, the state of an iterator may be in the middle of a batch. Without a token,
        # the first batches of the epoch are read again.
        if resume_token is None and start is not None and not self._is_being_read:
            place = start[0], start[1] + batch
            if stream is not None and (stream.pass_index, stream.position) == place:
                resume_token = _token(self._mark(stream), start[1])
            elif stream is None and place[1] == 0 and (state := self._state_before(place[0])) is not None:
                resume_token = ResumeToken(batch, state)  # after the end of a pass
        # The token has the key "mark" in all checkpoints.
        return {"mark": None if resume_token is None else dataclasses.asdict(resume_token), "start": start}

    def resume(self, epoch: int, batch: int, position: dict[str, Any]) -> int:
        """Lets the next `read` of the epoch from the batch on continue as in the process of `position`.

        Returns:
          The number of batches that were read and dropped, except for the few after a saved state of an iterator.

        Raises:
          ValueError, RuntimeError: as in `read`; also ValueError, if the data cannot continue from the position.
        """
        if self.arrays is not None:
            return 0
        if self.is_single_pass and epoch > self._first_epoch:
            self.exhausted = True
            return 0
        token, skipped = position["mark"], 0
        if self._is_continuous and (start := position.get("start")):
            self._starts[epoch] = start[0], start[1]
        self._source.end_epochs(epoch - self._epochs_before)
        if token is None:
            if not self._source.seeks and not self.is_exact:
                skipped = self._read_up_to(self._locate(epoch, batch))
            self._stream = self._seek(epoch, batch)
        else:
            self.close()
            first, after = self._locate(epoch, token["batch"]), batch - token["batch"]
            state = token["source_state"]
            self._stream = Stream(self._source.read_from(state), *first, state)
            skipped = after if after > self.group_size else 0
            if not self._continues(token):
                skipped = self._read_up_to_token(first, token) + after
            for number in range(token["batch"], batch):
                self._next_batch(self._stream, number)
        begins_pass = self._stream.position == 0 and not self._source.is_one_shot  # which callbacks may still affect
        if not begins_pass and (self._steps is None or batch < self._steps):  # as the epoch's end may affect the next
            self._look_at(self._stream, batch)
        return 0 if self.is_exact else skipped

    def _continues(self, token: Mapping[str, Any]) -> bool:
        """Returns whether the stream's next batch is the batch that followed in the run of a token."""
        if (digest := token.get("digest")) is None:
            return True
        assert self._stream is not None, "a stream is open"
        batch = self._look_at(self._stream, token["batch"])
        return batch is not None and digest_of(rows_here(batch)) == digest

    def _read_up_to_token(self, place: tuple[int, int], token: Mapping[str, Any]) -> int:
        """Reads all batches before a token, whose state has not restored the source; returns their number."""
        message = (f"The state that the data reported at batch {token['batch']} does not restore them: with it, "
                   "they go on with another batch than in the run that was saved")
        count = 0
        if not self._source.is_one_shot:
            warnings.warn(f"{message}. Their batches are read from the beginning instead.", stacklevel=2)
            self.close()
            count = self._read_up_to(place)
            self._stream = self._seek_place(*place)
        if self._source.is_one_shot or not self._continues(token):
            raise DataError(f"{message}{'' if self._source.is_one_shot else ', also after all batches before it'}. "
                            "Give the data a state that says all, seed their random numbers, or start in another "
                            "folder.")
        return count

    def _read_up_to(self, place: tuple[int, int]) -> int:
        """Reads and drops all batches before a position, on which a pass may depend; returns their number."""
        count = 0
        for pass_index in range(place[0] + 1):
            stream = self._seek_place(pass_index, 0)
            while ((pass_index, stream.position) != place
                   and self._next_batch(stream, stream.position) is not None):
                count += 1
        return count

    def close(self) -> None:
        """Closes the open iterator, unless it is the user's own one-shot iterator."""
        if self._stream is not None:
            self._close(self._stream)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._source.close()

    def _read_arrays(
        self, source: DatasetSource, epoch: int, start: int, index_batches: int | None
    ) -> Generator[Group, None, None]:
        (pass_index, first), dataset, stop = self._locate(epoch, 0), source.dataset, source.num_batches
        if self._steps is not None:
            stop = min(first + self._steps, stop)
        position, most_batches = first + start, index_batches or self.group_size
        capacity = self._capacity_of(index_batches, _LEAST_NUMBER_BYTES, 4) if index_batches else self.stack_capacity
        # Row indices of several small groups are computed at once, because a call takes longer than reading a few rows.
        # The number of groups grows gradually, because all indices after a shorter batch, at the end of a pass, are
        # discarded.
        most = most_batches * max(_ROWS_AT_ONCE // (most_batches * self.batch_rows), 1)
        ahead = most_batches
        while position < stop:
            numbers = dataset.index_block(pass_index, position, int(min(position + ahead, stop)))
            ahead = min(2 * ahead, most) if len(numbers) == ahead else most_batches
            for begin in range(0, len(numbers), most_batches):
                index = numbers[begin:begin + most_batches]
                count, rows = index.shape
                if index_batches:
                    data = np.zeros((capacity, rows), np.int32)
                    data[:count] = index
                else:
                    data = dataset.arrays.gather(index, capacity)
                yield Group(data, count, rows, position - first)
                position += count
        self._warn_if_short(position - first)

    def _read_stream(self, epoch: int, start: int, is_urgent: Callable[[], bool]) -> Generator[Group, None, None]:
        stream = self._seek(epoch, start)
        number, buffer, mark = start, GroupBuffer(self.capacity), None
        before = stream.position - start  # batches of the pass before the epoch
        most = self.limit_batches if self._steps is None else self._steps
        self._is_being_read = True
        try:
            while most is None or number < most:
                if self.keeps_resume_tokens and buffer.count == 0:
                    mark = self._mark(stream)
                element = self._draw(stream, number)
                if element is END:
                    break
                if not buffer.add_if_alike(element):  # it is like a checked batch
                    batch = self._checked(element, number)
                    if not buffer.add_if_alike(batch):
                        if buffer.count:
                            yield buffer.take(_token(mark, before))  # also for the next group: its first batch was read
                        elif mark is not None and mark.position == before + number and batch is rows_here(batch):
                            mark.digest = mark.digest or digest_of(batch)
                        buffer.capacity = self._capacity_for(batch)
                        buffer.begin(batch, number)
                number += 1
                if number == _MANY_BATCHES:
                    self._warn_if_endless(epoch)
                if buffer.is_full or is_urgent():
                    yield buffer.take(_token(mark, before))
        except (DataError, RuntimeError):
            # Yields the batches before the faulty batch first.
            if buffer.count:
                yield buffer.take(_token(mark, before))
            raise
        finally:
            self._is_being_read = False
            if self._steps is None and not self._source.is_one_shot:
                self._close(stream)
        self._note_end(epoch, stream, number)
        self._source.end_epochs(1)
        if buffer.count:
            yield buffer.take(_token(mark, before))
        if number < (self._steps or 1):
            self._report_end(stream, number)

    def _look_ahead(self) -> tuple[Stream, Batch | LocalRows | None]:
        """Returns the stream at epoch 0, or a one-shot stream, and its next batch without consuming it."""
        stream = self._seek(self._first_epoch, 0)
        return stream, self._look_at(stream, 0)

    def _look_at(self, stream: Stream, number: int) -> Batch | LocalRows | None:
        self._mark(stream)
        batch = self._next_batch(stream, number)
        if batch is not None:
            stream.push_back(batch)
        return batch

    def _locate(self, epoch: int, start: int) -> tuple[int, int]:
        """Returns the pass of a batch and its position in the pass, after reading up to the epoch if needed."""
        found = self._start_of(epoch)
        if found is None:
            for earlier in range(max((known for known in self._starts if known < epoch), default=0), epoch):
                stream, number = self._seek(earlier, 0), 0
                while number != self._steps and self._next_batch(stream, number) is not None:
                    number += 1
                self._note_end(earlier, stream, number)
            if start:
                self._seek(epoch, 0)  # shows whether the pass has ended
            found = self._starts[epoch]
        return found[0], found[1] + start

    def _start_of(self, epoch: int) -> tuple[int, int] | None:
        """Returns the pass in which an epoch starts and the position in it; None if unknown before reading."""
        epoch, count = epoch - self._first_epoch, self._source.num_batches
        if self._steps is None:
            return epoch, 0
        if epoch == 0 or self._source.is_one_shot or count == math.inf:
            return self._starts.get(epoch, (0, epoch * self._steps))
        if self._source.seeks and count is not None:
            pass_index, number = divmod(epoch, max(math.ceil(count / self._steps), 1))
            return self._starts.get(epoch, (pass_index, number * self._steps))
        return self._starts.get(epoch)

    def _note_end(self, epoch: int, stream: Stream, number: int) -> None:
        """Records the start of the next epoch, given an epoch of `number` batches."""
        if self._is_continuous:
            is_pass_over = number != self._steps
            self._starts[epoch + 1] = (
                (stream.pass_index + 1, 0) if is_pass_over else (stream.pass_index, stream.position))

    def _mark(self, stream: Stream) -> Mark | None:
        """Returns the last place from which the stream can be read: its next batch, if possible."""
        if not stream.is_ahead and (state := self._source.state()) is not None:
            stream.mark = Mark(stream.position, state)
        return stream.mark

    def _state_before(self, pass_index: int) -> dict[str, Any] | None:
        """Returns the state of the source before a pass that follows the pass that was read to its end, if known."""
        state = self._source.state() if self.keeps_resume_tokens and pass_index > 0 else None
        return state if state is not None and state["pass_index"] == pass_index else None

    def _seek(self, epoch: int, start: int) -> Stream:
        """Returns the stream of batches from the epoch's batch `start` on."""
        stream = self._seek_place(*self._locate(epoch, start))
        if start == 0 and stream.position and self._is_continuous and self._look_at(stream, 0) is None:
            # The previous epoch has taken the last batch of a pass.
            stream = self._seek_place(stream.pass_index + 1, 0)
            self._starts[epoch] = stream.pass_index, 0
        return stream

    def _seek_place(self, pass_index: int, position: int) -> Stream:
        stream = self._stream
        if self._source.is_one_shot:
            stream = self._stream = stream or self._open(0, 0)
            while stream.position < position and self._next_batch(stream, stream.position) is not None:
                pass
        elif stream is None or (stream.pass_index, stream.position) != (pass_index, position):
            self.close()
            stream = self._stream = self._open(pass_index, position)
        return stream

    def _open(self, pass_index: int, position: int) -> Stream:
        state = self._state_before(pass_index) if position == 0 else None
        return Stream(self._source.read(pass_index, position), pass_index, position, state)

    @property
    def _is_continuous(self) -> bool:
        return self._steps is not None and not self._source.is_one_shot

    def _close(self, stream: Stream) -> None:
        stream.close()
        if self._stream is stream:
            self._stream = None

    def _next_batch(self, stream: Stream, number: int) -> Batch | LocalRows | None:
        element = self._draw(stream, number)
        return None if element is END else self._checked(element, number)

    def _draw(self, stream: Stream, number: int) -> Any:
        """Returns the next element; `END` at the end."""
        try:
            return stream.next()
        except Exception as error:
            raise named(error, number) from error

    def _checked(self, element: PyTree, number: int) -> Batch | LocalRows:
        """Returns an element as a batch; raises if it is invalid, or differs from the first batch of the run."""
        try:
            batch = element if isinstance(element, LocalRows) else as_batch(element)
            rows = rows_here(batch)
            self._spec = self._spec or BatchSpec.of(rows)
            # Each process sees its own rows only, and all must run the same program.
            self._spec.check(rows, sizes_may_differ=rows is batch)
            return batch
        except Exception as error:
            raise named(error, number) from error

    def _report_end(self, stream: Stream, number: int = 0) -> None:
        if self._is_continuous and number:
            self._warn_if_short(number)
            return
        if stream.position == 0 or not self._source.is_one_shot:
            raise self._empty_error(stream)
        self.exhausted = True
        warnings.warn("Your input ran out of data; there will be no further batches, and no further epochs. It can be "
                      "read once, as a generator: pass an array, a `Dataset` or a list of batches, which are read in "
                      "each epoch, or a generator of `steps_per_epoch * epochs` batches.", stacklevel=2)

    def _warn_if_endless(self, epoch: int) -> None:
        if epoch == self._first_epoch and self.num_batches is None and not self._may_be_endless:
            warnings.warn(
                f"The data have yielded {_MANY_BATCHES} batches, and their number is unknown. If they are "
                "endless, this epoch never ends: say how many batches an epoch has by `steps_per_epoch` "
                "(`validation_steps`, `steps`).", stacklevel=2)

    def _warn_if_short(self, number: int) -> None:
        if self._steps is not None and number < self._steps:
            warnings.warn(
                f"Your input ran out of data after {number} of the {self._steps} batches that `steps_per_epoch` "
                "(`validation_steps`, `steps`) asks for. An epoch of training ends there, and the next epoch begins "
                "another pass, as in Keras. To read on beyond the end, pass an endless generator, or "
                "`trainer.data.Dataset.from_arrays((x, y)).batch(batch_size).repeat()`.", stacklevel=2)

    def _empty_error(self, stream: Stream) -> DataError:
        kind = "generator" if self._source.is_one_shot else "dataset"
        if stream.position:
            return DataError(f"The data ran out: the {kind} has no batch left after the {stream.position} that were "
                             "read. Make it yield more, or pass data that can be read again.")
        return DataError(f"The data are empty: the {kind} must yield at least one batch. A generator that was read to "
                         "its end before yields nothing more.")


def _token(mark: Mark | None, before: int) -> ResumeToken | None:
    """Returns a mark as the token of an epoch that begins after `before` batches of the pass."""
    return None if mark is None else ResumeToken(mark.position - before, mark.source_state, mark.digest)
