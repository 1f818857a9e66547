"""Exact conversion of plain values to JSON and arrays, and back.

Owns the values that a checkpoint's document may hold and their encoding. Knows nothing of files. Reading yields only
data: no class is looked up by name and nothing is unpickled.

JSON values are encoded as themselves, and other values as an object with a tag: `{"tuple": [1, 2]}`.
"""

from __future__ import annotations

import base64
import importlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_EXACT_IN_JSON = 2**63  # longer whole numbers are written in hexadecimal: Python parses no decimals of any length
# Arrays of these are kept as they are, any others as bytes.
_STORED_AS_THEY_ARE = frozenset(["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
                                 "float16", "bfloat16", "float32", "float64", "complex64"])
_ALLOWED = ("a dict with keys of type str or int, a list, a tuple, None, a bool, an int, a float, a str, bytes, a "
            "NumPy array or scalar, a JAX array, or a tensor of torch")


def encode(tree: object, name: str = "document") -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a plain value as JSON-serializable data, and its arrays by number.

    Args:
      tree: dicts with keys of type str or int, lists and tuples of None, bool, int, float, str, bytes, NumPy arrays and
        scalars of any dtype but object, JAX arrays, and torch's tensors of NumPy's dtypes. Subclasses of these types,
        such as named tuples, are rejected because they would be restored as another type.
      name: name of the value in error messages.

    Returns:
      Input for `json.dumps`, and copies of the arrays, which are independent of later changes to the originals.

    Raises:
      TypeError: if the tree has any other value. The message names its position.
      ValueError: if a container contains itself, or containers are nested some hundred deep.

    >>> jsonable, arrays = encode({"best": float("inf"), "span": (1, 2), "mean": np.zeros(3, np.float32)})
    >>> jsonable
    {'dict': {'best': {'float': '7ff0000000000000'}, 'span': {'tuple': [1, 2]}, 'mean': {'array': '0'}}}
    >>> arrays
    {'0': array([0., 0., 0.], dtype=float32)}
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        return _encoded(tree, name, arrays), arrays
    except RecursionError:
        raise ValueError(f"`{name}` has containers that hold themselves, or that are nested too deep to be "
                         "saved.") from None


def decode(jsonable: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the value that was passed to `encode`. A JAX array is returned as a NumPy array, a tensor as a tensor.

    Args:
      jsonable: data returned by `encode`, before or after a JSON round trip.
      arrays: arrays returned by `encode`.

    Raises:
      ValueError: if `jsonable` is not from `encode`, or an array is missing.
      ImportError: if there is a tensor of torch, which is not installed.

    >>> decode(*encode({"patience": (3, np.float32(0.5))}))
    {'patience': (3, np.float32(0.5))}
    """
    try:
        return _decoded(jsonable, arrays)
    except (LookupError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"The document is not one that was saved here: {error!r}.") from error


def _encoded(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    kind = type(value)  # not isinstance: a subclass has more content than could be restored
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_EXACT_IN_JSON <= value < _EXACT_IN_JSON else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [_encoded(item, f"{name}[{index}]", arrays) for index, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_encoded(item, f"{name}[{index}]", arrays) for index, item in enumerate(value)]}
    if kind is dict:
        return _encoded_dict(value, name, arrays)
    if kind in (np.str_, np.bytes_):  # other conversions lose zeros at their ends
        return {"numpy": _encoded("".join(value) if kind is np.str_ else b"".join([value]), name, arrays)}
    if isinstance(value, np.generic):
        return {"scalar": [_dtype_as_json(value.dtype, name), value.tobytes().hex()]}
    if kind is np.ndarray or isinstance(value, jax.Array):
        return _encoded_array(_on_host(value, name), name, arrays)
    if _type_name(kind) == "torch.Tensor":  # such as the state of a generator of random numbers
        return {"torch": _encoded_array(np.array(value.detach().cpu().numpy()), name, arrays)}
    raise TypeError(f"`{name}` is of type {_type_name(kind)}, which a checkpoint cannot hold. It can hold {_ALLOWED}."
                    f"{_hint(value)}")


def _encoded_dict(value: dict[Any, Any], name: str, arrays: dict[str, np.ndarray]) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"`{name}` has the key {key!r} of type {_type_name(type(key))}. The keys of a dict in a "
                            "checkpoint are of type str or int.")
    items = [(key, _encoded(item, f"{name}[{key!r}]", arrays)) for key, item in value.items()]
    if all(type(key) is str for key in value):
        return {"dict": dict(items)}
    return {"items": [[_encoded(key, name, arrays), item] for key, item in items]}


def _encoded_array(value: np.ndarray, name: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    number = str(len(arrays))
    if value.dtype.name in _STORED_AS_THEY_ARE and value.dtype.isnative:
        arrays[number] = value
        return {"array": number}
    node = {"array": number, "dtype": _dtype_as_json(value.dtype, name), "shape": list(value.shape)}
    arrays[number] = np.frombuffer(value.tobytes(), np.uint8)
    return node


def _on_host(value: object, name: str) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` is a value that JAX is tracing. Only a computed array can be saved.")
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise TypeError(f"`{name}` is a random key, which a checkpoint cannot hold. Save `jax.random.key_data` of "
                            "it, and make a key again with `jax.random.wrap_key_data`.")
        if not (value.is_fully_addressable or value.is_fully_replicated):
            raise TypeError(f"`{name}` is a JAX array that is split over several processes. Save it among the state's "
                            "arrays.")
    return np.array(value, copy=True, order="C", subok=False)


def _dtype_as_json(dtype: np.dtype, name: str) -> Any:
    described = dtype.name if dtype.isbuiltin == 2 else _as_lists(np.lib.format.dtype_to_descr(dtype))
    if dtype.hasobject or _dtype_of(described) != dtype:
        raise TypeError(f"`{name}` has the dtype {dtype}, which a checkpoint cannot hold.")
    return described


def _dtype_of(described: Any) -> np.dtype:
    if isinstance(described, str):
        return np.dtype(described)
    return np.lib.format.descr_to_dtype(_as_fields(described))


def _as_lists(described: Any) -> Any:
    return [_as_lists(part) for part in described] if isinstance(described, (list, tuple)) else described


def _as_fields(described: Any) -> Any:
    """Returns a structured dtype's description in NumPy's form, a list of tuples."""
    if isinstance(described, str):
        return described
    if len(described) == 2 and isinstance(described[1], list) and all(type(size) is int for size in described[1]):
        return (_as_fields(described[0]), tuple(described[1]))  # a dtype that is an array of another
    fields = []
    for field, item, *shape in described:
        fields.append((tuple(field) if isinstance(field, list) else field, _as_fields(item), *map(tuple, shape)))
    return fields


def _decoded(node: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(node, list):
        return [_decoded(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {key: _decoded(item, arrays) for key, item in node["dict"].items()}
    if "items" in node:
        return {_decoded(key, arrays): _decoded(item, arrays) for key, item in node["items"]}
    if "tuple" in node:
        return tuple(_decoded(item, arrays) for item in node["tuple"])
    if "int" in node:
        return int(node["int"], 16)
    if "float" in node:
        return struct.unpack(">d", bytes.fromhex(node["float"]))[0]
    if "bytes" in node:
        return base64.b64decode(node["bytes"])
    if "numpy" in node:
        item = _decoded(node["numpy"], arrays)
        return np.str_(item) if isinstance(item, str) else np.bytes_(item)
    if "scalar" in node:
        described, data = node["scalar"]
        return _array_of(bytes.fromhex(data), _dtype_of(described), ())[()]
    if "torch" in node:
        return importlib.import_module("torch").from_numpy(np.array(_decoded(node["torch"], arrays)))
    array = arrays[node["array"]]
    if "dtype" in node:
        return _array_of(array.tobytes(), _dtype_of(node["dtype"]), tuple(node["shape"]))
    return array


def _array_of(data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if not data and 0 in (*shape, dtype.itemsize):  # as NumPy makes no array of an empty buffer
        return np.zeros(shape, dtype)
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # of a bytearray, as the result is to be writeable


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(value: object) -> str:
    if isinstance(value, np.ndarray):
        return " Convert it with `np.array(value, subok=False)`."
    for base in (dict, list, tuple, bool, int, float, str, bytes):
        if isinstance(value, base):
            return f" Convert it with `{base.__name__}(...)`, and back after the restore."
    return ""
