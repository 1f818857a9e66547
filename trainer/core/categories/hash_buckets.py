"""Hashes and buckets of strings and integers, as TensorFlow's operations number them."""

from __future__ import annotations

import numpy as np

from trainer.core.categories.fingerprints import fingerprint64
from trainer.core.categories.siphash import siphash64

Salt = tuple[int, int]


def hashes(categories: np.ndarray, salt: Salt | None = None) -> np.ndarray:
    """Returns the hash of each category, as uint64 of the same shape.

    Args:
      categories: an array of objects, strings as bytes; or of integers, which are hashed as decimal text.
      salt: the key of SipHash; None for FarmHash's fingerprint, without a key.
    """
    if categories.dtype == object:
        texts, places = categories.ravel().tolist(), None
    else:
        numbers, places = np.unique(categories, return_inverse=True)
        texts = [str(number).encode() for number in numbers.tolist()]
    found = fingerprint64(texts) if salt is None else siphash64(texts, salt)
    return (found if places is None else found[places]).reshape(categories.shape)


def hash_buckets(categories: np.ndarray, buckets: int, salt: Salt | None = None) -> np.ndarray:
    """Returns the bucket of each category, as int64 from 0 to `buckets - 1`; see `hashes`.

    Example:
      >>> letters = np.array([b"A", b"B", b"C"], object)
      >>> hash_buckets(letters, 10).tolist(), hash_buckets(letters, 10, salt=(1, 1)).tolist()
      ([4, 8, 7], [3, 4, 5])

    Source: `tf.strings.to_hash_bucket_fast` and `tf.strings.to_hash_bucket_strong`.
    """
    return (hashes(categories, salt) % np.uint64(buckets)).astype(np.int64)
