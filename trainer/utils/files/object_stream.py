"""Plain data that NumPy and Python wrote with `pickle`, read without running any code that the stream names.

Owns the names that a stream may request, NumPy's array functions, and their replacements: methods that check their
arguments and make an array, a number or bytes. No name is imported, and a stream cannot reach any class.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

_KINDS = "biufcSUO"  # of dtypes: numbers, texts and objects. Others have fields or metadata.


def parse(data: bytes) -> Any:
    """Returns the object of a stream of any protocol. Text of Python 2 is returned as bytes.

    Arrays may be of a subclass of `np.ndarray`; `np.asarray` converts them.

    Args:
      data: stream.

    Raises:
      ValueError: if the stream requests other than plain data, or is damaged.

    >>> parse(b"\\x80\\x02]q\\x00(K\\x01K\\x02e.")
    [1, 2]
    """
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged stream makes `pickle` raise any
        raise ValueError(f"The stream of objects cannot be read ({type(error).__name__}: {error}). Nothing of it was "
                         "run.") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A stream can set attributes of the returned objects, but attributes of bound methods cannot be set.
        known = {
            "numpy.core.multiarray._reconstruct": self._new_array,
            "numpy.core.multiarray.scalar": self._scalar,
            "numpy.core.numeric._frombuffer": self._array,
            "numpy.dtype": self._dtype,
            "numpy.ndarray": None,
            "_codecs.encode": self._bytes,
        }
        path = f"{module}.{name}"
        try:
            return known[path.replace("numpy._core.", "numpy.core.")]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {path}, which plain data do not need") from None

    def _new_array(self, cls: None, shape: Any, kind: Any) -> _Array:
        return _Array(0)

    def _scalar(self, dtype: _Dtype, contents: bytes) -> np.generic:
        return np.frombuffer(contents, dtype.dtype).reshape(1)[0]

    def _array(self, contents: bytes | list[Any], dtype: _Dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
        return _array(contents, dtype, shape, order)

    def _dtype(self, name: str | bytes, align: bool = False, copy: bool = False) -> _Dtype:
        return _Dtype(np.dtype(_text(name)))

    def _bytes(self, text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"it has bytes in the encoding {encoding!r}")
        return text.encode("latin-1")


class _Dtype:
    """A dtype whose byte order follows in a later instruction; NumPy's own would accept fields and flags too."""

    def __init__(self, dtype: np.dtype):
        if dtype.kind not in _KINDS:
            raise pickle.UnpicklingError(f"it has the dtype {dtype}, which plain data do not need")
        self.dtype = dtype

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        fields = state[2:5]
        if fields != (None, None, None):
            raise pickle.UnpicklingError("it has a dtype with fields, which plain data do not need")
        order: Any = _text(state[1])
        self.dtype = self.dtype.newbyteorder(order)


class _Array(np.ndarray):
    """An array whose shape and content follow in a later instruction."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, contents = state
        made: Any = _array(contents, dtype, shape, "F" if is_fortran else "C")
        super().__setstate__(made.__reduce__()[2])


def _array(contents: bytes | list[Any], dtype: _Dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    if dtype.dtype.hasobject:
        made = np.empty(len(contents), object)
        made[:] = contents
    else:
        made = np.frombuffer(contents, dtype.dtype).copy()  # type: ignore[arg-type]
    return made.reshape(shape, order=order)


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value
