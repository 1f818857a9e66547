"""Random augmentations of images, with the names and arguments of Keras's layers, for `random_map` of datasets.

Each takes a random generator, an image as float32 of shape `(height, width, channels)`, and the other elements of the
row, which it returns unchanged: call `random_map` before `batch`. `MixUp` and `CutMix` take batches of images and
one-hot labels: call `random_map` after `batch`. The random numbers of a row depend on the seed, the epoch and the row
only, so an epoch is the same after an interruption and on any number of machines:

    dataset = trainer.data.image_dataset_from_directory("photos", batch_size=None)
    dataset = dataset.random_map(augmentation.RandomFlip("horizontal")).random_map(augmentation.RandomRotation(0.1))
    model.fit(dataset.batch(32), epochs=10)
"""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from trainer.core.arguments import as_count, as_number, check_word, require_positive, require_share
from trainer.core.calls.entry_points import foreign_arguments
from trainer.core.calls.public_names import own_names
from trainer.core.errors import describe
from trainer.data.files import resizing
from trainer.data.sources.arrays import DataError

_RANDOM_MAP = ("Give it to `random_map`, which calls it with a random generator: "
               "`dataset.random_map(augmentation.RandomFlip())`.")
_FOREIGN_NAMES = {  # of Keras, torchvision and Albumentations
    **dict.fromkeys(("Rescaling", "Normalize", "ToTensor"),
                    "Scale in the module, or by `dataset.map(lambda image, label: (image / 255.0, label))`."),
    **dict.fromkeys(("Resizing", "Resize", "CenterCrop"),
                    "`trainer.data.image_dataset_from_directory(image_size=(224, 224))` resizes; arrays by "
                    "`jax.image.resize`."),
    **dict.fromkeys(("RandomHorizontalFlip", "HorizontalFlip"), "Instead: `RandomFlip(\"horizontal\")`."),
    **dict.fromkeys(("RandomVerticalFlip", "VerticalFlip"), "Instead: `RandomFlip(\"vertical\")`."),
    **dict.fromkeys(("ColorJitter", "RandomColorJitter"), "Instead: `RandomBrightness` and `RandomContrast`."),
    "Compose": "Call `random_map` once for each: `dataset.random_map(a).random_map(b)`.",
}
_CALL = dict.fromkeys(("image", "training"), _RANDOM_MAP)


class _OfRandomMap:
    """Base of the functions for `random_map`."""

    not_a_layer = "It changes data before they reach a model: `dataset.random_map({}(...))`."

    def _require_generator(self, rng: object) -> None:
        if not isinstance(rng, np.random.Generator):
            name = type(self).__name__
            raise DataError(f"{name} takes a `numpy.random.Generator` first. Received: {describe(rng)}, as from `map`. "
                            f"Call `dataset.random_map({name}(...))` instead.")


class ImageAugmentation(_OfRandomMap, abc.ABC):
    """A random change of an image.

    Raises:
      ValueError: if it is called without a random generator, or with anything other than a single image, such as a
        batch.
    """

    @foreign_arguments(_CALL)
    def __call__(self, rng: np.random.Generator, image: np.ndarray, *others: Any) -> Any:
        self._require_generator(rng)
        if np.ndim(image) != 3:
            advice = ("Grey images need a channel axis: `image[..., None]`." if np.ndim(image) == 2 else
                      "Call `random_map` before `batch`, on rows: `image_dataset_from_directory(batch_size=None)`.")
            raise DataError(f"{type(self).__name__} changes one image, of shape (height, width, channels). Received: "
                            f"{describe(image)}. {advice}")
        changed = self.change(rng, np.asarray(image, np.float32))
        return (changed, *others) if others else changed

    @abc.abstractmethod
    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        """Returns the changed image; `image` is not written to."""


class RandomFlip(ImageAugmentation):
    """Flips an image with a probability of 0.5, in each direction.

    Args:
      mode: "horizontal", "vertical" or "horizontal_and_vertical".
    """

    def __init__(self, mode: str = "horizontal_and_vertical"):
        self.mode = check_word("mode", mode, ("horizontal", "vertical", "horizontal_and_vertical"))

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        left, top = rng.uniform(size=2) < 0.5
        if left and "horizontal" in self.mode:
            image = image[:, ::-1]
        return image[::-1] if top and "vertical" in self.mode else image


class RandomCrop(ImageAugmentation):
    """Crops an image at a random position; a smaller image is resized to the size of the crop.

    Args:
      height: height of the crop.
      width: width of the crop.
    """

    def __init__(self, height: int, width: int):
        self.height, self.width = as_count("height", height), as_count("width", width)

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        if height < self.height or width < self.width:
            size = self.height, self.width
            return resizing.resize(resizing.crop_to_aspect_ratio(image, size), size)
        top, left = rng.integers(height - self.height + 1), rng.integers(width - self.width + 1)
        return image[top:top + self.height, left:left + self.width]


class RandomRotation(ImageAugmentation):
    """Rotates an image around its center; points outside of the image are filled by reflection.

    Args:
      factor: maximum rotation in either direction, as a fraction of a full turn; or a pair of the minimum and the
        maximum, counterclockwise.
    """

    def __init__(self, factor: float | tuple[float, float]):
        self.factor = _range("factor", factor)

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        angle = 2 * math.pi * rng.uniform(*self.factor)
        cosine, sine = math.cos(angle), math.sin(angle)
        return _transformed(image, np.array([[cosine, sine], [-sine, cosine]]))


class RandomZoom(ImageAugmentation):
    """Zooms out of an image (positive factors) or into it (negative factors) at constant size.

    Args:
      height_factor: maximum zoom in either direction, as a fraction of the height; or a pair of the minimum and the
        maximum.
      width_factor: the same for the width; by default the zoom of the height, which keeps the aspect ratio.
    """

    def __init__(self, height_factor: float | tuple[float, float],
                 width_factor: float | tuple[float, float] | None = None):
        self.height_factor = _range("height_factor", height_factor)
        self.width_factor = None if width_factor is None else _range("width_factor", width_factor)

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        height = 1 + rng.uniform(*self.height_factor)
        width = height if self.width_factor is None else 1 + rng.uniform(*self.width_factor)
        return _transformed(image, np.diag([height, width]))


class RandomContrast(ImageAugmentation):
    """Scales the distance of each channel from its mean over the image.

    Args:
      factor: scales by 1 - factor to 1 + factor; or a pair `(lower, upper)`, which scales by 1 - lower to 1 + upper.
      value_range: range to which values are clipped.
    """

    def __init__(self, factor: float | tuple[float, float], value_range: tuple[float, float] = (0, 255)):
        self.factor = _contrast_range(factor)
        self.value_range = _values(value_range)

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        mean = image.mean((0, 1))
        return ((image - mean) * np.float32(1 + rng.uniform(*self.factor)) + mean).clip(*self.value_range)


class RandomBrightness(ImageAugmentation):
    """Adds a random number to all values of an image.

    Args:
      factor: maximum change in either direction, as a fraction of the value range; or a pair of the minimum and the
        maximum.
      value_range: range of the values, to which they are clipped.
    """

    def __init__(self, factor: float | tuple[float, float], value_range: tuple[float, float] = (0, 255)):
        self.factor = _range("factor", factor)
        self.value_range = _values(value_range)

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        low, high = self.value_range
        return (image + np.float32(rng.uniform(*self.factor) * (high - low))).clip(low, high)


class RandAugment(ImageAugmentation):
    """Applies several random changes of the same strength, drawn separately for each image.

    Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space",
    https://arxiv.org/abs/1909.13719. The changes are rotation, zoom, contrast, brightness, translation, shear,
    inversion, solarization, posterization and the identity.

    Args:
      num_layers: number of changes.
      factor: strength, from 0 to 1.
      value_range: range of the values.
    """

    def __init__(self, num_layers: int = 2, factor: float = 0.5, value_range: tuple[float, float] = (0, 255)):
        self.num_layers = as_count("num_layers", num_layers)
        require_share(factor=factor)
        self.factor, self.value_range = float(factor), _values(value_range)
        self._changes = (
            RandomRotation(factor / 12).change, RandomZoom(factor / 2).change,
            RandomContrast(0.9 * factor, self.value_range).change,
            RandomBrightness(factor / 2, self.value_range).change,
            self._translated, self._sheared, self._inverted, self._solarized, self._posterized,
            lambda rng, image: image)

    def change(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        for number in rng.integers(len(self._changes), size=self.num_layers):
            image = self._changes[number](rng, image)
        return image

    def _translated(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        shift = rng.uniform(-0.3, 0.3, 2) * self.factor * image.shape[:2]
        return _transformed(image, np.eye(2), shift)

    def _sheared(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        matrix, axis = np.eye(2), rng.integers(2)
        matrix[axis, 1 - axis] = rng.uniform(-0.3, 0.3) * self.factor
        return _transformed(image, matrix)

    def _inverted(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        return np.float32(sum(self.value_range)) - image

    def _solarized(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        low, high = self.value_range
        return np.where(image < high - self.factor * (high - low), image, self._inverted(rng, image))

    def _posterized(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        low, high = self.value_range
        step = np.float32((high - low) / 2 ** (8 - round(4 * self.factor)))
        return np.floor((image - low) / step) * step + np.float32(low)


class MixUp(_OfRandomMap):
    """Mixes each row of a batch with another row, including labels; for `random_map` after `batch`.

    Zhang et al., "mixup: Beyond empirical risk minimization", https://arxiv.org/abs/1710.09412.

    Args:
      alpha: parameter of the beta distribution of each row's share in its mixture.

    Raises:
      ValueError: if it is called without a random generator or labels, with a row, or with class indices as labels,
        which cannot be mixed: use `label_mode="categorical"`.
    """

    def __init__(self, alpha: float = 0.2):
        require_positive(alpha=alpha)
        self.alpha = alpha

    def __call__(self, rng: np.random.Generator, *batch: Any) -> tuple[Any, Any]:
        self._require_generator(rng)
        images, labels = _mixable(type(self).__name__, batch)
        share = rng.beta(self.alpha, self.alpha, len(images)).astype(np.float32)
        order = rng.permutation(len(images))
        return _mixed(images, images[order], share), _mixed(labels, labels[order], share)


class CutMix(_OfRandomMap):
    """Pastes a rectangle of another image into each image, and mixes labels by area; for `random_map` after `batch`.

    Yun et al., "CutMix: Regularization strategy to train strong classifiers", https://arxiv.org/abs/1905.04899.

    Args:
      alpha: parameter of the beta distribution of the share of an image that stays.

    Raises:
      ValueError: if it is called without a random generator or labels, with a row, or with class indices as labels,
        which cannot be mixed: use `label_mode="categorical"`.
    """

    def __init__(self, alpha: float = 1.0):
        require_positive(alpha=alpha)
        self.alpha = alpha

    def __call__(self, rng: np.random.Generator, *batch: Any) -> tuple[Any, Any]:
        self._require_generator(rng)
        images, labels = _mixable(type(self).__name__, batch)
        height, width = images.shape[1:3]
        side = np.sqrt(1 - rng.beta(self.alpha, self.alpha, len(images)))
        top, left = rng.uniform(0, height, len(images)), rng.uniform(0, width, len(images))
        rows = np.abs(np.arange(height)[None] + 0.5 - top[:, None]) < (side * height / 2)[:, None]
        columns = np.abs(np.arange(width)[None] + 0.5 - left[:, None]) < (side * width / 2)[:, None]
        is_other = rows[:, :, None] & columns[:, None]
        order = rng.permutation(len(images))
        share = (1 - is_other.mean((1, 2))).astype(np.float32)
        return np.where(is_other[..., None], images[order], images), _mixed(labels, labels[order], share)


def _mixed(one: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    share = share.reshape(-1, *[1] * (one.ndim - 1))
    return share * one + (1 - share) * other


def _mixable(name: str, batch: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and the labels of a batch; raises DataError if they cannot be mixed."""
    received = f"Received: {', '.join(map(describe, batch))}."
    if len(batch) != 2:
        raise DataError(f"{name} mixes batches of images and their labels, and nothing else. {received} Load images "
                        "with `label_mode=\"categorical\"`.")
    images, labels = np.asarray(batch[0]), np.asarray(batch[1])
    if images.ndim != 4:
        raise DataError(f"{name} mixes batches of images, of shape (rows, height, width, channels). {received} Call "
                        "`random_map` after `batch`.")
    if labels.ndim != 2 or len(labels) != len(images) or not np.issubdtype(labels.dtype, np.floating):
        raise DataError(f"{name} mixes labels that are vectors of probabilities, of shape (rows, classes). {received} "
                        "Load images with `label_mode=\"categorical\"`.")
    return images, labels


def _range(name: str, factor: object) -> tuple[float, float]:
    """Returns the minimum and the maximum of a factor."""
    if isinstance(factor, (tuple, list)):
        low, high = _pair(name, factor)
    else:
        high = abs(as_number(name, factor, "a number or a pair of numbers"))
        low = -high
    if not -1 <= low <= high <= 1:
        raise ValueError(
            f"`{name}` must be between -1 and 1, or a pair of such numbers in order. Received: {factor!r}.")
    return low, high


def _contrast_range(factor: object) -> tuple[float, float]:
    expected = "a number from 0 to 1, or a pair of numbers"
    lower, upper = _pair("factor", factor) if isinstance(factor, (tuple, list)) else [
        as_number("factor", factor, expected)] * 2
    if not -1 <= -lower <= upper <= 1:
        raise ValueError("`factor` must be a number from 0 to 1, or a pair of the most that is taken away and the most "
                         f"that is added. Received: {factor!r}.")
    return -lower, upper


def _values(value_range: object) -> tuple[float, float]:
    low, high = _pair("value_range", value_range)
    if not low < high:
        raise ValueError(f"`value_range` must be two numbers, the lower first. Received: {value_range!r}.")
    return low, high


def _pair(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"`{name}` must be a pair of numbers. Received: {value!r}.")
    return as_number(f"{name}[0]", value[0]), as_number(f"{name}[1]", value[1])


def _transformed(image: np.ndarray, matrix: np.ndarray, shift: Any = (0.0, 0.0)) -> np.ndarray:
    """Returns an image sampled at `matrix @ point + shift`, relative to its center: bilinear, reflected outside."""
    height, width = image.shape[:2]
    middle = np.array([(height - 1) / 2, (width - 1) / 2])
    points = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1) - middle
    sources = points @ matrix.T + middle + np.asarray(shift)
    low = np.floor(sources).astype(int)
    part = (sources - low).astype(np.float32)[..., None]
    rows, columns = ([_mirrored(low[..., axis] + step, side) for step in (0, 1)]
                     for axis, side in enumerate((height, width)))
    top, bottom = ((1 - part[..., 1, :]) * image[row, columns[0]] + part[..., 1, :] * image[row, columns[1]]
                   for row in rows)
    return (1 - part[..., 0, :]) * top + part[..., 0, :] * bottom


def _mirrored(numbers: np.ndarray, side: int) -> np.ndarray:
    """Returns row numbers in an image for numbers in its reflected extension, with repeated edges."""
    numbers = numbers % (2 * side)
    return np.minimum(numbers, 2 * side - 1 - numbers)


__getattr__, __dir__, __all__ = own_names(__name__, _FOREIGN_NAMES)
