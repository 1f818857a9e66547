"""Images from folders: Keras's files and order, TensorFlow's resizing, exact resume, and what cannot be read."""

import io
import itertools
import os
import sys

import jax
import numpy as np
import pytest
from flax import linen as nn
from PIL import EpsImagePlugin, Image

import trainer
from trainer.data import RowDataset, image_dataset_from_directory
from trainer.data.files import resizing
from trainer.data.files.decoding import decode_image

CLASSES = ("ants", "bees", "cats")


def save(path, seed=0, size=(12, 9), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    numbers = itertools.count()
    for name, count in zip(CLASSES, (7, 4, 6), strict=True):
        for row in range(count):
            save(tmp_path / "images" / name / ("nested" if row == 2 else "") / f"{row}.png", next(numbers))
    (tmp_path / "images" / "ants" / "notes.txt").write_text("no image")
    (tmp_path / "images" / ".hidden").mkdir()
    return tmp_path / "images"


def read(folder, **options):
    return image_dataset_from_directory(folder, **{"image_size": 8, "batch_size": 4, "verbose": False, **options})


@pytest.fixture(scope="module")
def keras_index():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        pytest.importorskip("keras")
        from keras.src.utils import dataset_utils
    return dataset_utils


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("options", [
    {}, {"class_names": ["cats", "ants"]}, {"labels": None}, {"labels": list(range(17))}])
@pytest.mark.parametrize("subset", [None, "training", "validation"])
def test_files_labels_and_splits_are_those_of_keras(folder, keras_index, shuffle, options, subset):
    if "class_names" in options and options["class_names"] and subset:
        pytest.skip("once is enough")
    labels = options.get("labels", "inferred")
    paths, labels, names = keras_index.index_directory(
        str(folder), list(labels) if isinstance(labels, list) else labels, (".png",), options.get("class_names"),
        shuffle, 3, verbose=False)
    fraction = 0.3 if subset else None
    paths, labels = keras_index.get_training_or_validation_split(paths, labels, fraction, subset)
    dataset = read(folder, shuffle=shuffle, seed=3, subset=subset, validation_split=fraction, **options)
    assert dataset.file_paths == paths and dataset.class_names == names
    if labels is not None:
        assert dataset.rows._labels.tolist() == list(labels)


def test_both_parts_of_a_split_have_all_files_once(folder):
    parts = read(folder, validation_split=0.25, subset="both", seed=1)
    assert [len(part.file_paths) for part in parts] == [13, 4]
    assert sorted(itertools.chain(*(part.file_paths for part in parts))) == sorted(read(folder).file_paths)
    validation = [[batch[1].tolist() for batch in RowDataset.read_ahead(part, part.of_pass(number))]
                  for part in parts[1:] for number in range(2)]
    assert validation[0] == validation[1], "it is not shuffled"


@pytest.mark.parametrize(("mode", "dtype", "shape"), [
    ("int", "int32", (4,)), ("categorical", "float32", (4, 3)), (None, None, None)])
def test_labels_have_the_form_that_was_asked_for(folder, mode, dtype, shape):
    batch = next(iter(read(folder, label_mode=mode)))
    if mode is None:
        assert batch.shape == (4, 8, 8, 3)
    else:
        assert (batch[1].dtype.name, batch[1].shape) == (dtype, shape)
    x, y = next(iter(read(folder, label_mode="binary", class_names=["bees", "cats"])))
    assert y.shape == (4, 1) and y.dtype == np.float32 and x.dtype == np.float32


@pytest.mark.sampled
@pytest.mark.parametrize(("color_mode", "channels"), [("rgb", 3), ("rgba", 4), ("grayscale", 1)])
@pytest.mark.parametrize("saved", ["RGB", "L", "P", "RGBA", "CMYK", "I;16", "1", "LA"])
def test_images_of_any_mode_are_read(tmp_path, color_mode, channels, saved):
    path = tmp_path / "a" / ("1.jpg" if saved == "CMYK" else "1.png")
    if saved == "I;16":
        path.parent.mkdir()
        Image.fromarray((np.arange(12 * 9).reshape(9, 12) * 600).astype(np.uint16)).save(path)
    else:
        save(path, mode=saved)
    image, = read(tmp_path, color_mode=color_mode, labels=None, image_size=(9, 12))
    assert image.shape == (1, 9, 12, channels) and 0 <= image.min() <= image.max() <= 255
    if saved == "RGB" and color_mode == "rgb":
        np.testing.assert_array_equal(image[0], np.asarray(Image.open(path)))
    if saved == "I;16":
        np.testing.assert_allclose(image[0, ..., 0].ravel(), np.arange(108) * 600 / 257, rtol=1e-6)


def test_of_an_animation_the_first_image_is_read(tmp_path):
    (tmp_path / "a").mkdir()
    frames = [Image.new("RGB", (6, 5), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a" / "1.gif", save_all=True, append_images=frames[1:])
    image, = read(tmp_path, labels=None, image_size=(5, 6))
    assert image[0, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos3", "lanczos5"])
@pytest.mark.parametrize("size", [(5, 20), (31, 7), (9, 12)])
def test_resizing_without_antialiasing_is_that_of_jax(interpolation, size):
    image = np.random.default_rng(0).uniform(0, 255, (9, 12, 3)).astype(np.float32)
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(interpolation, interpolation)
    expected = jax.image.resize(image, (*size, 3), method, antialias=False)
    received = resizing.resize(image, size, interpolation)
    assert received.dtype == np.float32
    np.testing.assert_allclose(received, expected, atol=2e-3)


def test_bilinear_is_that_of_tensorflow():
    # tf.image.resize([[0, 1, 2, 3]], (1, 2)): half-pixel centres, two neighbours each, and no antialiasing.
    row = np.arange(5, dtype=np.float32)[None, :, None]
    assert resizing.resize(row, (1, 2)).ravel().tolist() == [0.75, 3.25]
    assert resizing.resize(row, (1, 10)).ravel().tolist() == pytest.approx(
        [0, .25, .75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75, 4])
    assert resizing.resize(row, (1, 2), "nearest").ravel().tolist() == [1, 3]
    assert resizing.resize(row[:, :4], (1, 2), "area").ravel().tolist() == [0.5, 2.5]
    assert resizing.resize(row, (1, 2), "area").ravel() == pytest.approx([(0 + 1 + 2 / 2) / 2.5, (2 / 2 + 3 + 4) / 2.5])


@pytest.mark.parametrize("interpolation", resizing.INTERPOLATIONS)
def test_every_interpolation_keeps_one_colour(interpolation):
    image = np.full((7, 9, 3), 200, np.float32)
    for size in ((3, 20), (14, 4)):
        np.testing.assert_allclose(resizing.resize(image, size, interpolation), 200, rtol=1e-6)


def test_another_ratio_of_the_sides_is_cut_or_padded():
    image = np.arange(10, dtype=np.float32)[None, :, None].repeat(4, 0)
    assert resizing.crop_to_aspect_ratio(image, (8, 8))[0, :, 0].tolist() == [3, 4, 5, 6]
    rows, odd = image.swapaxes(0, 1), image[:, :9]
    assert resizing.crop_to_aspect_ratio(rows, (8, 8))[:, 0, 0].tolist() == [3, 4, 5, 6]
    assert resizing.crop_to_aspect_ratio(odd, (8, 8))[0, :, 0].tolist() == [2, 3, 4, 5]  # rounded down, as in Keras
    assert resizing.crop_to_aspect_ratio(odd.swapaxes(0, 1), (8, 8))[:, 0, 0].tolist() == [2, 3, 4, 5]
    assert resizing.crop_to_aspect_ratio(rows, (4, 8)).shape == (2, 4, 1)
    padded = resizing.pad_to_aspect_ratio(image, (8, 8))
    assert padded.shape == (10, 10, 1) and padded[:3].max() == 0 and padded[3, :, 0].tolist() == list(range(10))
    with pytest.raises(ValueError, match="cannot both be True"):
        image_dataset_from_directory(".", crop_to_aspect_ratio=True, pad_to_aspect_ratio=True)


def rows_of(dataset, pass_index, start=0):
    return [np.asarray(jax.tree.leaves(batch)[0])
            for batch in dataset.read_ahead(dataset.of_pass(pass_index, start))]


@pytest.mark.slow
def test_each_pass_has_another_order_and_can_be_read_from_any_batch(folder):
    dataset = read(folder, labels=None, batch_size=None).random_map(
        lambda rng, image: image + rng.uniform(size=(1, 1, 1)).astype(np.float32)).batch(4)
    first, second = (np.concatenate(rows_of(dataset, number)) for number in range(2))
    assert not np.array_equal(first, second)
    plain = [np.concatenate(rows_of(read(folder, labels=None), number)) for number in range(2)]
    np.testing.assert_array_equal(*(np.sort(images.sum((1, 2, 3))) for images in plain))
    for start in range(5):
        for received, expected in zip(rows_of(dataset, 1, start), rows_of(dataset, 1)[start:], strict=True):
            np.testing.assert_array_equal(received, expected)


def test_random_numbers_depend_on_the_row_and_not_on_the_batch_size_or_threads(folder):
    def row(rng, image):
        return rng.uniform(size=2) + 0 * image.mean()

    def values(batch_size, threads):
        dataset = read(folder, labels=None, batch_size=None, num_threads=threads).random_map(row, seed=5)
        return np.concatenate(rows_of(dataset.batch(batch_size), 3))

    np.testing.assert_array_equal(values(4, 1), values(7, 3))
    other = read(folder, labels=None, batch_size=None).random_map(row, seed=6).batch(4)
    assert not np.isin(np.concatenate(rows_of(other, 3)), values(4, 1)).any()


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.reshape(x.shape[0], -1) / 255)


def compiled():
    model = trainer.Model(Net(), seed=1)
    model.compile(trainer.optimizers.SGD(0.01), trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def augmented(folder):
    return read(folder, batch_size=None).random_map(
        lambda rng, image, label: (image[:, ::-1] if rng.uniform() < 0.5 else image, label)).batch(4)


class Stop(trainer.callbacks.Callback):
    def __init__(self, batch):
        self.left = batch

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 5, 7])
def test_a_fit_goes_on_to_the_bit_after_an_interruption(folder, tmp_path, batch):
    def fit(*callbacks):
        model = compiled()
        model.fit(augmented(folder), epochs=3, verbose=0, callbacks=[
            trainer.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1), *callbacks])
        return model.get_weights()

    whole = compiled()
    whole.fit(augmented(folder), epochs=3, verbose=0)
    with pytest.raises(KeyboardInterrupt):
        fit(Stop(batch))
    assert all(map(np.array_equal, fit(), whole.get_weights()))


@pytest.mark.slow
def test_files_that_are_no_images_are_named_or_left_out(folder):
    bad = folder / "bees" / "0.jpg"
    bad.write_bytes(b"GIF89a, but cut off")
    truncated = save(folder / "cats" / "9.png", size=(64, 64))
    truncated.write_bytes(truncated.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"image '.*(0.jpg|9.png)' cannot be read: .*skip_unreadable"):
        compiled().fit(read(folder), verbose=0)
    with pytest.warns(UserWarning, match=r"2 of 19 files are left out\. 2 are not images .*0\.jpg', '.*9\.png'\."):
        dataset = read(folder, skip_unreadable=True)
    assert len(dataset.file_paths) == 17 == sum(len(y) for x, y in dataset)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("1", (5000, 5000)).save(tmp_path / "a" / "1.png")
    batches = iter(read(tmp_path, max_pixels=10**6))
    with pytest.raises(ValueError, match=r"has 5000x5000 pixels, more than max_pixels=1,000,000"):
        next(batches)
    batches.close()


def test_our_limit_of_pixels_alone_decides(tmp_path, monkeypatch):
    save(tmp_path / "a" / "1.png", size=(60, 50))
    save(tmp_path / "a" / "2.png", size=(90, 70))
    (tmp_path / "a" / "3.png").write_bytes(b"nothing")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # a third of an image: Pillow would raise
    assert decode_image(str(tmp_path / "a" / "1.png"), "rgb", 3000).shape == (50, 60, 3)
    assert Image.MAX_IMAGE_PIXELS == 1000
    with pytest.warns(UserWarning, match=r"2 of 3 files are left out\. 1 are not images that can be read: .*3\.png'; "
                                         r"1 have more than max_pixels=3,000 pixels: .*2\.png'\."):
        dataset = read(tmp_path, skip_unreadable=True, max_pixels=3000)
    assert [path[-5:] for path in dataset.file_paths] == ["1.png"]
    with pytest.raises(ValueError, match=r"None of the files can be used\. 1 are not images"):
        read(tmp_path, skip_unreadable=True, max_pixels=5)


@pytest.mark.parametrize("most", [200, 60000])
def test_16_bits_are_scaled_by_their_range_and_not_by_what_an_image_holds(tmp_path, most):
    values = np.linspace(0, most, 12).astype(np.uint16).reshape(3, 4)
    Image.fromarray(values).save(tmp_path / "1.png")
    np.testing.assert_allclose(decode_image(str(tmp_path / "1.png"), "grayscale", 100)[..., 0], values / 257, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_values_of_32_bits_are_refused(tmp_path, dtype, mode):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.ones((3, 4), dtype)).save(tmp_path / "a" / "1.png", "TIFF")
    with pytest.raises(ValueError, match=rf"1\.png' has values of 32 bits \(mode '{mode}'\).*8 or 16 bits"):
        decode_image(str(tmp_path / "a" / "1.png"), "rgb", 100)
    save(tmp_path / "a" / "2.png")
    with pytest.warns(UserWarning, match="1 of 2 files are left out"):
        read(tmp_path, skip_unreadable=True)


def test_files_outside_of_the_folder_are_read_where_links_are_followed(folder, tmp_path):
    os.rename(folder / "cats", tmp_path / "elsewhere")
    (folder / "cats").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"cats/.* is a link out of its folder .*follow_links=True"):
        compiled().fit(read(folder), verbose=0)
    assert sum(len(x) for x, y in read(folder, follow_links=True)) == 17


def test_postscript_of_another_name_starts_no_program(folder, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **options: started.append(arguments))
    path = folder / "cats" / "9.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    for load in (lambda: compiled().fit(read(folder), verbose=0), lambda: trainer.utils.load_img(path),
                 lambda: trainer.utils.load_img(io.BytesIO(path.read_bytes()))):
        with pytest.raises((ValueError, OSError), match="cannot be read"):
            load()
    assert started == []


def test_a_link_to_a_folder_around_it_is_refused_and_others_are_entered(folder):
    (folder / "bees" / "more").symlink_to(folder / "cats")
    assert len(read(folder, follow_links=True).file_paths) == 17 + 6
    (folder / "cats" / "nested" / "up").symlink_to(folder)
    with pytest.raises(ValueError, match=r"'.*nested/up' leads through a link to a folder around it.*`follow_links="):
        read(folder, follow_links=True)
    assert len(read(folder).file_paths) == 17


def test_labels_may_be_an_array_and_their_classes_are_counted_from_0(folder):
    labels = np.arange(17) % 4
    dataset = read(folder, labels=labels, label_mode="categorical", shuffle=False)
    assert dataset.class_names == ["0", "1", "2", "3"]
    np.testing.assert_array_equal(np.concatenate([y for _, y in dataset]), np.eye(4)[labels])


@pytest.mark.parametrize("size", [np.int64(8), np.array([8, 8]), [np.int32(8), 8], (8, 8)], ids=repr)
def test_the_size_of_images_may_be_numpys(folder, size):
    assert next(iter(read(folder, image_size=size)))[0].shape == (4, 8, 8, 3)


@pytest.mark.parametrize(("options", "message"), [
    ({"directory": None}, "`directory` must be the path of a folder"),
    ({"seed": -1}, "`seed` must be"),
    ({"seed": "1"}, "`seed` must be"),
    ({"color_mode": ["rgb"]}, "`color_mode` must be"),
    ({"interpolation": None}, "`interpolation` must be"),
    ({"validation_split": "0.2", "subset": "training", "seed": 1}, "`validation_split` must be a number between"),
    ({"image_size": "8"}, "`image_size` must be .*Received: '8'"),
    ({"image_size": (8.5, 8)}, r"`image_size` must be .*\(8\.5, 8\)"),
    ({"image_size": (8, 0)}, r"`image_size` must be .*\(8, 0\)"),
    ({"image_size": (8, 8, 3)}, r"`image_size` must be .*\(8, 8, 3\)"),
    ({"class_names": "ants"}, "`class_names` must be a list.*str"),
    ({"class_names": ["ants", "bees", "ants"]}, "'ants' more than once"),
    ({"class_names": []}, "each once. Received: none"),
    ({"labels": "infer"}, "`labels` must be .*'infer'"),
    ({"labels": [0, -1, *[1] * 15]}, "3 numbers from -1 to 1"),
    ({"labels": [0, 2, *[0] * 15]}, "2 numbers from 0 to 2"),
    ({"labels": np.zeros(17)}, "whole numbers.*float64"),
    ({"crop_to_aspect_ratio": "yes"}, "crop_to_aspect_ratio"),
])
def test_arguments_of_a_wrong_type_or_value_are_named(folder, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read(options.pop("directory", folder), **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"color_mode": "bgr"}, "color_mode"),
    ({"interpolation": "linear"}, "interpolation"),
    ({"label_mode": "one_hot"}, "label_mode"),
    ({"label_mode": "binary"}, "needs two classes"),
    ({"class_names": ["ants", "dogs"]}, r"'dogs', and .* It has: 'ants', 'bees', 'cats'"),
    ({"labels": [1, 2]}, "2 entries, and .* 17 files"),
    ({"labels": ["a"] * 17}, "whole numbers"),
    ({"validation_split": 0.2}, "go together"),
    ({"validation_split": 1.2, "subset": "training", "seed": 1}, "between 0 and 1"),
    ({"validation_split": 0.2, "subset": "test", "seed": 1}, "subset"),
    ({"validation_split": 0.2, "subset": "training"}, "needs a `seed`"),
    ({"validation_split": 0.01, "subset": "training", "seed": 1}, "leaves none for validation"),
    ({"image_size": (0, 4)}, "image_size"),
    ({"batch_size": 0}, "batch_size"),
])
def test_arguments_that_cannot_work_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        read(folder, **options)


def test_folders_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match="no folders, one for each class"):
        read(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"no files in .* that end with"):
        read(tmp_path)
    with pytest.raises(TypeError, match="image_size"):
        read(tmp_path, image_size="8")


def test_rows_must_be_batched_to_be_trained_on(folder):
    with pytest.raises(ValueError, match=r"Call its `batch"):
        compiled().fit(read(folder, batch_size=None), verbose=0)
    with pytest.raises(ValueError, match="already batched"):
        read(folder).batch(3)
    with pytest.raises(ValueError, match="before `batch`"):
        read(folder).shuffle(3)
    assert len(read(folder, batch_size=None).batch(5, drop_remainder=True)) == 3


def test_without_grain_its_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"trainer-jax\[grain\]"):
        next(iter(read(folder)))
