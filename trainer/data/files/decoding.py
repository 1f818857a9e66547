"""Images from files, as float32 arrays; errors name the unreadable file."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import types
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.core.errors import brief
from trainer.data.files.folders import open_in_folder
from trainer.data.sources.arrays import DataError

if TYPE_CHECKING:
    from PIL import Image

CHANNELS = {"rgb": 3, "rgba": 4, "grayscale": 1}
MODES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
MODES_OF_16_BITS = ("I;16", "I;16B", "I;16L", "I;16N")  # Pillow would clip these modes at 255
MODES_OF_32_BITS = ("I", "F")
MALFORMED = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, MemoryError,
             struct.error, zlib.error)
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_USUAL = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_lock = threading.Lock()
_opening = 0  # number of threads that open a file
_pillows_limit: int | None = None


def pillow() -> types.ModuleType:
    """Returns the module `PIL.Image`; raises ImportError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images are read with Pillow. Install it: pip install 'trainer-jax[images]'.") from error
    return Image


class TooManyPixelsError(DataError):
    """An image has more pixels than `max_pixels`."""


def decode_image(path: str, color_mode: str, max_pixels: int, folder: str | None = None) -> np.ndarray:
    """Returns an image with values from 0 to 255, float32 of shape `(height, width, channels)`.

    Of an animation, the first image is used. 16 bits become 8, palettes become colors, and CMYK becomes RGB.

    Args:
      path: path of the file.
      color_mode: "rgb", "rgba" or "grayscale".
      max_pixels: larger images are rejected before they are decoded, because a small file may hold an image that fills
        the memory. Pillow's own limit is ignored.
      folder: folder that the file belongs to, if any.

    Raises:
      DataError: if the file cannot be read, has 32-bit values, or has too many pixels; the message names the file.
    """
    image = load_image(path, color_mode, max_pixels, folder)
    pixels = np.asarray(image, np.float32)
    if image.mode in MODES_OF_16_BITS:
        return _from_16_bits(pixels, color_mode)
    return pixels.reshape(*pixels.shape[:2], CHANNELS[color_mode])


def load_image(path: str, color_mode: str, max_pixels: int, folder: str | None = None) -> Image.Image:
    """Returns an image in Pillow's mode of `color_mode`, or a 16-bit grayscale image; see `decode_image`."""
    with _naming(path), open_in_folder(path, folder) as file, _open(path, file) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise TooManyPixelsError(
                f"The image {path!r} has {width}x{height} pixels, more than max_pixels={max_pixels:,}. Make it "
                "smaller, pass a higher limit, or pass `skip_unreadable=True`.")
        if image.mode in MODES_OF_32_BITS:
            raise DataError(f"The image {path!r} has values of 32 bits (mode {image.mode!r}), whose range is unknown. "
                            "Save it with 8 or 16 bits, or pass `skip_unreadable=True`.")
        if image.mode in MODES_OF_16_BITS:
            image.load()
            return image.copy()
        has_transparency = image.mode == "P" and "transparency" in image.info
        return (image.convert("RGBA") if has_transparency else image).convert(MODES[color_mode])


def formats_of(path: Any) -> list[str]:
    """Returns Pillow's names of the formats to try for a path, or for a file object.

    Content of any kind would start Ghostscript for PostScript, whatever the name of the file. Files of the usual
    formats often have each other's suffixes.

    >>> formats_of("1.png")
    ['BMP', 'GIF', 'JPEG', 'PNG', 'TIFF', 'WEBP']
    """
    if isinstance(path, str) and path.lower().endswith(SUFFIXES):
        return list(_USUAL)
    of_suffixes = pillow().registered_extensions()
    if not isinstance(path, str):
        return sorted({*_USUAL, *of_suffixes.values()} - {"EPS"})
    return sorted({*_USUAL, of_suffixes.get(os.path.splitext(path)[1].lower(), "PNG")})


def _open(path: str, file: Any) -> Image.Image:
    from PIL import Image

    with _without_pillows_limit():
        return Image.open(file, formats=formats_of(path))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    from PIL import Image

    try:
        yield
    except DataError:
        raise
    except (*MALFORMED, Image.DecompressionBombError) as error:
        raise DataError(
            f"The image {path!r} cannot be read: {brief(error)}. Delete it, or pass `skip_unreadable=True`.") from error


@contextlib.contextmanager
def _without_pillows_limit() -> Iterator[None]:
    """Disables Pillow's process-wide limit of pixels inside the block, because `max_pixels` decides."""
    global _opening, _pillows_limit
    from PIL import Image

    with _lock:
        if _opening == 0:
            _pillows_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        _opening += 1
    try:
        yield
    finally:
        with _lock:
            _opening -= 1
            if _opening == 0:
                Image.MAX_IMAGE_PIXELS = _pillows_limit


def _from_16_bits(values: np.ndarray, color_mode: str) -> np.ndarray:
    grey = (values / 257)[..., None]
    if color_mode == "grayscale":
        return grey
    return np.concatenate([grey] * 3 + [np.full_like(grey, 255)] * (color_mode == "rgba"), -1)
