"""Embeddings for TensorBoard's projector: their vectors as TSV files, and the file that lists them.

Owns those files. Knows nothing of training or of the parameter tree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import numpy as np

from trainer.core.files import local_file, replace_file, storage

CONFIG_NAME = "projector_config.pbtxt"  # where the projector looks


def metadata_by_embedding(embeddings: list[str], metadata: str | Mapping[str, str] | None) -> dict[str, str]:
    """Returns the metadata file of each embedding that has a metadata file.

    Args:
      embeddings: names of all embeddings.
      metadata: a file for all embeddings, or files by name.

    Raises:
      ValueError: if `metadata` has an unknown embedding.

    >>> metadata_by_embedding(["words", "tags"], {"words": "words.tsv"})
    {'words': 'words.tsv'}
    """
    if isinstance(metadata, Mapping):
        unknown = sorted(set(metadata) - set(embeddings))
        if unknown:
            raise ValueError(f"Unrecognized embedding names in `embeddings_metadata`: {unknown}. "
                             f"The model's embeddings: {embeddings}.")
        return dict(metadata)
    return {} if metadata is None else dict.fromkeys(embeddings, metadata)


def write_embeddings(log_dir: str, embeddings: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the vectors of embeddings, in place of earlier vectors, and lists them for the projector.

    Args:
      log_dir: directory of TensorBoard.
      embeddings: arrays of shape (entries, features), by name.
      metadata: files with a line for each entry, by embedding name; their paths are relative to `log_dir`.
    """
    entries = []
    for name, vectors in embeddings.items():
        path = f"train/embeddings/{name.replace('/', '.')}.tsv"
        storage.make_folder(os.path.join(log_dir, os.path.dirname(path)))
        with local_file(os.path.join(log_dir, path)) as local:
            np.savetxt(local, vectors.astype(np.float64), fmt="%.7g", delimiter="\t")
        fields = {"tensor_name": name, "tensor_path": path}
        if name in metadata:
            fields["metadata_path"] = metadata[name]
        # The text form of a protobuf string has the same escapes as JSON.
        lines = [f"  {field}: {json.dumps(value, ensure_ascii=False)}\n" for field, value in fields.items()]
        entries.append("embeddings {\n" + "".join(lines) + "}\n")
    replace_file(os.path.join(log_dir, CONFIG_NAME), "".join(entries))
