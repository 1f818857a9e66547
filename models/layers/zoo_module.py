"""The base of the modules that `trainer.models` exports: checks of their attributes, and errors with hints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flax import linen as nn

from trainer.core.calls.entry_points import foreign_arguments
from trainer.models.layers.checks import check

_WEIGHTS = ("Models start with random weights. Build the model; then `trainer.models.load_keras_weights(model, file)` "
            "or `load_torch_weights` reads a file.")
_HINTS = {
    "weights": _WEIGHTS,
    "pretrained": _WEIGHTS,
    "input_shape": "The first rows give it: `model.build(x[:1])`.",
    "input_tensor": "Call the module in the module of yours: `ResNet50(include_top=False)(x, training)`.",
    "*": "Give the arguments by name, such as `num_classes=10`.",
}
# Attributes, and their names in Keras, PyTorch and Hugging Face. A module has the first of several attributes.
_ELSEWHERE = {
    "num_classes": ("classes", "n_classes", "num_labels", "num_outputs", "output_dim"),
    "features": ("filters", "channels", "out_channels"),
    "d_model": ("hidden_size", "hidden_dim", "n_embd", "embed_dim", "embedding_dim", "dim", "units"),
    "hidden": ("units", "hidden_size", "hidden_sizes", "hidden_units", "hidden_dim", "hidden_layer_sizes", "layers"),
    "width": ("hidden_size", "embed_dim", "dim"),
    "num_layers": ("n_layer", "n_layers", "num_hidden_layers", "num_blocks", "layers", "depth"),
    "depth": ("num_layers", "num_hidden_layers", "layers"),
    "num_heads": ("n_head", "n_heads", "nhead", "num_attention_heads", "heads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "mlp_dim": ("intermediate_size", "n_inner", "dim_feedforward", "d_ff", "ffn_dim"),
    "mlp_width": ("intermediate_size", "mlp_dim"),
    "max_len": ("max_position_embeddings", "n_positions", "max_length", "maxlen", "block_size", "context_length",
                "sequence_length", "seq_len"),
    "vocab_size": ("n_vocab", "vocabulary_size", "num_tokens", "input_dim"),
    "num_types": ("type_vocab_size",),
    "mask_token": ("pad_token_id", "padding_idx"),
    "dropout_rate": ("dropout", "rate", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop"),
    "tied_embedding": ("tie_word_embeddings", "tie_weights"),
    "norm_epsilon": ("rms_norm_eps",),
    "attention": ("attn_implementation",),
    "image_shape": ("input_shape", "image_size", "img_size"),
    "latent_dim": ("z_dim", "latent_size", "encoding_dim"),
}


class ZooModule(nn.Module):
    """Base module whose constructor checks its attributes, and knows their names in other libraries.

    Raises:
      TypeError: if an argument is unknown; its name here, or similar names, are in the message.
      ValueError: if an attribute of a subclass is invalid.
    """

    def __init_subclass__(cls, kw_only: bool = False, **kwargs: Any):
        super().__init_subclass__(kw_only=kw_only, **kwargs)
        hints = {**_HINTS, **_names_of(cls.__dataclass_fields__)}
        foreign_arguments(hints)(cls)

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()


def _names_of(attributes: Iterable[str]) -> dict[str, str]:
    """Returns a hint for each name in other libraries of the attributes of a module."""
    hints: dict[str, str] = {}
    for ours, theirs in _ELSEWHERE.items():
        if ours in attributes:
            for name in theirs:
                hints.setdefault(name, f"Give `{ours}`.")
    return hints
