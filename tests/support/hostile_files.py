"""Files that were damaged or made to do harm, for every reader, and the outcome of each.

A case is a reader and a function that makes its file. `judged` reads the file under a limit of time and memory, and
says what is wrong with the outcome: another error than of a value, or of the operating system where there is no file to
read; a message that does not name the file, is long or could steer a terminal; code of the file that ran; a file
outside of the folder. As a program, it judges a list of cases in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import pickle
import random
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from tests.support import hostile_arrays, hostile_data, hostile_readers  # noqa: F401  the first two register files
from tests.support.hostile_contents import CRAFTED, NO_FILES, Canary, Contents, path_in
from tests.support.waiting import GUARD_SECS

MOST_BYTES = 500_000_000
MOST_CHARACTERS = 1500
MAY_LACK = {(reader, "nothing") for reader in ("csv", "begun", "best")} | {
    ("csv", "a link to a device"), ("begun", "a link to itself")}
Reading = Callable[[pathlib.Path], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """A reader, and how its file is made; `may_read` where a reader may take the file for good."""

    reader: str
    name: str
    make: Callable[[Contents, pathlib.Path, random.Random], None]
    may_read: bool = False

    def __str__(self) -> str:
        return f"{self.reader}: {self.name}"


class HungError(BaseException):
    """A reader took too long."""


def _mutated(change: Callable[[bytes, random.Random], bytes]) -> Callable[..., None]:
    def make(contents: Contents, path: pathlib.Path, rng: random.Random) -> None:
        path.write_bytes(change(contents.of(path.parent.name), rng))
    return make


def _flipped(data: bytes, rng: random.Random, start: int = 0, end: int | None = None) -> bytes:
    changed = bytearray(data)
    for _ in range(3):
        place = rng.randrange(start, min(end or len(data), len(data)))
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _reversed_middle(data: bytes, rng: random.Random) -> bytes:
    third = len(data) // 3
    return data[:third] + data[third:2 * third][::-1] + data[2 * third:]


MUTATIONS: dict[str, tuple[Callable[[bytes, random.Random], bytes], bool]] = {
    "empty": (lambda data, rng: b"", False),
    "cut in half": (lambda data, rng: data[:len(data) // 2], False),
    "zeros": (lambda data, rng: bytes(len(data)), False),
    "random bytes": (lambda data, rng: rng.randbytes(max(64, len(data))), False),
    "its last byte is missing": (lambda data, rng: data[:-1], True),
    "bits flipped in its beginning": (lambda data, rng: _flipped(data, rng, 0, 40), True),
    "bits flipped": (_flipped, True),
    "its middle reversed": (_reversed_middle, True),
}


def _pickled(contents: Contents, path: pathlib.Path, rng: random.Random) -> None:
    path.write_bytes(pickle.dumps(Canary(path.parent.parent / "canary"), 2))


def may_lack(reader: str, name: str) -> bool:
    """Returns whether a reader may go on where there is no file."""
    return reader == "earlier" or (reader, name) in MAY_LACK


def cases() -> list[Case]:
    """Returns all cases, in a fixed order."""
    found = []
    for reader in hostile_readers.READERS:
        if reader not in hostile_readers.FOLDERS:
            found += [Case(reader, name, _mutated(change), may_read or reader in hostile_readers.TAKE_ANY_BYTES)
                      for name, (change, may_read) in MUTATIONS.items()]
            found += [Case(reader, name, lambda contents, path, rng, make=make: make(path), may_lack(reader, name))
                      for name, make in NO_FILES.items() if reader != "csv" or name != "a pipe"]  # it waits for readers
            found.append(Case(reader, "a pickle that runs code", _pickled, reader in hostile_readers.TAKE_ANY_BYTES))
    found += [Case(reader, name, make, may_read) for (reader, name), (make, may_read) in CRAFTED.items()]
    return found


@contextlib.contextmanager
def _within(secs: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(case: Case, contents: Contents) -> str:
    """Returns the fault of the outcome of a case, in a folder of its own; "" without a fault."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return judged(case, contents, pathlib.Path(folder))


def judged(case: Case, contents: Contents, folder: pathlib.Path) -> str:
    """Returns the fault of the outcome of a case; "" without a fault."""
    path = path_in(folder / case.reader, case.reader)
    contents.copy_others(case.reader, path.parent)
    case.make(contents, path, random.Random(str(case)))
    before = _names(folder, path.parent)
    printed = io.StringIO()
    try:
        with (_within(GUARD_SECS), limited_memory(), contextlib.redirect_stdout(printed),
              contextlib.redirect_stderr(printed)):
            hostile_readers.READERS[case.reader](path)
        outcome = "" if case.may_read else "it was read"
    except HungError:
        return f"it took more than {GUARD_SECS} s"
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and case.name not in NO_FILES and case.reader != "image":
            return f"an error of the operating system: {error!r:.300}"
        outcome = _of_message(str(error), path)
        outcome = f"{outcome}: {type(error).__name__}: {str(error)[:300]!r}" if outcome else ""
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]!r}"
    if (folder / "canary").exists():
        return "its code was run"
    if (left := _names(folder, path.parent)) != before:
        return f"written outside: {sorted(left ^ before)}"
    return outcome or (_unprintable(printed.getvalue()) and f"printed {_unprintable(printed.getvalue())}")


def _names(folder: pathlib.Path, without: pathlib.Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if without not in path.parents}


def _of_message(message: str, path: pathlib.Path) -> str:
    name = repr(path.name)[1:-1]  # escaped
    if name not in message and repr(path.parent.name)[1:-1] not in message:
        return "the message does not name the file"
    return _unprintable(message)


def _unprintable(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        return f"{len(text)} characters"
    wrong = re.sub(r"[\n ]", "", text)
    return "" if wrong.isprintable() else "control characters"


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Limits the address space to its present size, and `MOST_BYTES`."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    """Prints the faults of the cases of the given numbers, as JSON objects by case, a line each."""
    chosen = [cases()[int(number)] for number in sys.stdin.read().split()]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the readers print too
    contents = Contents()
    hostile_readers.warm_up(contents)
    for case in chosen:
        print(json.dumps([str(case), "the process ended"]), file=out, flush=True)
        print(json.dumps([str(case), outcome_of(case, contents)]), file=out, flush=True)
    out.flush()
    os._exit(0)  # a thread may still wait for a pipe


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
