"""Configurations of Hugging Face's models: `config.json` makes a module, and a module makes `config.json`.

Owns the meaning of its keys. A key with another meaning than the module's is an error that names it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import linen as nn

from trainer.core.arguments import as_dtype, as_path
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import brief, naming_file
from trainer.core.files import read_json
from trainer.models.text.llama import Llama3Scaling
from trainer.models.weights.hf_families import FAMILIES, Family, family_of

CONFIG_NAME = "config.json"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_SCALING = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_len"}


@explains_arguments
def from_hf(folder: str | os.PathLike[str], **attributes: Any) -> nn.Module:
    """Returns the module that the configuration of a model of Hugging Face describes, without weights.

    GPT-2 becomes a `TransformerLM`, Llama 2 and 3 a `Llama`, BERT a `TransformerEncoder`, and ViT a `ViT`. A classifier
    returns logits, as in `transformers`; BERT without a classifier returns the pooler's outputs, and ViT all tokens.
    `load_hf_weights` loads the weights. Dropout has the configuration's rate; attention weights are not dropped.

    Args:
      folder: the folder with `config.json`, or that file.
      **attributes: attributes of the module that override the configuration, such as `max_len=2048`, `num_classes=5` or
        `dtype=jnp.bfloat16`. Parameters are float32; `param_dtype="auto"` keeps the dtype that the configuration names.

    Raises:
      ValueError: if the configuration is of another family, or has a key whose value the module does not support, or
        `param_dtype` is not floating-point.
      TypeError: if the module has no such attribute, or `folder` is not a path.
      OSError: if the file cannot be read.

    Example:

    >>> import json, pathlib
    >>> config = {"model_type": "llama", "vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 32}
    >>> _ = pathlib.Path("config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    >>> module = from_hf(".", max_len=64)
    >>> type(module).__name__, module.d_model, module.max_len
    ('Llama', 32, 64)
    """
    path = as_path("folder", folder, "the path of a folder")
    path = os.path.join(path, CONFIG_NAME) if os.path.isdir(path) else path
    check_exists(path)
    config, family = _read(path)
    with naming_file(path):
        known = _attributes(path, config, family)
    if (param_dtype := attributes.get("param_dtype")) is not None:
        if isinstance(param_dtype, str) and param_dtype == "auto":
            param_dtype = config.get("dtype", config.get("torch_dtype")) or "float32"
        attributes["param_dtype"] = float_dtype("param_dtype", param_dtype)
    return family.module(**{**known, **attributes})


def check_exists(path: str) -> None:
    """Checks that a folder or a file exists, and says how to write such a folder.

    Raises:
      FileNotFoundError: if there is nothing at the path.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no {path!r}, and nothing is downloaded. Expected: a folder with "
                                f"{CONFIG_NAME!r} and safetensors files. In transformers, "
                                "`AutoModelForCausalLM.from_pretrained(name).save_pretrained(folder)` writes it.")


def float_dtype(argument: str, dtype: Any) -> np.dtype:
    """Returns a dtype in which weights are kept: of floating-point numbers of at least 16 bits.

    Raises:
      TypeError: if it is not a dtype.
      ValueError: if it is another dtype.

    >>> float_dtype("dtype", "bfloat16")
    dtype(bfloat16)
    """
    found = as_dtype(argument, dtype)
    if found.name not in _FLOATS:
        raise ValueError(f"`{argument}` must be one of {', '.join(map(repr, _FLOATS))}. Received: {found.name!r}.")
    return found


def check_config(folder: str, module: nn.Module) -> None:
    """Checks that the configuration in a folder, if there is one, gives the module's outputs.

    Raises:
      ValueError: if it does not; the message names the attributes.
    """
    path = os.path.join(folder, CONFIG_NAME)
    if not os.path.exists(path):
        return
    config, family = _read(path)
    if family is not family_of(module):
        raise ValueError(f"{path!r} describes a {family.module.__name__}. Received: a model of "
                         f"{type(module).__name__}.")
    with naming_file(path):
        known = _attributes(path, config, family)
    described = family.module(**known)
    differing = [f"{key.ours}={_value(described, key.ours)!r} (the model's is {_value(module, key.ours)!r})"
                 for key in family.keys if key.changes_outputs
                 and _value(described, key.ours) != _value(module, key.ours)]
    if differing:
        raise ValueError(f"The weights are for a model with {', '.join(differing)}, by {path!r}. Make the module with "
                         "`models.from_hf(folder)`, or with these attributes.")


def config_of(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> dict[str, Any]:
    """Returns the configuration of a module.

    Args:
      module: the module.
      shapes: shapes of its parameters by path.
      dtype: dtype of the saved parameters.

    Raises:
      TypeError: if the module is of no family.
      ValueError: if images are not square.
    """
    family = family_of(module)
    has_head = getattr(module, "include_top", True)
    config: dict[str, Any] = {"model_type": family.name, "architectures": [family.headed if has_head else family.body]}
    config |= {name: allowed[0] for name, (allowed, _) in family.constants.items()}
    config |= {key.theirs: _value(module, key.ours) for key in family.keys}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Llama3Scaling):
        config["rope_scaling"] = {"rope_type": "llama3", **{
            theirs: getattr(scaling, ours) for theirs, ours in _SCALING.items()}}
    if has_head and hasattr(module, "num_classes"):
        labels = {str(number): f"LABEL_{number}" for number in range(module.num_classes)}
        config |= {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
    if family.name == "vit":
        side = math.isqrt(shapes["pos_embed"][1] - 1)
        if side**2 != shapes["pos_embed"][1] - 1:
            raise ValueError("`transformers` reads ViTs for square images. Received: a model for images of "
                             f"{shapes['pos_embed'][1] - 1} patches. Build it with square images.")
        config |= {"image_size": side * module.patch_size, "num_channels": shapes["patch_embed_proj/kernel"][2]}
    return {**config, "dtype": dtype.name, "torch_dtype": dtype.name}


def _read(path: str) -> tuple[dict[str, Any], Family]:
    config = read_json(path)
    name = config.get("model_type") if isinstance(config, dict) else None
    if name not in FAMILIES:
        raise ValueError(f"{path!r} has the `model_type` {brief(repr(name))}. Expected: one of "
                         f"{', '.join(map(repr, FAMILIES))}.")
    return config, FAMILIES[name]


def _attributes(path: str, config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    config = _with_rope(path, config) if family.name == "llama" else config
    for name, (allowed, default) in family.constants.items():
        if config.get(name, default) not in allowed:
            raise _unsupported(path, name, config[name], " or ".join(map(repr, allowed)))
    attributes = {key.ours: config.get(key.theirs, key.default) for key in family.keys}
    head_dim = config.get("head_dim")
    if family.name == "llama" and head_dim not in (None, attributes["d_model"] // attributes["num_heads"]):
        raise _unsupported(path, "head_dim", head_dim, "`hidden_size / num_attention_heads`")
    if hasattr(family.module, "include_top"):
        is_classifier = family.headed in (config.get("architectures") or ())
        attributes |= {"include_top": is_classifier, "classifier_activation": None}
        if is_classifier:
            attributes["num_classes"] = len(config.get("id2label") or range(config.get("num_labels", 2)))
        elif family.name == "bert":
            attributes["pooling"] = "first"
    return attributes


def _with_rope(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with `rope_theta` and `rope_scaling` of either version of `transformers`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise _unsupported(path, "rope_type", kind, "'default' or 'llama3'")
    scaling = Llama3Scaling(**{ours: rope[theirs] for theirs, ours in _SCALING.items()}) if kind == "llama3" else None
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return {**config, "rope_theta": theta, "rope_scaling": scaling}


def _value(module: Any, attribute: str) -> Any:
    """Returns an attribute of a module, with the value that None stands for."""
    value = getattr(module, attribute)
    if value is None and attribute == "mlp_dim":
        return 4 * module.d_model
    return module.num_heads if value is None and attribute == "num_kv_heads" else value


def _unsupported(path: str, name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{path!r} has {brief(f'{name}={value!r}')}, which the module does not support. Expected: "
                      f"{expected}.")
