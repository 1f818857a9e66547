"""Serialization of functions and values between the processes of a cluster: the only file that pickles.

Unpickled bytes come from a process that has proved to have the cluster's key, never from a file. Functions of a script
travel by value (cloudpickle), arrays as raw buffers (PEP 574). A value that a worker needs repeatedly, such as a model
or the arrays of `fit`, is a `Resource`: it travels once, and by its key from then on.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

_LEAST_BUFFER = 2**14  # minimum bytes of an array with a separate buffer


class Packed(NamedTuple):
    """A value as bytes.

    Attributes:
      data: the pickled value, without its large arrays.
      buffers: the bytes of these arrays, uint8.
    """

    data: bytes
    buffers: list[np.ndarray]


class Resource(NamedTuple):
    """A value that every worker holds at most once.

    Attributes:
      key: a key that is unique in the cluster.
      build: returns the value from the receiving `Worker`. Called in this worker when a function first names it.
    """

    key: str
    build: Callable[[Any], Any]


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[Any], resources: dict[str, Resource]):
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: self._keeps_in_band(buffer))
        self._buffers, self._resources = buffers, resources

    def _keeps_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LEAST_BUFFER:
            return True
        self._buffers.append(np.frombuffer(raw, np.uint8))
        return False

    def persistent_id(self, value: object) -> str | None:
        as_resource = getattr(type(value), "__as_resource__", None)
        resource = None if as_resource is None else as_resource(value)
        if resource is None:
            return None
        self._resources[resource.key] = resource
        return resource.key


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed, find: Callable[[str], Any] | None):
        super().__init__(io.BytesIO(packed.data), buffers=packed.buffers)
        self._find = find

    def persistent_load(self, key: str) -> Any:
        if self._find is None:
            raise RuntimeError(f"This process holds no resources, and was sent {key!r}.")
        return self._find(key)


def pack(value: object) -> tuple[Packed, dict[str, Resource]]:
    """Returns a value as bytes, and the resources that it names."""
    file = io.BytesIO()
    buffers: list[np.ndarray] = []
    resources: dict[str, Resource] = {}
    _Pickler(file, buffers, resources).dump(value)
    return Packed(file.getvalue(), buffers), resources


def unpack(packed: Packed, find: Callable[[str], Any] | None = None) -> Any:
    """Returns the value of bytes from `pack`, with resources from `find`; None for a process without resources."""
    return _Unpickler(packed, find).load()
