"""IntegerLookup: integers to indices in a vocabulary, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments
from trainer.core.configs import Config
from trainer.core.errors import describe, wrong_type
from trainer.data.preprocessing.batches import as_integers, host_array
from trainer.data.preprocessing.encoding import DROPPED
from trainer.data.preprocessing.index_lookup import IndexLookup, Vocabulary
from trainer.data.preprocessing.layer import Array
from trainer.data.sources.arrays import DataError

_FIX = ("Fill them, by `fillna(-1)` in data frames, or make the layer with a `mask_token` that is no other value, such "
        "as `mask_token=-1`, whose index they get.")


class IntegerLookup(IndexLookup):
    """Replaces integers by their indices in a vocabulary, on the host or in a module.

    The vocabulary is given, or counted by `adapt`: the most frequent integer first, and the larger of equally frequent
    integers first. In a module the vocabulary is a constant of its program, and part of `Model.export`.

    Args:
      max_tokens, num_oov_indices, idf_weights, invert, output_mode, sparse, pad_to_max_tokens, salt, name: as in
        `StringLookup`. `num_oov_indices=0` works on the host only: a compiled program cannot raise.
      mask_token: an integer that stands for missing values, as in `StringLookup`.
      oov_token: the integer of unknown indices, for `invert=True`.
      vocabulary: a list of integers, or the path of a text file with one integer per line.
      vocabulary_dtype: must be "int64".
      oov_method: with several `num_oov_indices`, "floormod" chooses the index of an unknown integer by its remainder,
        "farmhash" by a hash (on the host only).

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if arguments are out of range or contradict each other, or `sparse` is True.

    Example:
      >>> lookup = IntegerLookup()
      >>> lookup.adapt([12, 1138, 42, 12])
      >>> lookup.get_vocabulary()
      [-1, 12, 1138, 42]
      >>> lookup([[12, 42], [1138, 7]]).tolist()
      [[1, 3], [2, 0]]

    Source: `keras.layers.IntegerLookup`.
    """

    def __init__(
        self, max_tokens: int | None = None, num_oov_indices: int = 1, mask_token: int | None = None,
        oov_token: int | None = -1, vocabulary: Vocabulary | None = None, vocabulary_dtype: str = "int64",
        idf_weights: ArrayLike | None = None, invert: bool = False, output_mode: str = "int", sparse: bool = False,
        pad_to_max_tokens: bool = False, oov_method: str = "floormod", salt: int | Sequence[int] | None = None,
        name: str | None = None,
    ):
        if vocabulary_dtype != "int64":
            raise ValueError(f"`vocabulary_dtype` must be 'int64'. Received: {vocabulary_dtype!r}.")
        arguments.check_word("oov_method", oov_method, ("floormod", "farmhash"))
        if salt is not None and oov_method != "farmhash":
            raise ValueError("`salt` is the key of a hash, for oov_method='farmhash'. Received: oov_method="
                             f"{oov_method!r}.")
        tokens = {argument: None if token is None else self._as_token(argument, token) for argument, token in (
            ("mask_token", mask_token), ("oov_token", oov_token))}
        super().__init__(max_tokens, num_oov_indices, tokens["mask_token"], tokens["oov_token"], vocabulary,
                         idf_weights, invert, output_mode, pad_to_max_tokens, sparse, oov_method, salt, name)

    def __call__(self, inputs: ArrayLike) -> Array:
        """Returns the indices of integers, or their encoding; with `invert=True`, the integers of indices.

        Args:
          inputs: integers; of a JAX array, the results are int32 unless `jax_enable_x64` is set.

        Raises:
          ValueError: if there is no vocabulary, or `inputs` are of another kind or have missing values without a mask.
        """
        if isinstance(inputs, jax.Array):
            self._mark(inputs)
            return self._in_program(inputs)
        array = host_array(inputs)
        if self.invert:
            return self.words_of(as_integers("IntegerLookup", array, fix="Their integers are not known."))
        return self.encoded(self.indices_of(self._as_words(array)).reshape(array.shape))

    def _in_program(self, inputs: jax.Array) -> jax.Array:
        """Returns the result by operations of JAX."""
        words = self._check_has_vocabulary()
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise DataError(f"IntegerLookup takes whole numbers. Received: {describe(inputs)}. Convert them by "
                            "`x.astype(int)`.")
        if self.invert:
            if self.oov_token is None:
                raise DataError("IntegerLookup with `invert=True` needs an `oov_token` for unknown indices.")
            vocabulary = self._as_constant([*self.get_vocabulary(), self.oov_token])
            is_known = (inputs >= 0) & (inputs < len(vocabulary) - 1)
            return jnp.take(vocabulary, jnp.where(is_known, inputs, len(vocabulary) - 1))
        if not self.num_oov_indices:
            raise DataError("IntegerLookup with `num_oov_indices=0` raises for unknown integers, which a compiled "
                            "program cannot do. Set `num_oov_indices=1`, or call the layer in `dataset.map`.")
        keys = self._as_constant(sorted(words))
        indices = jnp.asarray(np.array([self._ids[word] for word in sorted(words)], np.int32))
        places = jnp.minimum(jnp.searchsorted(keys, inputs), len(words) - 1)
        unknown = self._oov_start + (self._remainders(inputs) if self.num_oov_indices > 1 else 0)
        found = jnp.where(keys[places] == inputs, indices[places], unknown)
        if self.mask_token is not None:
            found = jnp.where(inputs == self.mask_token, 0 if self.output_mode == "int" else DROPPED, found)
        return jnp.asarray(self.encoded(found.astype(np.int32)))

    def _remainders(self, inputs: jax.Array) -> jax.Array:
        if self.oov_method == "farmhash":
            raise DataError("IntegerLookup with oov_method='farmhash' runs on the host: JAX programs have no 64-bit "
                            "hashes. Use oov_method='floormod', or call the layer in `dataset.map`.")
        return jnp.mod(inputs, self.num_oov_indices)

    def _as_constant(self, words: list[int]) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        bounds = np.iinfo(dtype)
        if words and not bounds.min <= min(words) <= max(words) <= bounds.max:
            raise DataError(f"The vocabulary of an IntegerLookup in a module must fit into {dtype}. Received: integers "
                            f"from {min(words)} to {max(words)}. Call the layer in `dataset.map`, on the host.")
        return jnp.asarray(np.array(words, dtype))

    def get_config(self) -> Config:
        return {**super().get_config(), "oov_method": self.oov_method}

    @staticmethod
    def _as_token(argument: str, token: object) -> int:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise wrong_type(argument, token, "a whole number or None")
        return int(token)

    def _as_word(self, word: object) -> int:
        return self._as_token("vocabulary", word)

    def _words_of_lines(self, path: str, lines: list[bytes]) -> list[int]:
        try:
            return [int(line) for line in lines]
        except ValueError as error:
            raise ValueError(f"The vocabulary file {path!r} must have one whole number a line.") from error

    def _as_words(self, values: np.ndarray) -> list[int]:
        words: list[int] = as_integers("IntegerLookup", values, self.mask_token, _FIX).ravel().tolist()
        return words

    def _oov_buckets(self, words: list[int]) -> np.ndarray:
        numbers = np.array(words, np.int64)
        return self._hashed(numbers) if self.oov_method == "farmhash" else numbers % self.num_oov_indices
