"""The collectives of a compiled program, read from its text: which, of what arrays, and how often each runs.

The text is that of `jax.jit(f).lower(...).compile().as_text()`: XLA's HLO after all its passes, for one device.
"""

import re
from typing import NamedTuple

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_WHILE_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:to_apply|calls|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One array that a collective gives to a device.

    XLA may join several collectives into one instruction with several arrays: these share `instruction`.

    Attributes:
      kind: one of `KINDS`.
      dtype: as HLO names it, such as "f32" or "s32".
      shape: of the array that comes out: of a reduce-scatter the part, of an all-gather the whole.
      bytes: of that array.
      instruction: the name of the instruction.
      times: how often it runs in one execution, where every branch is taken and a loop whose count the text does not
        tell runs once.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    instruction: str
    times: int = 1


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a program, in the order of its text.

    Raises:
      ValueError: for collectives in two halves, a start and a done, as backends other than CPU write them.
    """
    found: list[tuple[str, Collective]] = []  # with the computation that it stands in
    calls: dict[str, list[tuple[str, int]]] = {}  # callee -> callers, and how often each runs it
    computation = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            computation = header[1]
            continue
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        name, result, operation = instruction.groups()
        for callee, times in _callees(line, operation):
            calls.setdefault(callee, []).append((computation, times))
        if operation.removesuffix("-start") in KINDS and operation not in KINDS:
            raise ValueError(f"{operation} is not understood: only the text of programs for CPUs is.")
        if operation in KINDS:
            found += [(computation, Collective(operation, *array, name)) for array in _arrays(result)]
    return [collective._replace(times=_executions(computation, calls)) for computation, collective in found]


def total_bytes(found: list[Collective], kind: str) -> int:
    """Returns the bytes that come out of all executions of the collectives of a kind."""
    return sum(each.bytes * each.times for each in found if each.kind == kind)


def instructions(found: list[Collective], kind: str) -> int:
    """Returns how many instructions of a kind the program has, whatever the number of their arrays."""
    return len({each.instruction for each in found if each.kind == kind})


def _arrays(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    found = []
    for dtype, bits, dimensions in _ARRAY.findall(text):
        shape = tuple(int(size) for size in dimensions.split(",") if size)
        size = 1
        for length in shape:
            size *= length
        found.append((dtype, shape, size * int(bits or 8) // 8))
    return found


def _callees(line: str, operation: str) -> list[tuple[str, int]]:
    found = [(name, 1) for name in _CALLED.findall(line)]
    for names in _BRANCHES.findall(line):
        found += [(name.strip().lstrip("%"), 1) for name in names.split(",")]
    if operation == "while":
        trips = _TRIPS.search(line)
        found.append((_WHILE_BODY.search(line)[1], int(trips[1]) if trips else 1))
    return found


def _executions(computation: str, calls: dict[str, list[tuple[str, int]]]) -> int:
    callers = calls.get(computation)
    return sum(times * _executions(caller, calls) for caller, times in callers) if callers else 1
