"""64-bit fingerprints of strings that are the same in every process, on every machine and in TensorFlow.

Owns FarmHash's `Fingerprint64`, the basis of TensorFlow's hash buckets, and the chaining of TensorFlow's crosses.
Python's `hash` of strings differs between processes, so a resumed run would read other rows of a table. All numbers are
uint64 arrays, and overflow wraps around as the algorithm requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray
"""A uint64 per string."""

DEFAULT_HASH_KEY = 0xDECAFCAFFE  # TensorFlow's default for crosses

_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_CHAIN = np.uint64(0xC6A4A7935BD1E995)
_SEED = np.uint64(81)
_WORD = 8  # bytes
_BLOCK = 64  # bytes per block of long strings


def fingerprint64(texts: Sequence[bytes]) -> np.ndarray:
    """Returns FarmHash's `Fingerprint64` of each string, as uint64.

    The computation is vectorized over strings of similar length: thousands cost little more than a single string.

    Args:
      texts: strings as bytes; text in UTF-8.

    Example:
      >>> [hex(number) for number in fingerprint64([b"", b"trainer"]).tolist()]
      ['0x9ae16a3b2f90404f', '0xbb47fe3a21ca59fc']

    Source: https://github.com/google/farmhash, `farmhashna::Hash64`, which never changes.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    letters = b"".join((*texts, bytes(_WORD)))  # padding, so that a word may be read anywhere
    starts = np.cumsum(lengths) - lengths
    # One group per algorithm, and per number of blocks.
    groups = np.searchsorted(_LONGEST, lengths) + np.maximum(lengths - 1, 0) // _BLOCK
    found = np.empty(len(texts), np.uint64)
    for group in np.unique(groups).tolist():
        places = np.flatnonzero(groups == group)
        compute = _WAYS[min(group, len(_WAYS) - 1)]
        found[places] = compute(_Texts(letters, starts[places], lengths[places]))
    return found


def chain(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns `FingerprintCat64`, TensorFlow's fingerprint of ordered pairs of fingerprints.

    Args:
      first: fingerprints of the first elements, uint64 with at least one axis.
      second: fingerprints of the second elements, of a shape that broadcasts.
    """
    mixed = first ^ _CHAIN ^ _shift_mix(second * _CHAIN) * _CHAIN
    return _shift_mix(_shift_mix(mixed * _CHAIN) * _CHAIN)


class _Texts(NamedTuple):
    """Strings as a joint buffer, with the start and length of each string."""

    letters: bytes
    starts: np.ndarray
    lengths: np.ndarray


def _of_none(texts: _Texts) -> Words:
    return np.full(len(texts.starts), _K2)


def _of_at_most_3(texts: _Texts) -> Words:
    first, middle, last = (_word(texts, offset, 1) for offset in (0, texts.lengths // 2, texts.lengths - 1))
    low, high = first + (middle << np.uint64(8)), texts.lengths.astype(np.uint64) + (last << np.uint64(2))
    return _shift_mix(low * _K2 ^ high * _K0) * _K2


def _of_4_to_7(texts: _Texts) -> Words:
    head, tail = _word(texts, 0, 4), _word(texts, texts.lengths - 4, 4)
    return _mix(texts.lengths.astype(np.uint64) + (head << np.uint64(3)), tail, _factors(texts))


def _of_8_to_16(texts: _Texts) -> Words:
    factors = _factors(texts)
    head, tail = _word(texts, 0) + _K2, _word(texts, texts.lengths - 8)
    return _mix(_rotate(tail, 37) * factors + head, (_rotate(head, 25) + tail) * factors, factors)


def _of_17_to_32(texts: _Texts) -> Words:
    factors = _factors(texts)
    return _mix(*_ends(texts, _K1, factors), factors)


def _of_33_to_64(texts: _Texts) -> Words:
    factors = _factors(texts)
    outer, right = _ends(texts, _K2, factors)
    inner = _mix(outer, right, factors)
    head = _word(texts, 0) * _K2
    e, f = _word(texts, 16) * factors, _word(texts, 24)
    g = (outer + _word(texts, texts.lengths - 32)) * factors
    h = (inner + _word(texts, texts.lengths - 24)) * factors
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + head, 18) + g, factors)


def _of_more_than_64(texts: _Texts) -> Words:
    """Returns the fingerprints of strings with the same number of blocks."""
    zero = np.zeros(len(texts.starts), np.uint64)
    x = zero + _SEED
    y = x * _K1 + np.uint64(113)
    z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
    v, w = (zero, zero), (zero, zero)
    x = x * _K2 + _word(texts, 0)
    for start in range(0, int(texts.lengths[0] - 1) // _BLOCK * _BLOCK, _BLOCK):
        x, y, z, v, w = _block(texts, start, (x, y, z, v, w), _K1, np.uint64(1))
    # The last 64 bytes, which may overlap the blocks above.
    factors = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    low = w[0] + ((texts.lengths - 1) % _BLOCK).astype(np.uint64)
    first = v[0] + low
    state = x, y, z, (first, v[1]), (low + first, w[1])
    x, y, z, v, w = _block(texts, texts.lengths - _BLOCK, state, factors, np.uint64(9))
    return _mix(_mix(v[0], w[0], factors) + _shift_mix(y) * _K0 + z, _mix(v[1], w[1], factors) + x, factors)


# Maximum string length of each algorithm except the last.
_LONGEST = np.array([0, 3, 7, 16, 32, _BLOCK])
_WAYS = (_of_none, _of_at_most_3, _of_4_to_7, _of_8_to_16, _of_17_to_32, _of_33_to_64, _of_more_than_64)

_Pair: TypeAlias = tuple[Words, Words]
_State: TypeAlias = tuple[Words, Words, Words, _Pair, _Pair]


def _block(
    texts: _Texts, start: int | np.ndarray, state: _State, factor: Words | np.uint64, weight: np.uint64
) -> _State:
    """Returns the state after 64 bytes."""
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + _word(texts, start + 8), 37) * factor
    y = _rotate(y + v[1] + _word(texts, start + 48), 42) * factor
    x = x ^ w[1] * weight
    y = y + v[0] * weight + _word(texts, start + 40)
    z = _rotate(z + w[0], 33) * factor
    v = _mix_32(texts, start, v[1] * factor, x + w[0])
    w = _mix_32(texts, start + 32, z + w[1], y + _word(texts, start + 16))
    return z, y, x, v, w


def _mix_32(texts: _Texts, start: int | np.ndarray, a: Words, b: Words) -> _Pair:
    """Returns two seeds mixed with 32 bytes."""
    first, second, third, last = (_word(texts, start + offset) for offset in (0, 8, 16, 24))
    a = a + first
    b = _rotate(b + a + last, 21)
    total = a + second + third
    return total + last, b + _rotate(total, 44) + a


def _ends(texts: _Texts, head_factor: np.uint64, factors: Words) -> _Pair:
    """Returns the first and the last 16 bytes as two numbers."""
    a, b = _word(texts, 0) * head_factor, _word(texts, 8)
    c, d = _word(texts, texts.lengths - 8) * factors, _word(texts, texts.lengths - 16) * _K2
    return _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c


def _factors(texts: _Texts) -> Words:
    return _K2 + np.uint64(2) * texts.lengths.astype(np.uint64)


def _word(texts: _Texts, offset: int | np.ndarray, size: int = _WORD) -> Words:
    """Returns `size` bytes of each string as a little-endian number."""
    anywhere = np.ndarray((len(texts.letters) - size + 1,), f"<u{size}", texts.letters, strides=(1,))
    return anywhere[texts.starts + offset].astype(np.uint64)


def _rotate(words: Words, by: int) -> Words:
    return (words >> np.uint64(by)) | (words << np.uint64(64 - by))


def _shift_mix(words: Words) -> Words:
    return words ^ (words >> np.uint64(47))


def _mix(first: Words, second: Words, factor: Words | np.uint64) -> Words:
    """Returns a hash of two numbers."""
    mixed = _shift_mix((first ^ second) * factor)
    return _shift_mix((second ^ mixed) * factor) * factor
