"""Single images: files and arrays, with Keras's numbers."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import MAX_ITEMS, brief, wrong_type
from trainer.core.files import open_file
from trainer.core.types import ArrayLike
from trainer.data.files.decoding import MALFORMED, MODES, MODES_OF_16_BITS, MODES_OF_32_BITS, formats_of, pillow
from trainer.data.files.resizing import box_of_aspect_ratio

if TYPE_CHECKING:
    from PIL import Image

_GREY = ("L", "I;16", "I")  # modes that stay as they are where grey is asked for
_FILTERS = ("nearest", "bilinear", "bicubic", "hamming", "box", "lanczos")
_FORMATS = ("channels_last", "channels_first")


@explains_arguments
def load_img(
    path: str | bytes | os.PathLike[str] | IO[bytes], color_mode: str = "rgb",
    target_size: tuple[int, int] | None = None, interpolation: str = "nearest", keep_aspect_ratio: bool = False,
) -> Image.Image:
    """Loads a file as a Pillow image.

    Args:
      path: path of the file, or a binary file object.
      color_mode: "rgb", "rgba" or "grayscale"; grey images of 16 and 32 bits keep their depth with "grayscale".
      target_size: height and width to resize to; by default the size of the file.
      interpolation: "nearest", "bilinear", "bicubic", "hamming", "box" or "lanczos".
      keep_aspect_ratio: whether to crop the largest central part with the aspect ratio of `target_size` first.

    Raises:
      ValueError: for another color mode or interpolation, or for colors of more than 8 bits, which Pillow cuts off.
      TypeError: for an argument of a wrong type.
      OSError: if there is no such file, or it is not an image.
      ImportError: without Pillow.

    Example::

      image = trainer.utils.load_img("cat.jpg", target_size=(180, 180))
      model.predict(trainer.utils.img_to_array(image)[None])

    Source: `keras.utils.load_img`.
    """
    reader = pillow()
    arguments.check_word("color_mode", color_mode, tuple(MODES))
    arguments.check_word("interpolation", interpolation, _FILTERS)
    arguments.require_bool(keep_aspect_ratio=keep_aspect_ratio)
    size = None if target_size is None else _checked_size(target_size)
    if not hasattr(path, "read"):
        path = arguments.as_path("path", path, "a path, or a binary file object")
    formats = formats_of(path)
    try:
        with (contextlib.nullcontext(path) if not isinstance(path, str) else open_file(path)) as file, reader.open(
                file, formats=formats) as opened:
            opened.load()
            image: Image.Image = opened.copy()
    except (*MALFORMED, reader.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise OSError(f"The image {path!r} cannot be read as {', '.join(formats[:MAX_ITEMS])}: "
                      f"{brief(error)}.") from error
    mode = MODES[color_mode]
    if color_mode != "grayscale" and image.mode in MODES_OF_16_BITS + MODES_OF_32_BITS:
        raise ValueError(f"The image {path!r} is grey with more than 8 bits (mode {image.mode!r}), which Pillow cuts "
                         'off where it makes colours. Load it with `color_mode="grayscale"` and scale its array.')
    if image.mode != mode and not (color_mode == "grayscale" and image.mode in _GREY):
        image = image.convert(mode)
    if size is None or (image.height, image.width) == size:
        return image
    box = None
    if keep_aspect_ratio:
        top, left, bottom, right = box_of_aspect_ratio(image.height, image.width, size)
        box = left, top, right, bottom
    return image.resize(size[::-1], reader.Resampling[interpolation.upper()], box=box)


@explains_arguments
def img_to_array(img: Image.Image | np.ndarray, data_format: str | None = None,
                 dtype: DTypeLike = "float32") -> np.ndarray:
    """Converts a Pillow image to an array of shape `(height, width, channels)`.

    Args:
      img: image, or an array of two or three dimensions.
      data_format: "channels_last", the default, or "channels_first" for `(channels, height, width)`.
      dtype: dtype of the array.

    Raises:
      ValueError: for another `data_format`, or for an array with another number of dimensions.

    >>> img_to_array(np.zeros((2, 3))).shape
    (2, 3, 1)

    Source: `keras.utils.img_to_array`.
    """
    channels_first = _is_channels_first(data_format)
    values = arguments.as_numbers("img", img, "float32" if dtype is None else dtype)
    if values.ndim not in (2, 3):
        raise ValueError(f"`img` must be an image, with two or three dimensions. Received: shape {values.shape}.")
    values = values.reshape(*values.shape[:2], -1)
    return values.transpose(2, 0, 1) if channels_first else values


@explains_arguments
def array_to_img(x: ArrayLike, data_format: str | None = None, scale: bool = True,
                 dtype: DTypeLike = "float32") -> Image.Image:
    """Converts an array to a Pillow image of 8 bits.

    Args:
      x: array of shape `(height, width, channels)` with 1, 3 or 4 channels.
      data_format: "channels_last", the default, or "channels_first" for `(channels, height, width)`.
      scale: whether to scale the values so that the minimum is 0 and the maximum 255. Otherwise they are truncated to
        integers, and must lie in [0, 255]; a grey image may have greater values, and then has 32 bits.
      dtype: dtype of the scaling.

    Raises:
      ValueError: for another shape or `data_format`, or for values that the image cannot hold.
      ImportError: without Pillow.

    Source: `keras.utils.array_to_img`.
    """
    writer = pillow()
    channels_first = _is_channels_first(data_format)
    arguments.require_bool(scale=scale)
    values = arguments.as_numbers("x", x, "float32" if dtype is None else dtype)
    if values.ndim == 3 and channels_first:
        values = values.transpose(1, 2, 0)
    if values.ndim != 3 or values.shape[-1] not in (1, 3, 4) or not values.size:
        raise ValueError(f"`x` must be one image with 1, 3 or 4 channels, of shape "
                         f"{'(channels, height, width)' if channels_first else '(height, width, channels)'}. Received: "
                         f"shape {np.shape(x)}.")
    if not np.isfinite(values).all():
        raise ValueError("`x` has values that are not finite, which an image cannot hold.")
    if scale:
        values = values - values.min()
        values = values / (values.max() or 1) * 255
    elif values.min() < 0 or (values.max() >= 256 and values.shape[-1] > 1):
        raise ValueError(f"`x` has values from {values.min():.4g} to {values.max():.4g}, and an image holds values in "
                         "[0, 255]. Pass `scale=True`, or scale or clip them.")
    if values.shape[-1] == 1:
        return writer.fromarray(values[..., 0].astype("int32" if values.max() > 255 else "uint8"))
    return writer.fromarray(values.astype("uint8"))


@explains_arguments
def save_img(
    path: str | os.PathLike[str] | IO[bytes], x: ArrayLike, data_format: str | None = None,
    file_format: str | None = None, scale: bool = True, **kwargs: Any,
) -> None:
    """Saves an array to an image file.

    Args:
      path: path of the file, or a binary file object.
      x: array, as in `array_to_img`.
      data_format: as in `array_to_img`.
      file_format: format such as "png"; by default from the path's suffix. Required for a file object.
      scale: as in `array_to_img`.
      **kwargs: arguments of `PIL.Image.Image.save`.

    Raises:
      ValueError: from `array_to_img`, for an unknown format, or for a transparent image as JPEG.
      ImportError: without Pillow.

    Source: `keras.utils.save_img`.
    """
    image = array_to_img(x, data_format, scale)
    if not hasattr(path, "write"):
        path = arguments.as_path("path", path, "a path, or a binary file object")
    if file_format is None and isinstance(path, str):
        file_format = pathlib.Path(path).suffix[1:]
    file_format = "jpeg" if (file_format or "").lower() == "jpg" else file_format
    if not file_format:
        raise ValueError(f"`file_format` must be given, such as 'png', where no suffix of `path` says it. Received: "
                         f"path={path!r}.")
    if image.mode == "RGBA" and file_format.lower() == "jpeg":
        raise ValueError("JPEG has no transparency. Received: 4 channels. Pass `x[..., :3]`, or write a PNG.")
    buffer = io.BytesIO()
    try:
        image.save(buffer, format=file_format, **kwargs)
    except KeyError:
        raise ValueError(f"Unknown image format {file_format!r}. Pass `file_format`, such as 'png'.") from None
    if isinstance(path, str):
        pathlib.Path(path).write_bytes(buffer.getvalue())
    else:
        path.write(buffer.getvalue())


def _is_channels_first(data_format: str | None) -> bool:
    if data_format is not None:
        arguments.check_word("data_format", data_format, _FORMATS)
    return data_format == "channels_first"


def _checked_size(target_size: object) -> tuple[int, int]:
    if not isinstance(target_size, (tuple, list)) or len(target_size) != 2:
        raise wrong_type("target_size", target_size, "a height and a width")
    height, width = (arguments.as_count("target_size", side) for side in target_size)
    return height, width
