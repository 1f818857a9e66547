"""The families of Hugging Face's models whose weights and configurations are read and written, each with its tables.

Owns the names of arrays and of configuration keys on both sides. Loading and saving use the same tables.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn

from trainer.models.text.llama import Llama
from trainer.models.text.transformer_encoder import TransformerEncoder
from trainer.models.text.transformer_lm import TransformerLM
from trainer.models.vision.vit import ViT


@dataclasses.dataclass(frozen=True)
class Row:
    """The part that an array of a file and an array of a model have in common.

    Attributes:
      theirs: name of the array in the file, without the prefix of the body; "{n}" is the number of the block.
      ours: path of the array in the model.
      axes: for each axis of the model's array, the axis of the file's array; empty for the same order.
      of_theirs: the part `k` of `n` equal parts of the file's array, along the last axis of the model's array.
      of_ours: the part of the model's array, in the same way.
    """

    theirs: str
    ours: str
    axes: tuple[int, ...] = ()
    of_theirs: tuple[int, int] = (0, 1)
    of_ours: tuple[int, int] = (0, 1)

    def numbered(self, number: int) -> Row:
        """Returns the row of a block."""
        return dataclasses.replace(self, theirs=self.theirs.replace("{n}", str(number)),
                                   ours=self.ours.replace("{n}", str(number)))


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of `config.json`, and the attribute of the module.

    Attributes:
      theirs: the key.
      ours: the attribute.
      default: the default of `transformers`.
      changes_outputs: whether another value changes the outputs of the same weights, but no shape.
    """

    theirs: str
    ours: str
    default: Any
    changes_outputs: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      name: `model_type` in `config.json`.
      module: class of the zoo.
      body: class of `transformers` without a head, whose arrays have no prefix.
      headed: class of `transformers` with the head that the zoo's module has.
      prefix: prefix of the body's arrays in files of classes with a head.
      rows: arrays; each array of a block once for all blocks.
      depth: attribute with the number of blocks.
      head: rows of the head, whose arrays have no prefix.
      pooler: rows between body and head, which not all classes have.
      tied: name of the output layer in files, and the path of the embedding that it equals, where they are tied.
      their_heads: pattern of the names of all heads that files may have.
      buffers: pattern of the names of arrays other than weights, which older files have.
      keys: keys of the configuration that are attributes.
      constants: for keys without an attribute, the values of the zoo's module, of which the first is written, and the
        default of `transformers`.
    """

    name: str
    module: type[nn.Module]
    body: str
    headed: str
    prefix: str
    rows: Sequence[Row]
    depth: str
    keys: Sequence[Key]
    constants: Mapping[str, tuple[tuple[Any, ...], Any]]
    head: Sequence[Row] = ()
    pooler: Sequence[Row] = ()
    tied: tuple[str, str] | None = None
    their_heads: re.Pattern[str] = re.compile("classifier[.].*")
    buffers: re.Pattern[str] = re.compile("(?!)")


def family_of(module: object) -> Family:
    """Returns the family of a module.

    Raises:
      TypeError: if the module belongs to none.
    """
    for family in FAMILIES.values():
        if isinstance(module, family.module):
            return family
    raise TypeError(f"There are weights of Hugging Face for {', '.join(f.module.__name__ for f in FAMILIES.values())}. "
                    f"Received: {'a model of ' if isinstance(module, nn.Module) else ''}{type(module).__name__}.")


_TURNED = (1, 0)  # kernels of PyTorch are (outputs, inputs)


def _dense(theirs: str, ours: str, of_ours: tuple[int, int] = (0, 1)) -> list[Row]:
    return [Row(f"{theirs}.weight", f"{ours}/kernel", _TURNED, of_ours=of_ours),
            Row(f"{theirs}.bias", f"{ours}/bias", of_ours=of_ours)]


def _kernel(theirs: str, ours: str) -> Row:
    return Row(f"{theirs}.weight", f"{ours}/kernel", _TURNED)


def _table(theirs: str, ours: str) -> Row:
    return Row(f"{theirs}.weight", f"{ours}/embedding")


def _norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", f"{ours}/scale"), Row(f"{theirs}.bias", f"{ours}/bias")]


def _as_they_are(theirs: str, ours: str) -> list[Row]:
    """Returns the rows of a `Conv1D`, a dense layer of GPT-2 whose kernel is (inputs, outputs)."""
    return [Row(f"{theirs}.weight", f"{ours}/kernel"), Row(f"{theirs}.bias", f"{ours}/bias")]


_GPT2 = Family(
    name="gpt2", module=TransformerLM, body="GPT2Model", headed="GPT2LMHeadModel", prefix="transformer.",
    depth="num_layers", tied=("lm_head.weight", "token_embedding/embedding"),
    their_heads=re.compile("lm_head[.].*|score[.].*"), buffers=re.compile(r"h[.]\d+[.]attn[.](masked_)?bias"),
    rows=[
        _table("wte", "token_embedding"), _table("wpe", "position_embedding"), *_norm("ln_f", "final_norm"),
        *_norm("h.{n}.ln_1", "block_{n}/attention_norm"), *_norm("h.{n}.ln_2", "block_{n}/mlp_norm"),
        *(dataclasses.replace(row, of_theirs=(part, 3)) for part, name in enumerate(("query", "key", "value"))
          for row in _as_they_are("h.{n}.attn.c_attn", f"block_{{n}}/attention/{name}")),
        *_as_they_are("h.{n}.attn.c_proj", "block_{n}/attention/out"),
        *_as_they_are("h.{n}.mlp.c_fc", "block_{n}/mlp_in"), *_as_they_are("h.{n}.mlp.c_proj", "block_{n}/mlp_out"),
    ],
    keys=[
        Key("vocab_size", "vocab_size", 50257), Key("n_layer", "num_layers", 12), Key("n_embd", "d_model", 768),
        Key("n_head", "num_heads", 12, changes_outputs=True), Key("n_positions", "max_len", 1024),
        Key("n_inner", "mlp_dim", None), Key("resid_pdrop", "dropout_rate", 0.1),
    ],
    constants={
        "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "gelu_new"),
        "layer_norm_epsilon": ((1e-5,), 1e-5), "scale_attn_weights": ((True,), True),
        "scale_attn_by_inverse_layer_idx": ((False,), False), "add_cross_attention": ((False,), False),
        "tie_word_embeddings": ((True,), True),
    })

_LLAMA = Family(
    name="llama", module=Llama, body="LlamaModel", headed="LlamaForCausalLM", prefix="model.", depth="num_layers",
    tied=("lm_head.weight", "token_embedding/embedding"), their_heads=re.compile("lm_head[.].*|score[.].*"),
    buffers=re.compile(r"(layers[.]\d+[.]self_attn[.])?rotary_emb[.]inv_freq"),
    rows=[
        _table("embed_tokens", "token_embedding"), Row("norm.weight", "final_norm/scale"),
        Row("layers.{n}.input_layernorm.weight", "block_{n}/attention_norm/scale"),
        Row("layers.{n}.post_attention_layernorm.weight", "block_{n}/mlp_norm/scale"),
        *(_kernel(f"layers.{{n}}.self_attn.{theirs}_proj", f"block_{{n}}/attention/{ours}")
          for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))),
        *(_kernel(f"layers.{{n}}.mlp.{part}_proj", f"block_{{n}}/mlp_{part}") for part in ("gate", "up", "down")),
    ],
    head=[_table("lm_head", "head")],
    keys=[
        Key("vocab_size", "vocab_size", 32000), Key("num_hidden_layers", "num_layers", 32),
        Key("hidden_size", "d_model", 4096), Key("num_attention_heads", "num_heads", 32, changes_outputs=True),
        Key("num_key_value_heads", "num_kv_heads", None, changes_outputs=True),
        Key("intermediate_size", "mlp_dim", 11008), Key("max_position_embeddings", "max_len", 2048),
        Key("rms_norm_eps", "norm_epsilon", 1e-6, changes_outputs=True),
        Key("rope_theta", "rope_theta", 10000.0, changes_outputs=True),
        Key("rope_scaling", "rope_scaling", None, changes_outputs=True),
        Key("tie_word_embeddings", "tied_embedding", False),
    ],
    constants={"hidden_act": (("silu", "swish"), "silu"), "attention_bias": ((False,), False),
               "mlp_bias": ((False,), False)})

_BERT = Family(
    name="bert", module=TransformerEncoder, body="BertModel", headed="BertForSequenceClassification", prefix="bert.",
    depth="num_layers", their_heads=re.compile("(classifier|cls|qa_outputs)[.].*"),
    buffers=re.compile("embeddings[.]position_ids"),
    rows=[
        *(_table(f"embeddings.{theirs}_embeddings", f"{ours}_embedding")
          for theirs, ours in (("word", "token"), ("position", "position"), ("token_type", "type"))),
        *_norm("embeddings.LayerNorm", "embedding_norm"),
        *(row for name in ("query", "key", "value")
          for row in _dense(f"encoder.layer.{{n}}.attention.self.{name}", f"block_{{n}}/attention/{name}")),
        *_dense("encoder.layer.{n}.attention.output.dense", "block_{n}/attention/out"),
        *_norm("encoder.layer.{n}.attention.output.LayerNorm", "block_{n}/attention_norm"),
        *_dense("encoder.layer.{n}.intermediate.dense", "block_{n}/mlp_in"),
        *_dense("encoder.layer.{n}.output.dense", "block_{n}/mlp_out"),
        *_norm("encoder.layer.{n}.output.LayerNorm", "block_{n}/mlp_norm"),
    ],
    head=_dense("classifier", "predictions"), pooler=_dense("pooler.dense", "pooler"),
    keys=[
        Key("vocab_size", "vocab_size", 30522), Key("num_hidden_layers", "num_layers", 12),
        Key("hidden_size", "d_model", 768), Key("num_attention_heads", "num_heads", 12, changes_outputs=True),
        Key("intermediate_size", "mlp_dim", 3072), Key("max_position_embeddings", "max_len", 512),
        Key("type_vocab_size", "num_types", 2), Key("pad_token_id", "mask_token", 0),
        Key("hidden_dropout_prob", "dropout_rate", 0.1),
    ],
    constants={
        "hidden_act": (("gelu",), "gelu"), "layer_norm_eps": ((1e-12,), 1e-12),
        "position_embedding_type": (("absolute",), "absolute"), "is_decoder": ((False,), False),
        "add_cross_attention": ((False,), False),
    })

_VIT = Family(
    name="vit", module=ViT, body="ViTModel", headed="ViTForImageClassification", prefix="vit.", depth="depth",
    their_heads=re.compile("(classifier|decoder)[.].*"),
    rows=[
        Row("embeddings.cls_token", "cls_token"), Row("embeddings.position_embeddings", "pos_embed"),
        Row("embeddings.patch_embeddings.projection.weight", "patch_embed_proj/kernel", (2, 3, 1, 0)),
        Row("embeddings.patch_embeddings.projection.bias", "patch_embed_proj/bias"),
        *_norm("layernorm", "norm"), *_norm("encoder.layer.{n}.layernorm_before", "blocks_{n}/norm1"),
        *_norm("encoder.layer.{n}.layernorm_after", "blocks_{n}/norm2"),
        *(row for part, name in enumerate(("query", "key", "value"))
          for row in _dense(f"encoder.layer.{{n}}.attention.attention.{name}", "blocks_{n}/attn/qkv", (part, 3))),
        *_dense("encoder.layer.{n}.attention.output.dense", "blocks_{n}/attn/proj"),
        *_dense("encoder.layer.{n}.intermediate.dense", "blocks_{n}/mlp_fc1"),
        *_dense("encoder.layer.{n}.output.dense", "blocks_{n}/mlp_fc2"),
    ],
    head=_dense("classifier", "head"), pooler=_dense("pooler.dense", "pooler"),
    keys=[
        Key("patch_size", "patch_size", 16), Key("hidden_size", "width", 768), Key("num_hidden_layers", "depth", 12),
        Key("num_attention_heads", "num_heads", 12, changes_outputs=True), Key("intermediate_size", "mlp_width", 3072),
        Key("layer_norm_eps", "layer_norm_epsilon", 1e-12, changes_outputs=True),
        Key("hidden_dropout_prob", "dropout_rate", 0.0),
    ],
    constants={"hidden_act": (("gelu",), "gelu"), "qkv_bias": ((True,), True)})

FAMILIES = {family.name: family for family in (_GPT2, _LLAMA, _BERT, _VIT)}
