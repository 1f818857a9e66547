"""The arrays that the collectives of a program for CPUs give to a device, from the trainer's reading of its text."""

from typing import NamedTuple

from trainer.core.compile.hlo_text import Program
from trainer.tools.plan.program_contents import COLLECTIVES


class Collective(NamedTuple):
    """One array that a collective gives to a device.

    XLA may join several collectives into one instruction with several arrays: these share `instruction`.

    Attributes:
      kind: element of `COLLECTIVES`.
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
    program, found = Program(text), []
    for name, computation in program.computations.items():
        for each in computation:
            if each.operation.removesuffix("-start") in COLLECTIVES and each.operation not in COLLECTIVES:
                raise ValueError(f"{each.operation} is not understood: only the text of programs for CPUs is.")
            if each.operation in COLLECTIVES:
                found += [Collective(each.operation, array.dtype, array.shape, array.nbytes, each.name,
                                     program.times.get(name, 0)) for array in each.arrays]
    return found


def total_bytes(found: list[Collective], kind: str) -> int:
    """Returns the bytes that come out of all executions of the collectives of a kind."""
    return sum(each.bytes * each.times for each in found if each.kind == kind)


def instructions(found: list[Collective], kind: str) -> int:
    """Returns how many instructions of a kind the program has, whatever the number of their arrays."""
    return len({each.instruction for each in found if each.kind == kind})
