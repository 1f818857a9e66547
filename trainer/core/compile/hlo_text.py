"""Parser for the text of a compiled program: XLA's HLO after all passes, for one device.

XLA may change this grammar. Unknown text is skipped, and never an error.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_WHILE_BODY = re.compile(r"body=%?([\w.\-]+)")
_WHILE_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OF_ELEMENTS = ("fusion", "reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter", "all-reduce",
                "all-reduce-start", "reduce-scatter")  # their computations are not separate kernels


class Array(NamedTuple):
    """The type of an array.

    Attributes:
      dtype: name of the dtype in HLO, such as "f32".
      shape: shape of the array.
      bits: bits of an element.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.bits // 8


class Instruction(NamedTuple):
    """An HLO instruction.

    Attributes:
      name: name of the instruction.
      operation: operation, such as "fusion" or "all-reduce-start".
      arrays: output arrays.
      operands: names of the instructions whose results are the operands.
      is_root: whether its result is the result of its computation.
      text: the whole line.
    """

    name: str
    operation: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    is_root: bool
    text: str

    @property
    def nbytes(self) -> int:
        """Bytes of the output arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def callees(self) -> list[tuple[str, int]]:
        """Computations called as separate kernels, with the number of calls (1 if unknown)."""
        if self.operation == "while":
            names = [*_WHILE_BODY.findall(self.text), *_WHILE_CONDITION.findall(self.text)]
            return [(name, self.trip_count or 1) for name in names]
        if self.operation in _OF_ELEMENTS:
            return []
        branches = [name for group in _BRANCHES.findall(self.text) for name in re.findall(r"[\w.\-]+", group)]
        return [(name, 1) for name in (*_CALLED.findall(self.text), *branches)]

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a loop; None if XLA does not know it, or for other instructions."""
        found = _TRIPS.search(self.text) if self.operation == "while" else None
        return None if found is None else int(found[1])

    @property
    def fused(self) -> str | None:
        """Computation of a fusion; None for other instructions."""
        found = _CALLED.search(self.text) if self.operation == "fusion" else None
        return None if found is None else found[1]


class Program:
    """The computations of a program.

    Args:
      text: text of the program, from `jax.stages.Compiled.as_text()`.

    Attributes:
      header: the first line.
      computations: instructions of each computation by name, in the order of the schedule.

    Example:
      >>> program = Program('''HloModule step
      ... ENTRY %main (x: f32[4]) -> f32[4] {
      ...   %x = f32[4]{0} parameter(0)
      ...   ROOT %y = f32[4]{0} negate(%x)
      ... }''')
      >>> [(each.name, each.nbytes, times) for each, times in program.instructions()]
      [('x', 16, 1), ('y', 16, 1)]
    """

    def __init__(self, text: str):
        self.header = text.partition("\n")[0]
        self.computations: dict[str, list[Instruction]] = {}
        self._entry, current = "", ""
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header:
                current = header[2]
                self.computations[current] = []
                self._entry = current if header[1] else self._entry
            elif current and (instruction := _parsed(line)) is not None:
                self.computations[current].append(instruction)

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Yields each instruction with its number of executions. A fusion counts as a single instruction."""
        for name, times in self.times.items():
            for instruction in self.computations.get(name, ()):
                yield instruction, times

    @functools.cached_property
    def times(self) -> Mapping[str, int]:
        """Number of runs of each computation in a single execution; a loop of unknown length counts as a single run."""
        times: dict[str, int] = {}

        def visit(name: str, factor: int) -> None:
            times[name] = times.get(name, 0) + factor
            for instruction in self.computations.get(name, ()):
                for callee, count in instruction.callees:
                    visit(callee, factor * count)

        visit(self._entry, 1)
        return times

    @functools.cached_property
    def loops(self) -> list[Instruction]:
        """The loops, outer loops before inner loops."""
        return [instruction for instruction, _ in self.instructions() if instruction.operation == "while"]

    def operands_of(self, instruction: Instruction, computation: Sequence[Instruction]) -> list[Instruction]:
        """Returns the instructions of a computation that are operands of an instruction in it."""
        by_name = {each.name: each for each in computation}
        return [by_name[name] for name in instruction.operands if name in by_name]


def _parsed(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, result, operation = found.groups()
    return Instruction(name, operation, _arrays(result), tuple(_NAME.findall(_inside(line, found.end()))), bool(root),
                       line)


def _inside(line: str, start: int) -> str:
    """Returns the text in the parentheses that open before `start`."""
    depth = 1
    for index in range(start, len(line)):
        depth += (line[index] == "(") - (line[index] == ")")
        if depth == 0:
            return line[start:index]
    return line[start:]


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(size) for size in dimensions.split(",") if size),
              0 if dtype == "token" else int(bits or 8))
        for dtype, bits, dimensions in _ARRAY.findall(text))
