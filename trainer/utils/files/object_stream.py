"""What numpy and Python wrote with `pickle`, as far as it is plain data, read without running any of it.

Owns the few instructions that make numbers, texts, lists, dicts and arrays. A stream that asks for anything else, which
`pickle` would import and call, is refused.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

_RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
_SCALAR = {"numpy.core.multiarray scalar", "numpy._core.multiarray scalar"}
_FROM_BUFFER = {"numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer"}
_NAMES = {*_RECONSTRUCT, *_SCALAR, *_FROM_BUFFER, "numpy ndarray", "numpy dtype", "_codecs encode"}
_MARK: Any = object()


class _Global:
    """A name that the stream would have imported, one of those that plain data need."""

    def __init__(self, name: str):
        if name not in _NAMES:
            raise ValueError(f"The stream of objects asks for {name.replace(' ', '.')}, which plain data do not need. "
                             "Nothing of it was run.")
        self.name = name


class _Unbuilt:
    """An array or a dtype whose contents come with a later instruction; the places where it is remembered."""

    def __init__(self, kind: str, argument: Any = None):
        self.kind, self.argument = kind, argument
        self.places: list[int] = []


def parse(data: bytes) -> Any:
    """Returns the object of a stream of any protocol from 2 to 5.

    Args:
      data: the stream.

    Raises:
      ValueError: if it holds what is no plain data, or is cut off.

    >>> parse(b"\\x80\\x02]q\\x00(K\\x01K\\x02e.")
    [1, 2]
    """
    try:
        return _Reader(data).run()
    except (IndexError, struct.error, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f"The stream of objects is damaged ({type(error).__name__}).") from error


class _Reader:
    def __init__(self, data: bytes):
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, stack, at = self._data, self._stack, 0
        push = stack.append
        while True:
            code = data[at]
            if code == 0x4D:  # whole numbers of 2 bytes, and of 1: by far the most
                push(data[at + 1] | data[at + 2] << 8)
                at += 3
            elif code == 0x4B:
                push(data[at + 1])
                at += 2
            elif code == 0x2E:
                return stack.pop()
            else:
                self._at = at + 1
                try:
                    act = _ACTIONS[code]
                except KeyError:
                    raise ValueError(f"The stream of objects has the instruction {bytes([code])!r}, which plain data "
                                     "do not need. Nothing of it was run.") from None
                act(self)
                at = self._at

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        value, = struct.unpack_from(form, self._data, self._at)
        self._at += size
        return value

    def take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise IndexError(count)
        found = self._data[self._at:self._at + count]
        self._at += count
        return found

    def line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise IndexError(self._at)
        found = self._data[self._at:end].decode()
        self._at = end + 1
        return found

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def pop_to_mark(self) -> list[Any]:
        begin = len(self._stack) - 1
        while self._stack[begin] is not _MARK:
            begin -= 1
        found = self._stack[begin + 1:]
        del self._stack[begin:]
        return found

    def remember(self, place: int) -> None:
        self._memo[place] = self._stack[-1]
        if isinstance(self._stack[-1], _Unbuilt):
            self._stack[-1].places.append(place)

    def remember_next(self) -> None:
        self.remember(len(self._memo))

    def recall(self, place: int) -> None:
        if place not in self._memo:
            raise IndexError(place)
        self._stack.append(self._memo[place])

    def append_all(self, items: list[Any]) -> None:
        self._stack[-1].extend(items)

    def set_all(self, items: list[Any]) -> None:
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        name = function.name
        if name in _RECONSTRUCT and arguments[0].name == "numpy ndarray":
            self.push(_Unbuilt("array"))
        elif name == "numpy dtype":
            self.push(_Unbuilt("dtype", _text(arguments[0])))
        elif name in _SCALAR:
            self.push(np.frombuffer(arguments[1], _plain(arguments[0]))[0])
        elif name in _FROM_BUFFER:
            contents, dtype, shape, order = arguments
            self.push(np.frombuffer(contents, _plain(dtype)).copy().reshape(shape, order=order))
        elif name == "_codecs encode" and arguments[1:] in (("latin1",), ("latin-1",)):
            self.push(arguments[0].encode("latin-1"))
        else:
            raise TypeError(name)

    def build(self) -> None:
        state, unbuilt = self.pop(), self.pop()
        if unbuilt.kind == "dtype":
            order = _text(state[1])
            made: Any = np.dtype(unbuilt.argument)
            made = made.newbyteorder(order) if order in "<>" else made
        else:
            _, shape, dtype, is_fortran, contents = state
            if isinstance(contents, list):
                if not dtype.hasobject:
                    raise ValueError("The stream of objects is damaged (a list for numbers).")
                made = np.empty(len(contents), object)
                made[:] = contents
            else:
                made = np.frombuffer(contents, _plain(dtype)).copy()
            made = made.reshape(shape, order="F" if is_fortran else "C")
        for place in unbuilt.places:
            self._memo[place] = made
        self.push(made)


def _plain(dtype: np.dtype) -> np.dtype:
    if dtype.hasobject:
        raise ValueError("The stream of objects is damaged (bytes for objects).")
    return dtype


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _global_of_stack(reader: _Reader) -> _Global:
    name, module = reader.pop(), reader.pop()
    return _Global(f"{module} {name}")


# By instruction, as `pickletools` lists them: protocol, marks, numbers, texts, bytes, containers, memory, names.
_ACTIONS: dict[int, Any] = {
    0x80: lambda reader: reader.take(1),
    0x95: lambda reader: reader.take(8),
    ord("("): lambda reader: reader.push(_MARK),
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("J"): lambda reader: reader.push(reader.number("<i")),
    0x8A: lambda reader: reader.push(int.from_bytes(reader.take(reader.number("<B")), "little", signed=True)),
    ord("G"): lambda reader: reader.push(reader.number(">d")),
    ord("X"): lambda reader: reader.push(reader.take(reader.number("<I")).decode()),
    0x8C: lambda reader: reader.push(reader.take(reader.number("<B")).decode()),
    0x8D: lambda reader: reader.push(reader.take(reader.number("<Q")).decode()),
    ord("U"): lambda reader: reader.push(reader.take(reader.number("<B"))),
    ord("T"): lambda reader: reader.push(reader.take(reader.number("<i"))),
    ord("C"): lambda reader: reader.push(reader.take(reader.number("<B"))),
    ord("B"): lambda reader: reader.push(reader.take(reader.number("<I"))),
    0x8E: lambda reader: reader.push(reader.take(reader.number("<Q"))),
    0x96: lambda reader: reader.push(reader.take(reader.number("<Q"))),
    ord("]"): lambda reader: reader.push([]),
    ord("a"): lambda reader: reader.append_all([reader.pop()]),
    ord("e"): lambda reader: reader.append_all(reader.pop_to_mark()),
    ord("}"): lambda reader: reader.push({}),
    ord("s"): lambda reader: reader.set_all([reader.pop(), reader.pop()][::-1]),
    ord("u"): lambda reader: reader.set_all(reader.pop_to_mark()),
    ord(")"): lambda reader: reader.push(()),
    0x85: lambda reader: reader.push((reader.pop(),)),
    0x86: lambda reader: reader.push((reader.pop(), reader.pop())[::-1]),
    0x87: lambda reader: reader.push((reader.pop(), reader.pop(), reader.pop())[::-1]),
    ord("t"): lambda reader: reader.push(tuple(reader.pop_to_mark())),
    ord("q"): lambda reader: reader.remember(reader.number("<B")),
    ord("r"): lambda reader: reader.remember(reader.number("<I")),
    0x94: lambda reader: reader.remember_next(),
    ord("h"): lambda reader: reader.recall(reader.number("<B")),
    ord("j"): lambda reader: reader.recall(reader.number("<I")),
    ord("c"): lambda reader: reader.push(_Global(f"{reader.line()} {reader.line()}")),
    0x93: lambda reader: reader.push(_global_of_stack(reader)),
    ord("R"): lambda reader: reader.call(),
    ord("b"): lambda reader: reader.build(),
}
