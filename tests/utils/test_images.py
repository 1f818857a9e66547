"""Images from and to files and arrays, beside Keras's functions of the same names."""

import io

import numpy as np
import pytest

from trainer import utils

Image = pytest.importorskip("PIL.Image")
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")

random = np.random.default_rng(0)
IMAGES = {"RGB": random.integers(0, 256, (7, 12, 3), np.uint8), "RGBA": random.integers(0, 256, (7, 12, 4), np.uint8),
          "L": random.integers(0, 256, (7, 12), np.uint8), "16 bits": random.integers(0, 60_000, (7, 12), np.uint16)}


@pytest.fixture
def files(tmp_path):
    for name, pixels in IMAGES.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    Image.fromarray(IMAGES["RGB"]).quantize(5).save(tmp_path / "palette.gif")
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("options", [
    {}, {"color_mode": "grayscale"}, {"color_mode": "rgba"}, {"target_size": (7, 12)},
    {"target_size": (5, 3), "interpolation": "bilinear"},
    {"target_size": [9, 20], "interpolation": "lanczos", "keep_aspect_ratio": True},
    {"target_size": (14, 3), "interpolation": "hamming", "keep_aspect_ratio": True}], ids=str)
def test_files_are_loaded_as_by_keras(files, options):
    for path in files:
        if path.stem != "16 bits" or options.get("color_mode") == "grayscale":
            ours, theirs = (library.load_img(path, **options) for library in (utils, keras.utils))
            assert ours.mode == theirs.mode
            np.testing.assert_array_equal(utils.img_to_array(ours), keras.utils.img_to_array(theirs))


def test_a_file_is_given_by_a_path_of_any_kind_or_open(files):
    path = files[-1]
    expected = utils.img_to_array(utils.load_img(path))
    for given in (str(path), bytes(path), io.BytesIO(path.read_bytes())):
        np.testing.assert_array_equal(utils.img_to_array(utils.load_img(given)), expected)


@pytest.mark.parametrize("data_format", [None, "channels_last", "channels_first"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_arrays_and_images_go_over_as_in_keras(channels, data_format):
    shape = (channels, 5, 4) if data_format == "channels_first" else (5, 4, channels)
    for values, scale in ((random.normal(size=shape), True), (random.uniform(0, 255, shape), False),
                          (np.full(shape, 3.0), True), (random.integers(0, 256, shape), False)):
        ours, theirs = (library.array_to_img(values, data_format, scale) for library in (utils, keras.utils))
        assert (ours.mode, ours.size) == (theirs.mode, theirs.size)
        mine, kerass = (library.img_to_array(ours, data_format) for library in (utils, keras.utils))
        np.testing.assert_array_equal(mine, kerass)
        assert (mine.dtype, mine.shape) == (np.float32, shape)
        np.testing.assert_array_equal(mine, keras.utils.img_to_array(theirs, data_format))


def test_a_grey_image_may_have_more_than_8_bits():
    image = utils.array_to_img(np.array([[[0.0], [70_000.0]]]), scale=False)
    assert image.mode == keras.utils.array_to_img(np.array([[[0.0], [70_000.0]]]), scale=False).mode == "I"
    assert utils.img_to_array(image, dtype="int64").ravel().tolist() == [0, 70_000]


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp"])
def test_saved_files_are_kerass(tmp_path, suffix):
    mine, kerass = tmp_path / f"mine.{suffix}", tmp_path / f"keras.{suffix}"
    utils.save_img(mine, IMAGES["RGB"], scale=False)
    keras.utils.save_img(kerass, IMAGES["RGB"], scale=False)
    assert mine.read_bytes() == kerass.read_bytes()
    buffer = io.BytesIO()
    utils.save_img(buffer, IMAGES["RGB"], scale=False, file_format=suffix)
    assert buffer.getvalue() == mine.read_bytes()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda folder: utils.load_img(folder / "no.png"), FileNotFoundError, "no.png"),
    (lambda folder: utils.load_img(3), TypeError, "`path` must be a path, or a binary file object"),
    (lambda folder: utils.load_img(folder / "16 bits.png"), ValueError, 'color_mode="grayscale"'),
    (lambda folder: utils.load_img(folder / "L.png", "grey"), ValueError, "'grayscale'"),
    (lambda folder: utils.load_img(folder / "L.png", interpolation="cubic"), ValueError, "'bicubic'"),
    (lambda folder: utils.load_img(folder / "L.png", target_size=5), TypeError, "a height and a width"),
    (lambda folder: utils.load_img(folder / "L.png", target_size=(5, 0)), ValueError, "at least 1"),
    (lambda folder: utils.img_to_array(np.zeros(3)), ValueError, r"shape \(3,\)"),
    (lambda folder: utils.img_to_array(np.zeros((3, 3)), "last"), ValueError, "'channels_last'"),
    (lambda folder: utils.array_to_img(np.zeros((3, 3))), ValueError, r"\(height, width, channels\).*\(3, 3\)"),
    (lambda folder: utils.array_to_img(np.zeros((3, 3, 2))), ValueError, "1, 3 or 4 channels"),
    (lambda folder: utils.array_to_img(np.full((1, 1, 3), 300.0), scale=False), ValueError, r"300.*\[0, 255\]"),
    (lambda folder: utils.array_to_img(np.full((1, 1, 1), -1.0), scale=False), ValueError, "from -1 to -1"),
    (lambda folder: utils.array_to_img(np.full((1, 1, 1), np.nan)), ValueError, "not finite"),
    (lambda folder: utils.save_img(folder / "new", IMAGES["RGB"]), ValueError, "`file_format` must be given"),
    (lambda folder: utils.save_img(folder / "new.xyz", IMAGES["RGB"]), ValueError, "Unknown image format 'xyz'"),
    (lambda folder: utils.save_img(folder / "new.jpg", IMAGES["RGBA"]), ValueError, "no transparency"),
])
def test_what_cannot_be_read_or_written_is_named(files, call, error, message):
    folder = files[0].parent
    with pytest.raises(error, match=message):
        call(folder)
    assert not any(path.stem == "new" for path in folder.iterdir())


def test_without_pillow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'trainer-jax\[images\]'"):
        utils.load_img("cat.jpg")
