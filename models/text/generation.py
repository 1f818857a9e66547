"""Text generation with a language model, token by token, with a cache of keys and values.

Owns the sampling of tokens and the two compiled programs. The model is `TransformerLM`, or any Linen module with the
methods `next_logits` and `empty_cache`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from trainer.core.calls.entry_points import foreign_arguments
from trainer.models.text.transformer_blocks import Cache

_SAMPLING = "`temperature=0` takes the most probable token; any other temperature, 1.0 by default, samples."
_SEED = "Give `seed`, a whole number."
_ONE_SEQUENCE = "There is no beam search: `temperature=0` takes the most probable token, any other temperature samples."
# Arguments of Hugging Face's `generate`.
_ELSEWHERE = {
    "do_sample": _SAMPLING,
    "greedy": _SAMPLING,
    "num_beams": _ONE_SEQUENCE,
    "early_stopping": _ONE_SEQUENCE,
    "num_return_sequences": "Repeat the prompts: `generate(model, np.repeat(prompt, n, axis=0), ...)`.",
    "max_length": "Give `max_new_tokens`, which does not count the prompt.",
    "max_tokens": "Give `max_new_tokens`.",
    "input_ids": "Give `prompt`.",
    "inputs": "Give `prompt`.",
    "prompt": "It holds token ids, integers of shape (rows, length): `generate(model, prompt, 20)`.",
    "attention_mask": "There is no padding: call `generate` for the prompts of each length.",
    "eos_token_id": "Give `eos_token`.",
    "pad_token_id": "Leave it out: after `eos_token`, a row receives only `eos_token`.",
    "repetition_penalty": "The tokens are drawn by `temperature`, `top_k` and `top_p` alone.",
    "generator": _SEED,
    "key": _SEED,
    "rng": _SEED,
    "*": "Give all but the model, the prompt and `max_new_tokens` by name.",
}


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Sampling options of `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    eos_token: int | None


@foreign_arguments(_ELSEWHERE)
def generate(
    model: Any, prompt: jax.Array | np.ndarray | Sequence[Sequence[int]], max_new_tokens: int | None = None, *,
    temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, seed: int = 0, eos_token: int | None = None,
) -> np.ndarray:
    """Returns the prompts, each with `max_new_tokens` more tokens: int32 of shape `(rows, length + max_new_tokens)`.

    One program reads the whole prompt; another generates the new tokens one by one, with cached keys and values. Both
    are compiled once per shape of the prompts, `max_new_tokens` and sampling options. A new `seed` compiles nothing.

    Args:
      model: a built `trainer.Model` of a `TransformerLM`, or a pair of a module and its parameters. A `trainer.Model`
        uses the same weights as its `predict`; adapters of LoRA are merged in each call.
      prompt: integers of shape `(rows, length)`: prompts of equal length.
      max_new_tokens: number of tokens to add to each row; required.
      temperature: divisor of the logits before sampling; 0 always takes the most probable token.
      top_k: number of most probable tokens to sample from.
      top_p: cumulative probability; samples from the smallest set of most probable tokens that reaches it, after
        `top_k`. See Holtzman et al., https://arxiv.org/abs/1904.09751.
      seed: seed of the sampling. Equal seeds give equal tokens.
      eos_token: end-of-sequence token. After this token, a row receives only `eos_token`.

    Raises:
      TypeError: if the model is neither, or an argument has the wrong type, such as text, or is missing.
      ValueError: if the prompts are of unequal length, empty, too long or outside the vocabulary, or an argument is out
        of range.

    Example:

    >>> import jax, numpy as np
    >>> from trainer.models import TransformerLM
    >>> module = TransformerLM(vocab_size=50, num_layers=1, d_model=8, num_heads=2, max_len=16)
    >>> params = module.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    >>> generate((module, params), np.zeros((2, 4), np.int32), 3, temperature=0).shape
    (2, 7)
    """
    _refuse_text(prompt)
    if max_new_tokens is None:
        raise TypeError("`max_new_tokens` is missing: the number of tokens to add to each row, such as "
                        "`generate(model, prompt, 20)`.")
    module, params = _module_and_params(model)
    _check_numbers(module, max_new_tokens, temperature, top_k, top_p, seed, eos_token)
    prompt = _checked_prompt(module, prompt, max_new_tokens)
    greedy = temperature == 0
    choice = _Choice(float(temperature), None if greedy else top_k, None if greedy else top_p, eos_token)
    logits, cache = _read_prompt(module, int(max_new_tokens), params, prompt)
    # The key is an argument, so that a new seed does not recompile the program.
    return np.asarray(_decode(module, choice, params, prompt, logits, cache, jax.random.key(int(seed))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_prompt(module: Any, max_new_tokens: int, params: Any, prompt: jax.Array) -> tuple[jax.Array, list[Cache]]:
    """Returns the logits of the token after the prompts, and the cache with space for the new tokens."""
    dtype = jnp.result_type(*jax.tree.leaves(params)) if module.dtype is None else module.dtype
    cache = module.empty_cache(prompt.shape[0], prompt.shape[1] + max_new_tokens, dtype)
    return module.apply({"params": params}, prompt, cache, method="next_logits")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(module: Any, choice: _Choice, params: Any, prompt: jax.Array, logits: jax.Array, cache: list[Cache],
            key: jax.Array) -> jax.Array:
    """Returns prompts and new tokens, given a cache of the prompts."""
    rows, length = prompt.shape
    new_tokens = cache[0][0].shape[1] - length
    fill = 0 if choice.eos_token is None else choice.eos_token
    tokens = jnp.concatenate([prompt, jnp.full((rows, new_tokens), fill, prompt.dtype)], axis=1)

    def goes_on(loop: Any) -> jax.Array:
        position, ended = loop[0], loop[1]
        return (position < length + new_tokens) & ~ended.all()

    def add_token(loop: Any) -> Any:
        position, ended, tokens, logits, cache = loop
        token = _chosen(logits, choice, jax.random.fold_in(key, position)).astype(tokens.dtype)
        if choice.eos_token is not None:
            token = jnp.where(ended, choice.eos_token, token)
            ended = ended | (token == choice.eos_token)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], position, axis=1)
        logits, cache = module.apply({"params": params}, token[:, None], cache, position, method="next_logits")
        return position + 1, ended, tokens, logits, cache

    start = (jnp.asarray(length, jnp.int32), jnp.zeros((rows,), bool), tokens, logits, cache)
    return jax.lax.while_loop(goes_on, add_token, start)[2]


def _chosen(logits: jax.Array, choice: _Choice, key: jax.Array) -> jax.Array:
    """Returns a token per row of logits."""
    if choice.temperature == 0:
        return logits.argmax(-1)
    logits = logits / choice.temperature
    if choice.top_k is not None:
        least = jax.lax.top_k(logits, choice.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if choice.top_p is not None:
        ordered = jnp.sort(logits, descending=True)
        probabilities = nn.softmax(ordered)
        before = jnp.cumsum(probabilities, -1) - probabilities
        least = jnp.where(before < choice.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)


def _module_and_params(model: Any) -> tuple[Any, Any]:
    if isinstance(model, tuple) and len(model) == 2:
        module, params = model
    else:
        if hasattr(model, "save_adapters"):  # of LoRA, which `model.module` does not have
            model = model.merge()
        module = getattr(model, "module", None)
        params = None
    if not hasattr(module, "next_logits") or not hasattr(module, "empty_cache"):
        raise TypeError("`generate` takes a `trainer.Model` of a `models.TransformerLM`, or a pair `(module, params)`. "
                        f"Received: {type(model).__name__}{'' if module is None else f' of {type(module).__name__}'}.")
    if params is None:
        # The weights of `predict`: on the devices, and averaged where the optimizer keeps averages.
        params = model.strategy.on_devices(model.state).averaged().params
    return module, params


def _refuse_text(prompt: Any) -> None:
    first = prompt
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, (str, bytes)) or (isinstance(first, np.ndarray) and first.dtype.kind in "US"):
        raise TypeError("`prompt` must hold token ids, integers of shape (rows, length). Received: text. Make ids of "
                        "it with the tokenizer of the training: `np.array([tokenizer.encode(text)])`.")


def _checked_prompt(module: Any, prompt: jax.Array | np.ndarray | Sequence[Sequence[int]],
                    max_new_tokens: int) -> np.ndarray:
    try:
        tokens = np.asarray(prompt)
    except ValueError as error:
        raise ValueError("`prompt` must be of shape (rows, length). Received: rows of several lengths. Call `generate` "
                         "for the rows of each length.") from error
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"`prompt` must hold whole numbers. Received: dtype {tokens.dtype}.")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"`prompt` must be of shape (rows, length), and not empty. Received: shape {tokens.shape}. A "
                         "single prompt needs an axis of rows: `prompt[None]`.")
    if tokens.shape[1] + max_new_tokens > module.max_len:
        raise ValueError(f"Prompts and new tokens must be at most `max_len`={module.max_len} together. Received: "
                         f"prompts of {tokens.shape[1]} tokens and max_new_tokens={max_new_tokens}. Ask for fewer "
                         "tokens, or keep the end of the prompts: `prompt[:, -n:]`.")
    if tokens.min() < 0 or tokens.max() >= module.vocab_size:
        raise ValueError(f"`prompt` must hold tokens from 0 to {module.vocab_size - 1}. Received: tokens from "
                         f"{tokens.min()} to {tokens.max()}.")
    return tokens.astype(np.int32)


def _check_numbers(module: Any, max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any, seed: Any,
                   eos_token: Any) -> None:
    last = module.vocab_size - 1
    counts = [("max_new_tokens", max_new_tokens, 1, math.inf), ("top_k", top_k, 1, last + 1),
              ("seed", seed, 0, 2**32 - 1), ("eos_token", eos_token, 0, last)]
    for name, value, least, most in counts:
        if value is None and name in ("top_k", "eos_token"):
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"`{name}` must be a whole number. Received: {type(value).__name__}.")
        if not least <= int(value) <= most:
            raise ValueError(f"`{name}` must be at least {least}{'' if most == math.inf else f' and at most {most}'}. "
                             f"Received: {name}={value}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"`temperature` must be at least 0 and finite. Received: temperature={temperature}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1. Received: top_p={top_p}.")
