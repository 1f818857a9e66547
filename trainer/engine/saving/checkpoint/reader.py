"""Reads a checkpoint: the document, and the arrays onto any devices.

Owns the checks before a restore: the files are complete and the arrays match the targets. Knows nothing of the choice
of a checkpoint, or of the meaning of a state or a document.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from trainer.core import errors, plain
from trainer.core.files import read_json, storage
from trainer.engine.saving.arrays import safetensors_file
from trainer.engine.saving.checkpoint import array_shards, layout, orbax_arrays, processes
from trainer.engine.saving.checkpoint.manifest import CheckpointError, check_manifest, data_folder


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `open_checkpoint` returns it.

    Attributes:
      path: folder of the checkpoint.
      document: plain value that was saved with the arrays.
      specs: shape and dtype of each array by name.
      processes: number of processes that have written the arrays.
      folder: folder of the files.
      is_orbax: whether the arrays are in Orbax's files.
    """

    path: str
    document: Any
    specs: Mapping[str, layout.Spec]
    processes: int
    folder: str
    is_orbax: bool

    def targets_here(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns targets for `restore` of all arrays, whole on this process's first device."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for name, (shape, dtype) in self.specs.items()}

    def restore(self, targets: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the arrays with the placement of their targets. All processes call it, and each reads its shards.

        Besides the arrays themselves, host memory holds one array at a time.

        Args:
          targets: target of each array by name: a `jax.ShapeDtypeStruct` with a sharding, or an array with the desired
            shape, dtype and sharding. The devices may differ in kind and number from the saved devices.

        Raises:
          TypeError: if a target has no sharding.
          CheckpointError: unless names, shapes and dtypes equal the checkpoint's. The message lists them. Also if
            another process could not read its shards.
          ValueError: if the files are inconsistent, which `open_checkpoint` does not check.
        """
        structs = {name: _struct_of(name, target) for name, target in targets.items()}
        self._check_same({name: (struct.shape, np.dtype(struct.dtype)) for name, struct in structs.items()})
        restored: dict[str, jax.Array] = {}
        failure: Exception | None = None
        try:
            with errors.naming_file(self.path):
                restored = (self._from_orbax if self.is_orbax else self._from_shards)(structs)
        except Exception as error:
            failure = error
        processes.raise_together(failure)  # otherwise a process could delete files that another still reads
        return restored

    def _from_shards(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        index = array_shards.read_index(os.path.join(self.folder, layout.STATE), self.processes)
        with array_shards.ShardFiles() as files:
            return {name: array_shards.read_array(index[name], struct, files) for name, struct in structs.items()}

    def _from_orbax(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        def nothing(struct: jax.ShapeDtypeStruct) -> jax.Array:  # which Orbax does not write
            return jax.make_array_from_callback(struct.shape, struct.sharding, lambda index: np.zeros(
                struct.shape, struct.dtype)[index])

        tree = orbax_arrays.OrbaxTree(os.path.join(self.folder, layout.ORBAX))
        read = tree.read({name: struct.sharding for name, struct in structs.items() if struct.size})
        return {name: read[name] if name in read else nothing(struct) for name, struct in structs.items()}

    def _check_same(self, wanted: Mapping[str, layout.Spec]) -> None:
        missing = [name for name in wanted if name not in self.specs]
        unexpected = [name for name in self.specs if name not in wanted]
        different = [f"{name} (checkpoint: {_text_of(self.specs[name])}, wanted: {_text_of(spec)})"
                     for name, spec in wanted.items() if name in self.specs and self.specs[name] != spec]
        if missing or unexpected or different:
            lines = [*errors.listed("missing from the checkpoint", missing, unexpected),
                     *errors.listed("in the checkpoint but not wanted", unexpected),
                     *errors.listed("of another shape or dtype", different)]
            raise CheckpointError(f"The arrays of the checkpoint {self.path!r} do not match the wanted arrays.\n"
                                  + "\n".join(lines))


def open_checkpoint(path: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
    """Opens a checkpoint: checks all of its files and reads its document. `restore` reads the arrays.

    Args:
      path: folder of the checkpoint.
      verify: whether to check the files, which reads each file once. Pass False for a checkpoint that was just checked.

    Raises:
      FileNotFoundError: if there is no such folder.
      NewerFormatError: if a newer version of the trainer has written it.
      CheckpointError: if a file is missing, truncated or changed. The message names it.

    >>> from trainer.engine.saving.checkpoint import CheckpointWriter
    >>> with CheckpointWriter() as writer:
    ...     writer.save("step_3", {"up/bias": jax.numpy.arange(3)}, {"epoch": 1})
    >>> checkpoint = open_checkpoint("step_3")
    >>> checkpoint.document, checkpoint.specs
    ({'epoch': 1}, {'up/bias': ((3,), dtype('int32'))})
    >>> checkpoint.restore({"up/bias": jax.numpy.zeros(3, "int32")})
    {'up/bias': Array([0, 1, 2], dtype=int32)}
    """
    path = storage.absolute(path)
    if verify:
        check_manifest(path)
    folder = data_folder(path)
    with errors.naming_file(path):
        content = read_json(os.path.join(folder, layout.DOCUMENT), path)
        with safetensors_file.read_arrays(os.path.join(folder, layout.DOCUMENT_ARRAYS), path) as arrays:
            document = plain.decode(content["document"], dict(arrays))
        return Checkpoint(path, document, layout.specs_from_json(content["arrays"]), content[layout.PROCESSES],
                          folder, bool(content.get(layout.ORBAX)))


def _struct_of(name: str, target: Any) -> jax.ShapeDtypeStruct:
    if getattr(target, "sharding", None) is None or not hasattr(target, "dtype"):
        raise errors.wrong_type(f"targets[{name!r}]", target,
                                "a `jax.ShapeDtypeStruct` with a sharding, or a JAX array")
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)


def _text_of(spec: layout.Spec) -> str:
    return f"{spec[1]}{spec[0]}"
