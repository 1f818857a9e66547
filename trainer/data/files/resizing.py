"""Resizing with the results of `tf.image.resize`: half-pixel centers, no antialiasing, in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np


def _cubic(distance: float, b: float, c: float) -> float:
    """Returns a cubic kernel of Mitchell and Netravali, "Reconstruction filters in computer graphics", 1988."""
    x = abs(distance)
    if x < 1:
        return ((12 - 9 * b - 6 * c) * x**3 + (-18 + 12 * b + 6 * c) * x**2 + 6 - 2 * b) / 6
    if x < 2:
        return ((-b - 6 * c) * x**3 + (6 * b + 30 * c) * x**2 + (-12 * b - 48 * c) * x + 8 * b + 24 * c) / 6
    return 0.0


def _lanczos(distance: float, radius: int) -> float:
    if abs(distance) >= radius:
        return 0.0
    return float(np.sinc(distance) * np.sinc(distance / radius))


_KERNELS: dict[str, tuple[float, Callable[[float], float]]] = {  # the radius, and the weight at a distance
    "bilinear": (1.0, lambda distance: max(1 - abs(distance), 0.0)),
    "bicubic": (2.0, lambda distance: _cubic(distance, 0.0, 0.5)),  # Keys's kernel
    "mitchellcubic": (2.0, lambda distance: _cubic(distance, 1 / 3, 1 / 3)),
    "lanczos3": (3.0, lambda distance: _lanczos(distance, 3)),
    "lanczos5": (5.0, lambda distance: _lanczos(distance, 5)),
    "gaussian": (1.5, lambda distance: math.exp(-2 * distance**2) if abs(distance) < 1.5 else 0.0),
}
INTERPOLATIONS = ("nearest", "area", *_KERNELS)


def resize(image: np.ndarray, size: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    """Returns a resized image.

    Args:
      image: float32 of shape `(height, width, channels)`.
      size: the new height and width.
      interpolation: a name in `INTERPOLATIONS`.
    """
    if image.shape[:2] == size:
        return image
    if interpolation == "nearest":
        rows, columns = (_nearest(*sides) for sides in zip(image.shape, size, strict=False))
        return image[rows][:, columns]
    (first_rows, row_weights), (first_columns, column_weights) = (
        _weights(old, new, interpolation) for old, new in zip(image.shape, size, strict=False))
    rows = sum(image[first_rows[:, tap]] * row_weights[:, tap, None, None] for tap in range(row_weights.shape[1]))
    return sum(rows[:, first_columns[:, tap]] * column_weights[:, tap, None]
               for tap in range(column_weights.shape[1]))


def crop_to_aspect_ratio(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns the largest central part of an image with the aspect ratio of `size`."""
    height, width = image.shape[:2]
    top, left, bottom, right = box_of_aspect_ratio(height, width, size)
    return image[top:bottom, left:right]


def box_of_aspect_ratio(height: int, width: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns the top, left, bottom and right of the result of `crop_to_aspect_ratio`."""
    cropped_height = max(min(height, int(width * size[0] / size[1])), 1)
    cropped_width = max(min(width, int(height * size[1] / size[0])), 1)
    top, left = int((height - cropped_height) / 2), int((width - cropped_width) / 2)
    return top, left, top + cropped_height, left + cropped_width


def pad_to_aspect_ratio(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns an image padded with black to the aspect ratio of `size`."""
    height, width = image.shape[:2]
    padded_height = max(height, int(width * size[0] / size[1]))
    padded_width = max(width, int(height * size[1] / size[0]))
    top, left = int((padded_height - height) / 2), int((padded_width - width) / 2)
    return np.pad(image, ((top, padded_height - height - top), (left, padded_width - width - left), (0, 0)))


@functools.lru_cache(maxsize=512)
def _nearest(old: int, new: int) -> np.ndarray:
    return np.minimum(((np.arange(new) + 0.5) * (old / new)).astype(int), old - 1)


@functools.lru_cache(maxsize=512)
def _weights(old: int, new: int, interpolation: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the entries that form each new entry, and their weights, both of shape `(new, taps)`."""
    scale = old / new
    if interpolation == "area":
        return _area_weights(old, new, scale)
    radius, kernel = _KERNELS[interpolation]
    centres = (np.arange(new) + 0.5) * scale - 0.5
    entries = np.floor(centres)[:, None].astype(int) + np.arange(1 - math.ceil(radius), 1 + math.ceil(radius))
    weights = np.array([[kernel(entry - centre) if 0 <= entry < old else 0.0 for entry in row]
                        for row, centre in zip(entries, centres, strict=True)])
    weights /= weights.sum(1, keepdims=True)
    return entries.clip(0, old - 1), weights.astype(np.float32)


def _area_weights(old: int, new: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    first = np.floor(np.arange(new) * scale + 1e-9).astype(int)
    entries = first[:, None] + np.arange(math.ceil(scale) + 1)
    starts = (np.arange(new) * scale)[:, None]
    weights = np.clip(np.minimum(entries + 1, starts + scale) - np.maximum(entries, starts), 0, None)
    weights /= weights.sum(1, keepdims=True)
    return entries.clip(0, old - 1), weights.astype(np.float32)
