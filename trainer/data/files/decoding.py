"""Images from files, as float32 arrays; what cannot be read is named."""

from __future__ import annotations

import numpy as np

from trainer.data.sources.arrays import DataError

CHANNELS = {"rgb": 3, "rgba": 4, "grayscale": 1}
_MODES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
_WIDE = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")  # modes of 16 bits, which Pillow would cut off at 255


def decode_image(path: str, color_mode: str, max_pixels: int) -> np.ndarray:
    """Returns an image with values from 0 to 255, float32 of shape `(height, width, channels)`.

    Of an animation the first image counts. 16 bits become 8, palettes colours, and CMYK becomes RGB.

    Args:
      path: of the file.
      color_mode: "rgb", "rgba" or "grayscale".
      max_pixels: more are refused before they are decoded: a small file may hold an image that fills the memory.

    Raises:
      DataError: the file cannot be read or has too many pixels; it is named.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise DataError(f"The image {path!r} has {width}x{height} pixels, more than max_pixels={max_pixels:,}. "
                                "Make it smaller, or pass a higher limit.")
            if image.mode in _WIDE:
                return _from_wide(np.asarray(image, np.float32), color_mode)
            has_transparency = image.mode == "P" and "transparency" in image.info
            pixels = np.asarray((image.convert("RGBA") if has_transparency else image).convert(_MODES[color_mode]),
                                np.float32)
            return pixels.reshape(height, width, CHANNELS[color_mode])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"The image {path!r} cannot be read: {error}. Delete it, or pass `skip_unreadable=True`.") from error


def is_readable(path: str, color_mode: str, max_pixels: int) -> bool:
    """Returns whether `decode_image` reads a file, by reading it."""
    try:
        decode_image(path, color_mode, max_pixels)
    except DataError:
        return False
    return True


def _from_wide(values: np.ndarray, color_mode: str) -> np.ndarray:
    grey = (values / 257 if values.max(initial=0) > 255 else values).clip(0, 255)[..., None]
    if color_mode == "grayscale":
        return grey
    return np.concatenate([grey] * 3 + [np.full_like(grey, 255)] * (color_mode == "rgba"), -1)
