"""Reads a checkpoint: the document, and the arrays onto any devices.

Owns the checks before anything is restored: that the files are whole and that the arrays are those that are wanted.
Knows nothing of which checkpoint to take, or of what a state or a document means.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from trainer.core import errors
from trainer.saving.arrays import safetensors_file
from trainer.saving.checkpoint import layout, parts, plain, processes
from trainer.saving.checkpoint.manifest import CheckpointError, check_manifest


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is known to be whole; `open_checkpoint` returns it.

    Attributes:
      path: its folder.
      document: the plain value that was saved with the arrays.
      specs: each array's shape and dtype by name.
      processes: how many processes have written the arrays.
    """

    path: str
    document: Any
    specs: Mapping[str, layout.Spec]
    processes: int

    def targets_here(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns targets for `restore` of all arrays, whole on this process's first device."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for name, (shape, dtype) in self.specs.items()}

    def restore(self, targets: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the arrays, each of them where its target says. All processes call it, and each reads its parts.

        Beside the arrays themselves, one at a time is in host memory.

        Args:
          targets: by name, what each array is to be: a `jax.ShapeDtypeStruct` with a sharding, or an array to take
            shape, dtype and sharding from. The devices may be others, and more or fewer, than those saved from.

        Raises:
          TypeError: if a target has no sharding.
          CheckpointError: unless names, shapes and dtypes are exactly the checkpoint's. The message lists them. Also if
            another process could not read its parts.
          ValueError: if the files contradict themselves, which `open_checkpoint` has not checked.
        """
        structs = {name: _struct_of(name, target) for name, target in targets.items()}
        self._check_same({name: (struct.shape, np.dtype(struct.dtype)) for name, struct in structs.items()})
        restored: dict[str, jax.Array] = {}
        failure: Exception | None = None
        try:
            with errors.naming_file(self.path):
                index = parts.read_index(os.path.join(self.path, layout.STATE), self.processes)
                for name, struct in structs.items():
                    restored[name] = parts.read_array(index[name], struct)
        except Exception as error:
            failure = error
        processes.raise_together(failure)  # none goes on, and deletes what another still reads
        return restored

    def _check_same(self, wanted: Mapping[str, layout.Spec]) -> None:
        missing = [name for name in wanted if name not in self.specs]
        unexpected = [name for name in self.specs if name not in wanted]
        different = [f"{name} (checkpoint: {_text_of(self.specs[name])}, wanted: {_text_of(spec)})"
                     for name, spec in wanted.items() if name in self.specs and self.specs[name] != spec]
        if missing or unexpected or different:
            lines = [*errors.listed("missing from the checkpoint", missing, unexpected),
                     *errors.listed("in the checkpoint but not wanted", unexpected),
                     *errors.listed("of another shape or dtype", different)]
            raise CheckpointError(f"The arrays of the checkpoint {self.path!r} are not those that are wanted.\n"
                                  + "\n".join(lines))


def open_checkpoint(path: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
    """Opens a checkpoint: checks all of its files and reads its document. The arrays are read by `restore`.

    Args:
      path: the checkpoint's folder.
      verify: whether to check the files, which reads each of them once. False is for a checkpoint that has just been
        checked.

    Raises:
      FileNotFoundError: if there is no such folder.
      NewerFormatError: if a newer version of the trainer has written it.
      CheckpointError: if a file is missing, cut short or changed. The message names it.

    >>> from trainer.saving.checkpoint import CheckpointWriter
    >>> with CheckpointWriter() as writer:
    ...     writer.save("step_3", {"up/bias": jax.numpy.arange(3)}, {"epoch": 1})
    >>> checkpoint = open_checkpoint("step_3")
    >>> checkpoint.document, checkpoint.specs
    ({'epoch': 1}, {'up/bias': ((3,), dtype('int32'))})
    >>> checkpoint.restore({"up/bias": jax.numpy.zeros(3, "int32")})
    {'up/bias': Array([0, 1, 2], dtype=int32)}
    """
    path = os.path.abspath(path)
    if verify:
        check_manifest(path)
    with errors.naming_file(path):
        with open(os.path.join(path, layout.DOCUMENT), encoding="ascii") as file:
            content = json.load(file)
        with safetensors_file.read_arrays(os.path.join(path, layout.DOCUMENT_ARRAYS)) as arrays:
            document = plain.decode(content["document"], dict(arrays))
        return Checkpoint(path, document, layout.specs_from_json(content["arrays"]), content[layout.PROCESSES])


def _struct_of(name: str, target: Any) -> jax.ShapeDtypeStruct:
    if getattr(target, "sharding", None) is None or not hasattr(target, "dtype"):
        raise errors.wrong_type(f"targets[{name!r}]", target,
                                "a `jax.ShapeDtypeStruct` with a sharding, or a JAX array")
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)


def _text_of(spec: layout.Spec) -> str:
    return f"{spec[1]}{spec[0]}"
