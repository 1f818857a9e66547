"""The positions of iterables: the states that they or their iterators report and take back.

Owns the protocols for this, and the places where a library's states do not give the same elements again. It must not
know of batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.core import plain
from trainer.core.errors import page_url

_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # Grain's, and torch's


class Positions:
    """Opens the passes of an iterable, at a state or at their start, and reports states.

    The states belong to the iterators of passes or to the iterable, with the methods `get_state` and `set_state`, or
    `state_dict` and `load_state_dict`. The state of an iterable determines its next pass. A state is copied. It must be
    plain data or arrays; otherwise a warning names the value, and there are no states.

    Args:
      iterable: any iterable.
    """

    def __init__(self, iterable: Any):
        self._iterable = iterable
        self._holder: Any = None  # has the states: the iterable, or the iterator of the last pass
        is_iterator = hasattr(iterable, "__next__")
        self._names = _protocol_of(iterable, _PROTOCOLS if is_iterator else _PROTOCOLS[1:])
        self._is_of_passes = self._names is None
        self._refused = False

    @property
    def is_exact(self) -> bool:
        """Whether the states are Grain's, whose passes are the same in any process."""
        return self._names == _PROTOCOLS[0]

    def begin(self, state: Any = None) -> Iterator[Any]:
        """Returns an iterator of a pass: of the next pass, or of the rest of a pass from a state on."""
        if not self._is_of_passes:
            self._holder = self._iterable
            if state is not None:
                self._load(state)
            return iter(self._iterable)
        self._holder = iterator = iter(self._iterable)
        self._names = _protocol_of(iterator)
        if state is not None:
            self._load(state)
        return iterator

    def state(self) -> Any:
        """Returns the state after the last element that was read; None if there is none."""
        if self._holder is None or self._names is None or self._refused:
            return None
        report = f"{type(self._holder).__name__}.{self._names[0]}()"
        try:
            return plain.decode(*plain.encode(getattr(self._holder, self._names[0])(), report))  # a copy
        except (TypeError, ValueError) as error:
            self._refuse(f"{error} So a resumed run reads all batches up to its position again.")
            return None

    def next_pass(self) -> tuple[Any] | None:
        """Returns the state with which the pass after the last one begins, as a tuple; None if it is unknown."""
        state = None if self._is_of_passes else self.state()
        return None if state is None else (state,)

    def _load(self, state: Any) -> None:
        assert self._names is not None, "there is a state"
        getattr(self._holder, self._names[1])(plain.decode(*plain.encode(state)))

    def _refuse(self, why: str) -> None:
        self._refused = True
        warnings.warn(why, stacklevel=2)


class HuggingFacePositions(Positions):
    """The positions of a `datasets.IterableDataset`: a state applies to all later passes of its epoch, until the next.

    Its passes depend only on `set_epoch`. The buffer of `shuffle` is not part of its state; after `shuffle`, only the
    starts of passes are known.
    """

    _is_set = False

    def begin(self, state: Any = None) -> Iterator[Any]:
        if state is not None:
            self._iterable.set_epoch(state["epoch"])  # a state of another epoch would be ignored
        elif self._is_set:
            self._iterable.load_state_dict(None)  # otherwise the pass would begin where an earlier pass was resumed
        self._is_set = state is not None
        return super().begin(state)

    def state(self) -> Any:
        if not self._refused and (step := _lossy_step(self._iterable)) is not None:
            self._refuse(f"The state of this {type(self._iterable).__name__} does not hold {step}. So a resumed run "
                         "reads all batches of the epoch up to its position again. "
                         f"See {page_url('resume')}")
        return super().state()

    def next_pass(self) -> tuple[Any]:
        return (None,)


class GeneratorPositions(Positions):
    """The positions of torchdata's `StatefulDataLoader` with a `generator`, without workers.

    Each pass draws its order from the generator, then a seed. A restored pass draws the seed first and then resets the
    generator, so that the next pass would have another order. A state thus holds the generator too.
    """

    _KEY = "generator after this"  # no key of torchdata's

    def begin(self, state: Any = None) -> Iterator[Any]:
        if state is None or self._KEY not in state:
            return super().begin(state)
        generator, is_over = state[self._KEY]
        iterator = super().begin({key: value for key, value in state.items() if key != self._KEY})
        self._iterable.generator.set_state(generator)
        return iter(self._iterable) if is_over else iterator  # the pass after a finished pass was drawn too early

    def state(self) -> Any:
        return self._with_generator(is_over=False)

    def next_pass(self) -> tuple[Any] | None:
        state = self._with_generator(is_over=True)
        return None if state is None else (state,)

    def _with_generator(self, is_over: bool) -> Any:
        state = super().state()
        return None if state is None else {**state, self._KEY: [self._iterable.generator.get_state(), is_over]}


def positions_of(iterable: Any) -> Positions:
    """Returns the positions of an iterable."""
    if (any(base.__module__.startswith("torchdata.stateful_dataloader") for base in type(iterable).__mro__)
            and iterable.num_workers == 0 and iterable.generator is not None):
        return GeneratorPositions(iterable)
    is_hugging_face = type(iterable).__module__.startswith("datasets.") and hasattr(iterable, "set_epoch")
    return (HuggingFacePositions if is_hugging_face else Positions)(iterable)


def _protocol_of(
    holder: object, protocols: Sequence[tuple[str, str]] = _PROTOCOLS
) -> tuple[str, str] | None:
    for names in protocols:
        if all(callable(getattr(holder, name, None)) for name in names):
            return names
    return None


def _lossy_step(dataset: Any) -> str | None:
    """Returns a step of Hugging Face's dataset whose rows a restored state loses or skips, in words."""
    steps: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        if type(step).__name__.startswith("BufferShuffled"):
            return "the buffer of `shuffle`"
        steps += [*getattr(step, "ex_iterables", ()), *([step.ex_iterable] if hasattr(step, "ex_iterable") else [])]
    return None
