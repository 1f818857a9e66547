"""The work of a compiled program: its collectives, its memory traffic, and its transfers to the host.

Owns how these are counted from the text. Based on XLA in jaxlib 0.10.2 and 0.12.0, for NVIDIA GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.core.compile.hlo_text import Instruction, Program

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute",
               "collective-broadcast")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
         "partition-id", "replica-id", "opt-barrier", "iota", "async-start", "async-update", "async-done", "domain"}
_SLICES = ("dynamic-slice", "slice", "gather")
_HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')
_HOST_MEMORY = re.compile(r"S\(5\)")
_LISTED_GROUPS = re.compile(r"replica_groups=\{(.*?)\}(?:,|$|\})")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


class Collective(NamedTuple):
    """A collective.

    Attributes:
      kind: an entry of `COLLECTIVES`.
      nbytes: bytes of the whole arrays: the reduced or copied arrays, the result of a gather, the operand of a scatter.
      dtypes: dtypes of its arrays, by HLO's names.
      group: the devices of a group, by their numbers in the program.
      times: number of runs per execution.
      is_asynchronous: whether it has a start and an end, and runs alongside the instructions in between.
      kernels_between: number of kernels in between.
    """

    kind: str
    nbytes: int
    dtypes: tuple[str, ...]
    group: tuple[int, ...]
    times: int
    is_asynchronous: bool
    kernels_between: int

    @property
    def sent_bytes(self) -> float:
        """Minimum number of bytes that a device sends: the number in a ring."""
        devices = len(self.group)
        share = (devices - 1) / max(devices, 1)
        return self.nbytes * {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(
            self.kind, share)


def collectives_of(program: Program, num_devices: int) -> list[Collective]:
    """Returns the collectives of a program on `num_devices` devices, except for collectives of a single device."""
    found = []
    for name, times in program.times.items():
        computation = program.computations.get(name, [])
        for place, instruction in enumerate(computation):
            kind = instruction.operation.removesuffix("-start")
            if kind not in COLLECTIVES or (instruction.operation != kind and instruction.callees and kind in (
                    _inner_kinds(program, instruction))):
                continue  # the collective itself is in the computation that its start calls
            start = _start_of(program, name) if instruction.operation == kind else (computation, place)
            group = _group(instruction.text, kind, num_devices)
            operands = program.operands_of(instruction, computation)
            nbytes = sum(each.nbytes for each in operands) * (len(group) if kind == "all-gather" else 1)
            dtypes = tuple(sorted({array.dtype for each in operands for array in each.arrays}))
            if len(group) > 1 and times and nbytes:
                found.append(Collective(kind, nbytes, dtypes, group, times, start is not None,
                                        0 if start is None else _kernels_between(*start)))
    return found


def _inner_kinds(program: Program, start: Instruction) -> set[str]:
    return {each.operation for callee, _ in start.callees for each in program.computations.get(callee, ())}


def _start_of(program: Program, computation: str) -> tuple[list[Instruction], int] | None:
    """Returns the position of the asynchronous call of a computation; None for other calls."""
    for instructions in program.computations.values():
        for place, instruction in enumerate(instructions):
            if instruction.operation.endswith("-start") and any(name == computation for name, _ in instruction.callees):
                return instructions, place
    return None


def _kernels_between(computation: Sequence[Instruction], start: int) -> int:
    name, count = computation[start].name, 0
    for instruction in computation[start + 1:]:
        if name in instruction.operands and instruction.operation.endswith("-done"):
            return count
        if name in instruction.operands and instruction.operation.endswith("-update"):
            name = instruction.name
        count += _is_kernel(instruction)
    return count


def _is_kernel(instruction: Instruction) -> bool:
    # Iterations of a loop count as kernels.
    return instruction.operation == "while" or (
        instruction.operation not in _FREE and not instruction.operation.endswith(("-start", "-done")))


def _group(text: str, kind: str, num_devices: int) -> tuple[int, ...]:
    """Returns the first group of a collective; all devices if the text has no group."""
    everything = tuple(range(num_devices))
    if kind == "collective-permute":
        pairs = _PAIRS.search(text)
        members = sorted(set(map(int, re.findall(r"\d+", pairs[1])))) if pairs else list(everything)
        return tuple(members)
    iota = _IOTA_GROUPS.search(text)
    if iota:
        return _as_tuple(_numbered(iota[2], iota[3]).reshape(_sizes(iota[1]))[0])
    mesh = _MESH_GROUPS.search(text)
    if mesh:
        axes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        named = re.findall(r"'([^']+)'", mesh[4])
        numbers = _numbered(mesh[2] or ",".join(map(str, axes.values())), mesh[3]).reshape(tuple(axes.values()))
        return _as_tuple(numbers[tuple(slice(None) if axis in named else 0 for axis in axes)])
    listed = _LISTED_GROUPS.search(text)
    first = re.match(r"\{([\d,]+)", listed[1]) if listed else None
    return tuple(map(int, first[1].split(","))) if first else everything


def _numbered(shape: str, order: str | None) -> np.ndarray:
    """Returns the numbers of devices in HLO's notation: an iota of a shape, with transposed axes."""
    sizes = _sizes(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_sizes(order)) if order else numbers


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _as_tuple(numbers: np.ndarray) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers.ravel())


def traffic_bytes(program: Program) -> float:
    """Returns the bytes that kernels read from and write to a device's memory in an execution, without caches.

    Each kernel reads its operands once and writes its results once. If a fusion slices an operand, it reads only the
    slices; an in-place update writes only the changed part.
    """
    total = 0.0
    for name, times in program.times.items():
        computation = program.computations.get(name, [])
        by_name = {each.name: each for each in computation}
        for instruction in computation:
            if not _is_kernel(instruction) or instruction.operation == "while" or _is_collective(instruction):
                continue
            operands = [by_name[each] for each in instruction.operands if each in by_name]
            total += times * _moved(program, instruction, operands)
    return total


def kernels(program: Program) -> int:
    """Returns the number of kernels in an execution, without collectives."""
    return sum(times for each, times in program.instructions()
               if _is_kernel(each) and each.operation != "while" and not _is_collective(each))


def _is_collective(instruction: Instruction) -> bool:
    return instruction.operation.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def _moved(program: Program, instruction: Instruction, operands: Sequence[Instruction]) -> float:
    fused = program.computations.get(instruction.fused or "")
    if instruction.operation in _SLICES:
        return 2.0 * instruction.nbytes
    if instruction.operation == "dynamic-update-slice":
        return 2.0 * (operands[1].nbytes if len(operands) > 1 else instruction.nbytes)
    if fused is None:
        return float(instruction.nbytes + sum(each.nbytes for each in operands))
    parameters = {int(each.text.partition("parameter(")[2].partition(")")[0]): each
                  for each in fused if each.operation == "parameter"}
    read = sum(_read_of(fused, parameters[number].name, each.nbytes) if number in parameters else each.nbytes
               for number, each in enumerate(operands))
    return read + _written(fused, instruction.nbytes)


def _read_of(fused: Sequence[Instruction], parameter: str, nbytes: int) -> float:
    """Returns the number of bytes that a fused computation reads of a parameter."""
    names, read = {parameter}, 0
    for instruction in fused:
        if not names.intersection(instruction.operands):
            continue
        if instruction.operation == "bitcast":
            names.add(instruction.name)
        elif instruction.operation in _SLICES and instruction.operands[0] in names:
            read += instruction.nbytes
        elif instruction.operation == "dynamic-update-slice" and instruction.operands[0] in names:
            continue  # in place
        else:
            return float(nbytes)
    return float(min(read, nbytes))


def _written(fused: Sequence[Instruction], nbytes: int) -> float:
    by_name = {each.name: each for each in fused}
    roots = [each for each in fused if each.is_root]
    if roots and roots[0].operation == "tuple":
        roots = [by_name[name] for name in roots[0].operands if name in by_name]
    written = 0
    for root in roots:
        while root.operation == "bitcast" and root.operands and root.operands[0] in by_name:
            root = by_name[root.operands[0]]
        is_update = root.operation == "dynamic-update-slice" and len(root.operands) > 1
        update = by_name.get(root.operands[1]) if is_update else None
        written += root.nbytes if update is None else update.nbytes
    return float(min(written, nbytes) if roots else nbytes)


def host_transfers(program: Program) -> list[str]:
    """Returns the names of the instructions that send to the host, receive from it, or call it."""
    return [each.name for each, _ in program.instructions()
            if each.operation in _HOST or _CALLBACK.search(each.text)
            or (each.operation in ("copy-start", "copy") and _HOST_MEMORY.search(each.text))]


def unknown_loops(program: Program) -> list[str]:
    """Returns the names of the loops with a trip count that XLA does not know.

    A GPU asks the host before each iteration of such a loop, and its queue runs empty.
    """
    return [loop.name for loop in program.loops if loop.trip_count is None]


def peak_bytes(compiled: Any) -> int:
    """Returns the device memory of an execution in bytes: arguments, results and temporary buffers."""
    stats = compiled.memory_analysis()
    return int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
               - stats.alias_size_in_bytes)
