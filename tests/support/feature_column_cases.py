"""Records of TensorFlow's feature columns, and this project's columns made from the recorded descriptions."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np

from trainer.estimator import feature_columns

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "feature_columns.json").read_text(
    encoding="utf-8"))
FUNCTIONS = {"shift_and_scale": lambda x: (x - 3.0) / 4.2, "square": lambda x: x * x, "shift_sparse": lambda x: x - 3.0}


def made(spec, folder):
    """Returns the object that a nested dict of calls describes."""
    if isinstance(spec, list):
        return [made(part, folder) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if "file" in spec:
        path = folder / "words.txt"
        path.write_text("\n".join(spec["file"]) + "\n")
        return path
    if "function" in spec:
        return FUNCTIONS[spec["function"]]
    if "dtype" in spec:
        return spec["dtype"]
    kwargs = {name: made(value, folder) for name, value in spec["kwargs"].items()}
    return getattr(feature_columns, spec["call"])(*made(spec["args"], folder), **kwargs)


def made_columns(specs, folder):
    columns = []
    for column in made(specs, folder):
        columns += column if isinstance(column, list) else [column]
    return columns


def arrays(features):
    """Returns features as users have them: words in arrays of objects or of fixed width, None as NaN."""
    found = {}
    for key, values in features.items():
        array = np.array(values)
        found[key] = array.astype(np.float32) if array.dtype == object else array
    return found


def nested(flat):
    """Returns parameters of paths as Flax has them."""
    tree = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = jnp.asarray(value, jnp.float32)
    return tree


def our_path(path):
    """Returns this project's path of a weight of TensorFlow's."""
    if "/" not in path:
        return f"{path}/embedding"  # a shared table
    return path.replace("embedding_weights", "embedding")
