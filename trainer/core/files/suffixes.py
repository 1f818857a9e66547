"""Suffixes of other programs' formats: a file that is written under such a name would fail in these programs."""

from __future__ import annotations

import os

_FORMATS = {
    ".h5": "HDF5, in which Keras saves weights", ".hdf5": "HDF5, in which Keras saves weights",
    ".keras": "Keras's models", ".onnx": "ONNX", ".pb": "TensorFlow's SavedModel",
    ".tflite": "TensorFlow Lite", ".pt": "PyTorch's files", ".pth": "PyTorch's files", ".pkl": "Python's pickles",
    ".pickle": "Python's pickles", ".npz": "NumPy's archives", ".npy": "NumPy's arrays",
    ".msgpack": "Flax's serialization", ".gguf": "llama.cpp", ".joblib": "joblib", ".zip": "ZIP archives",
    ".tar": "tape archives", ".json": "JSON",
}


def check_suffix(argument: str, path: str | os.PathLike[str], suffix: str, or_folder: bool = False,
                 written: str = "safetensors") -> None:
    """Raises ValueError for a name with the suffix of another program's format.

    Args:
      argument: name of the argument, for the error.
      path: name of the file to write.
      suffix: suffix to use instead.
      or_folder: whether a name without a suffix, for a folder, is accepted too.
      written: the format of the file.

    >>> check_suffix("filepath", "digits.safetensors", ".safetensors")
    >>> check_suffix("filepath", "digits.weights.h5", ".safetensors")
    Traceback (most recent call last):
    ValueError: `filepath` has the suffix '.h5' of HDF5, in which Keras saves weights, and safetensors would be \
written. Received: 'digits.weights.h5'. Write 'digits.weights.safetensors'.
    """
    stem, received = os.path.splitext(os.fspath(path))
    known = _FORMATS.get(received.lower())
    if known is not None:
        folder = f", or {stem!r} for a folder" if or_folder else ""
        raise ValueError(f"`{argument}` has the suffix {received!r} of {known}, and {written} would be written. "
                         f"Received: {os.fspath(path)!r}. Write {stem + suffix!r}{folder}.")
