"""SipHash-2-4, a hash of strings with a key, as TensorFlow computes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_INITIAL = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_WORD = 8  # bytes
_State = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def siphash64(texts: Sequence[bytes], key: tuple[int, int]) -> np.ndarray:
    """Returns the SipHash-2-4 of each string, as uint64.

    The computation is vectorized over strings of the same number of words.

    Args:
      texts: strings as bytes.
      key: two numbers from 0 to 2**64 - 1.

    Example:
      >>> hex(siphash64([bytes(range(15))], (0x0706050403020100, 0x0F0E0D0C0B0A0908))[0])
      '0xa129ca6149be45e5'

    Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", https://www.aumasson.jp/siphash/siphash.pdf.
    """
    found = np.empty(len(texts), np.uint64)
    counts = np.fromiter((len(text) // _WORD + 1 for text in texts), np.int64, len(texts))
    for count in np.unique(counts).tolist():
        places = np.flatnonzero(counts == count)
        padded = b"".join(_padded(texts[place], count) for place in places.tolist())
        found[places] = _hash(np.frombuffer(padded, "<u8").reshape(-1, count).astype(np.uint64), key)
    return found


def _padded(text: bytes, words: int) -> bytes:
    """Returns a string with zeros up to a number of words, and its length as the last byte."""
    return text + bytes(words * _WORD - 1 - len(text)) + bytes([len(text) % 256])


def _hash(words: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    ones = np.ones(len(words), np.uint64)
    first, second, third, last = (ones * np.uint64(initial ^ part) for initial, part in zip(
        _INITIAL, (*key, *key), strict=True))
    state = first, second, third, last
    for word in words.T:
        a, b, c, d = _rounds((*state[:3], state[3] ^ word), 2)
        state = a ^ word, b, c, d
    a, b, c, d = _rounds((*state[:2], state[2] ^ np.uint64(0xFF), state[3]), 4)
    return a ^ b ^ c ^ d


def _rounds(state: _State, count: int) -> _State:
    a, b, c, d = state
    for _ in range(count):
        a, c = a + b, c + d
        b, d = _rotate(b, 13) ^ a, _rotate(d, 16) ^ c
        a, c = _rotate(a, 32) + d, c + b
        b, d = _rotate(b, 17) ^ c, _rotate(d, 21) ^ a
        c = _rotate(c, 32)
    return a, b, c, d


def _rotate(words: np.ndarray, by: int) -> np.ndarray:
    return (words << np.uint64(by)) | (words >> np.uint64(64 - by))
