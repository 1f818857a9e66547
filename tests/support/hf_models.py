"""Small models of Hugging Face's `transformers`, with random weights: what tests compare the zoo with.

Only `tests/reference/make_hf.py` and tests that skip without `transformers` and torch make them.
"""

import numpy as np

SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 12}
_LLAMA = {**_SIZES, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None}
_BERT = {**_SIZES, "max_position_embeddings": 16}
_VIT = {name: value for name, value in _SIZES.items() if name != "vocab_size"} | {"image_size": 8, "patch_size": 4}
# By name: the class of `transformers`, its configuration, and the largest size of a file.
CASES = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 20, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32,
                                 "bos_token_id": None, "eos_token_id": None}, "5GB"),
    "llama2": ("LlamaForCausalLM", _LLAMA, "3KB"),
    "llama3": ("LlamaForCausalLM", {
        **_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **SCALING}}, "5GB"),
    "bert": ("BertModel", _BERT, "5GB"),
    "bert_classifier": ("BertForSequenceClassification", {**_BERT, "num_labels": 3}, "4KB"),
    "vit": ("ViTForImageClassification", {**_VIT, "num_labels": 3}, "5GB"),
    "vit_tokens": ("ViTModel", {**_VIT, "num_channels": 1, "layer_norm_eps": 0.01}, "5GB"),
}


def inputs(name):
    """Returns inputs of a case, as the zoo's module takes them; BERT's have padding, which is token 0."""
    rng = np.random.default_rng(0)
    if name.startswith("vit"):
        return rng.uniform(-1, 1, (3, 8, 8, 1 if name == "vit_tokens" else 3)).astype(np.float32)
    if name.startswith("bert"):
        return np.where(np.arange(12) < np.array([[12], [7], [3]]), rng.integers(1, 20, (3, 12)), 0)
    return rng.integers(0, 20, (2, 30))


def made(name):
    """Returns a model of a case with random weights."""
    import torch
    import transformers

    cls, options, _ = CASES[name]
    cls = getattr(transformers, cls)
    extra = {"add_pooling_layer": False} if name == "vit_tokens" else {}
    model = cls(cls.config_class(**options), **extra).eval()
    generator = torch.Generator().manual_seed(0)
    for path, array in model.named_parameters():
        drawn = torch.randn(array.shape, generator=generator)
        is_scale = array.ndim == 1 and path.endswith("weight")
        array.data = 1 + 0.3 * drawn if is_scale else (0.3 if array.ndim == 1 else 0.7) * drawn
    model.tie_weights()
    return model


def outputs(model, name):
    """Returns what a model computes for the inputs of a case, as the zoo's module returns it."""
    import torch

    x = inputs(name)
    with torch.no_grad():
        if name.startswith("vit"):
            found = model(torch.tensor(x.transpose(0, 3, 1, 2)))
        elif name.startswith("bert"):
            found = model(torch.tensor(x), attention_mask=torch.tensor(x != 0).long())
        else:
            found = model(torch.tensor(x))
    chosen = {"bert": "pooler_output", "vit_tokens": "last_hidden_state"}.get(name, "logits")
    return found[chosen].numpy()


def read_by_transformers(folder, name):
    """Returns the outputs of the model that `transformers` reads from a folder, and the loading report."""
    import transformers

    cls = getattr(transformers, CASES[name][0])
    extra = {"add_pooling_layer": False} if name == "vit_tokens" else {}
    model, report = cls.from_pretrained(folder, output_loading_info=True, **extra)
    return outputs(model.eval(), name), report
