"""Layouts of parameters over a mesh axis: how tensor parallelism splits the Transformers.

Owns one table per architecture, which `trainer.distribute.ModelParallelStrategy` takes as it is.
"""

from __future__ import annotations

from flax import linen as nn

from trainer.core.calls.entry_points import explains_arguments
from trainer.models.text.llama import Llama
from trainer.models.text.transformer_encoder import TransformerEncoder
from trainer.models.text.transformer_lm import TransformerLM
from trainer.models.vision.vit import ViT

_AXIS = "model"
_OUTPUTS, _INPUTS, _ROWS, _BIAS = (None, _AXIS), (_AXIS, None), (_AXIS, None), (_AXIS,)
_BLOCK = {
    "attention/(query|key|value)/kernel": _OUTPUTS, "attention/(query|key|value)/bias": _BIAS,
    "attention/out/kernel": _INPUTS, "mlp_in/kernel": _OUTPUTS, "mlp_in/bias": _BIAS, "mlp_out/kernel": _INPUTS,
}
_LAYOUTS: dict[type[nn.Module], dict[str, tuple[str | None, ...]]] = {
    # Their vocabularies, of 50,257 and 30,522 tokens, divide by no usual number of devices.
    TransformerLM: _BLOCK, TransformerEncoder: _BLOCK,
    Llama: {
        "attention/(query|key|value)/kernel": _OUTPUTS, "attention/out/kernel": _INPUTS,
        "mlp_(gate|up)/kernel": _OUTPUTS, "mlp_down/kernel": _INPUTS, "(token_embedding|head)/embedding": _ROWS,
    },
    ViT: {
        "attn/qkv/kernel": _OUTPUTS, "attn/qkv/bias": _BIAS, "attn/proj/kernel": _INPUTS, "mlp_fc1/kernel": _OUTPUTS,
        "mlp_fc1/bias": _BIAS, "mlp_fc2/kernel": _INPUTS,
    },
}


@explains_arguments
def layout_map(module: nn.Module, axis: str = _AXIS) -> dict[str, tuple[str | None, ...]]:
    """Returns the layouts of a Transformer's parameters for tensor parallelism over a mesh axis.

    Each device of the axis has some of the heads and of the hidden features, as in Megatron-LM,
    https://arxiv.org/abs/1909.08053. Llama's vocabulary is split, too; other parameters are whole. The size of the axis
    should divide `num_heads`, and `num_kv_heads`. Rules can be added to the result, or removed.

    Args:
      module: a `TransformerLM`, `Llama`, `TransformerEncoder` or `ViT`.
      axis: name of the axis.

    Raises:
      TypeError: if it is another module.

    Example:

    >>> from trainer.models import Llama
    >>> layout_map(Llama())["attention/out/kernel"]
    ('model', None)
    >>> strategy = trainer.distribute.ModelParallelStrategy(  # doctest: +SKIP
    ...     {"replica": 2, "model": 4}, layout_map=layout_map(Llama()))
    """
    layouts = next((layouts for kind, layouts in _LAYOUTS.items() if isinstance(module, kind)), None)
    if layouts is None:
        raise TypeError(f"There are layouts for {', '.join(kind.__name__ for kind in _LAYOUTS)}. Received: a value of "
                        f"type {type(module).__name__}.")
    return {pattern: tuple(entry and axis for entry in layout) for pattern, layout in layouts.items()}
