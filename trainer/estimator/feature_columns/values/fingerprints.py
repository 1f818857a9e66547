"""Fingerprints of strings: 64-bit numbers that are the same in every process, on every machine and in TensorFlow.

Owns FarmHash's `Fingerprint64`, which TensorFlow's hash buckets are made of, and the chaining of TensorFlow's crosses.
Python's own `hash` of strings is another in every process, so that a resumed run would read other rows of a table.
Numbers are uint64 arrays throughout, whose sums and products wrap around as the algorithm wants.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray
"""One uint64 for each string."""

DEFAULT_HASH_KEY = 0xDECAFCAFFE  # of TensorFlow's crosses

_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_CHAIN = np.uint64(0xC6A4A7935BD1E995)
_SEED = 81
_BLOCK = 64  # bytes that long strings are read by


def fingerprint64(texts: Sequence[bytes]) -> np.ndarray:
    """Returns FarmHash's `Fingerprint64` of each string, as uint64.

    Strings of one length are computed together, so that many short strings cost little more than one.

    Args:
      texts: strings as bytes; text in UTF-8.

    Example:
      >>> [hex(number) for number in fingerprint64([b"", b"trainer"]).tolist()]
      ['0x9ae16a3b2f90404f', '0xbb47fe3a21ca59fc']

    Source: https://github.com/google/farmhash, `farmhashna::Hash64`, which never changes.
    """
    found = np.empty(len(texts), np.uint64)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    order = np.argsort(lengths, kind="stable")
    starts = np.unique(lengths[order], return_index=True)[1].tolist()
    for start, stop in itertools.pairwise([*starts, len(texts)]):
        places = order[start:stop]
        joined = b"".join([texts[place] for place in places.tolist()])
        found[places] = _of_one_length(np.frombuffer(joined, np.uint8).reshape(len(places), lengths[places[0]]))
    return found


def chain(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns TensorFlow's fingerprint of pairs of fingerprints, whose order counts: `FingerprintCat64`.

    Args:
      first: fingerprints of what comes first, uint64 with at least one axis.
      second: those of what follows, of a shape that broadcasts.
    """
    mixed = first ^ _CHAIN ^ _shift_mix(second * _CHAIN) * _CHAIN
    return _shift_mix(_shift_mix(mixed * _CHAIN) * _CHAIN)


def _of_one_length(letters: np.ndarray) -> Words:
    """Returns the fingerprints of strings of one length: uint8 of shape `(strings, length)`."""
    length = letters.shape[1]
    if length <= 16:
        return _of_at_most_16(letters)
    if length <= 32:
        return _of_17_to_32(letters)
    return _of_33_to_64(letters) if length <= _BLOCK else _of_more_than_64(letters)


def _of_at_most_16(letters: np.ndarray) -> Words:
    rows, length = letters.shape
    if length >= 8:
        factor = _factor(length)
        head, tail = _word(letters, 0) + _K2, _word(letters, length - 8)
        return _mix(_rotate(tail, 37) * factor + head, (_rotate(head, 25) + tail) * factor, factor)
    if length >= 4:
        head, tail = _word(letters, 0, 4), _word(letters, length - 4, 4)
        return _mix(np.uint64(length) + (head << np.uint64(3)), tail, _factor(length))
    if length == 0:
        return np.full(rows, _K2)
    first, middle, last = (letters[:, place].astype(np.uint64) for place in (0, length // 2, length - 1))
    low, high = first + (middle << np.uint64(8)), np.uint64(length) + (last << np.uint64(2))
    return _shift_mix(low * _K2 ^ high * _K0) * _K2


def _of_17_to_32(letters: np.ndarray) -> Words:
    factor = _factor(letters.shape[1])
    return _mix(*_ends(letters, _K1, factor), factor)


def _of_33_to_64(letters: np.ndarray) -> Words:
    length = letters.shape[1]
    factor = _factor(length)
    outer, right = _ends(letters, _K2, factor)
    inner = _mix(outer, right, factor)
    head = _word(letters, 0) * _K2
    e, f = _word(letters, 16) * factor, _word(letters, 24)
    g = (outer + _word(letters, length - 32)) * factor
    h = (inner + _word(letters, length - 24)) * factor
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + head, 18) + g, factor)


def _of_more_than_64(letters: np.ndarray) -> Words:
    rows, length = letters.shape
    zero = np.zeros(rows, np.uint64)
    x = zero + np.uint64(_SEED)
    y = x * _K1 + np.uint64(113)
    z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
    v, w = (zero, zero), (zero, zero)
    x = x * _K2 + _word(letters, 0)
    for start in range(0, (length - 1) // _BLOCK * _BLOCK, _BLOCK):
        x, y, z, v, w = _block(letters, start, (x, y, z, v, w), _K1, np.uint64(1))
    # The last 64 bytes, some of which may have been read already.
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    low = w[0] + np.uint64((length - 1) % _BLOCK)
    v0 = v[0] + low
    x, y, z, v, w = _block(letters, length - _BLOCK, (x, y, z, (v0, v[1]), (low + v0, w[1])), factor, np.uint64(9))
    return _mix(_mix(v[0], w[0], factor) + _shift_mix(y) * _K0 + z, _mix(v[1], w[1], factor) + x, factor)


_Pair: TypeAlias = tuple[Words, Words]
_State: TypeAlias = tuple[Words, Words, Words, _Pair, _Pair]


def _block(letters: np.ndarray, start: int, state: _State, factor: Words | np.uint64, weight: np.uint64) -> _State:
    """Returns the state after 64 bytes."""
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + _word(letters, start + 8), 37) * factor
    y = _rotate(y + v[1] + _word(letters, start + 48), 42) * factor
    x = x ^ w[1] * weight
    y = y + v[0] * weight + _word(letters, start + 40)
    z = _rotate(z + w[0], 33) * factor
    v = _mix_32(letters, start, v[1] * factor, x + w[0])
    w = _mix_32(letters, start + 32, z + w[1], y + _word(letters, start + 16))
    return z, y, x, v, w


def _mix_32(letters: np.ndarray, start: int, a: Words, b: Words) -> _Pair:
    """Returns two seeds with 32 bytes mixed in."""
    first, second, third, last = (_word(letters, start + offset) for offset in (0, 8, 16, 24))
    a = a + first
    b = _rotate(b + a + last, 21)
    total = a + second + third
    return total + last, b + _rotate(total, 44) + a


def _ends(letters: np.ndarray, head_factor: np.uint64, factor: np.uint64) -> _Pair:
    """Returns the first and the last 16 bytes as two numbers."""
    length = letters.shape[1]
    a, b = _word(letters, 0) * head_factor, _word(letters, 8)
    c, d = _word(letters, length - 8) * factor, _word(letters, length - 16) * _K2
    return _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c


def _factor(length: int) -> np.uint64:
    return np.uint64((int(_K2) + 2 * length) % 2**64)


def _word(letters: np.ndarray, start: int, size: int = 8) -> Words:
    """Returns `size` bytes of each string as a number, the lowest first."""
    part = np.ascontiguousarray(letters[:, start:start + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


def _rotate(words: Words, by: int) -> Words:
    return (words >> np.uint64(by)) | (words << np.uint64(64 - by))


def _shift_mix(words: Words) -> Words:
    return words ^ (words >> np.uint64(47))


def _mix(first: Words, second: Words, factor: Words | np.uint64) -> Words:
    """Returns one number for two."""
    mixed = _shift_mix((first ^ second) * factor)
    return _shift_mix((second ^ mixed) * factor) * factor
