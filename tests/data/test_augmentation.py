"""Random changes of images: what each does, that it depends on its generator alone, and what it refuses."""

import itertools

import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import distribute
from trainer.data import Dataset, RowDataset
from trainer.data import augmentation as aug

IMAGE = np.random.default_rng(0).uniform(0, 255, (9, 12, 3)).astype(np.float32)
CHANGES = [aug.RandomFlip(), aug.RandomFlip("horizontal"), aug.RandomCrop(5, 7), aug.RandomRotation(0.2),
           aug.RandomZoom(0.3), aug.RandomZoom(0.3, (-0.1, 0.2)), aug.RandomContrast(0.5), aug.RandomBrightness(0.3),
           aug.RandAugment(3, 0.9)]


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_a_change_is_a_function_of_its_generator_and_keeps_the_rest_of_the_row(change):
    before = IMAGE.copy()
    results = [change(rng(seed), IMAGE, 3) for seed in range(12)]
    assert all(label == 3 for _, label in results)
    assert all(image.dtype == np.float32 and image.min() >= -0.01 and image.max() <= 255.01 for image, _ in results)
    assert len({image.tobytes() for image, _ in results}) > 1
    for seed, (image, _) in enumerate(results):
        np.testing.assert_array_equal(change(rng(seed), IMAGE), image)
    np.testing.assert_array_equal(IMAGE, before)


def test_flips_are_mirror_images():
    seen = {aug.RandomFlip()(rng(seed), IMAGE).tobytes() for seed in range(40)}
    assert seen == {np.ascontiguousarray(image).tobytes() for image in (
        IMAGE, IMAGE[:, ::-1], IMAGE[::-1], IMAGE[::-1, ::-1])}
    assert {aug.RandomFlip("vertical")(rng(seed), IMAGE).tobytes() for seed in range(20)} == {
        IMAGE.tobytes(), np.ascontiguousarray(IMAGE[::-1]).tobytes()}


def test_a_quarter_turn_and_a_whole_turn():
    square = IMAGE[:, :9]
    np.testing.assert_allclose(aug.RandomRotation((0.25, 0.25))(rng(), square), np.rot90(square), atol=1e-2)
    np.testing.assert_allclose(aug.RandomRotation((1.0, 1.0))(rng(), IMAGE), IMAGE, atol=1e-2)


def test_zooming_out_shows_mirror_images_and_in_the_middle():
    spot = np.zeros((9, 9, 1), np.float32)
    spot[3:6, 3:6] = 1
    assert aug.RandomZoom((-0.5, -0.5))(rng(), spot).sum() > 2 * spot.sum()
    assert aug.RandomZoom((0.5, 0.5))(rng(), spot)[4, 4] == 1
    np.testing.assert_array_equal(aug.RandomZoom((0.0, 0.0))(rng(), IMAGE), IMAGE)


@pytest.mark.parametrize("shape", [(4, 40), (40, 4)])
def test_a_translation_is_a_share_of_each_side(shape):
    long = shape.index(40)
    image = np.full((*shape, 1), 100, np.float32)
    np.moveaxis(image, long, 0)[20] = 200  # a line through the middle, which turns, zooms and shears keep there

    def place(seed):
        profile = aug.RandAugment(1, 1.0)(rng(seed), image).mean((1 - long, 2))
        return int(np.argmax(abs(profile - np.median(profile))))

    moves = [abs(place(seed) - 20) for seed in range(60)]
    assert 6 < max(moves) <= 0.3 * 40


def test_crops_are_parts_of_the_image_and_small_images_are_resized():
    crop = aug.RandomCrop(5, 7)(rng(), IMAGE)
    assert any(np.array_equal(crop, IMAGE[top:top + 5, left:left + 7]) for top in range(5) for left in range(6))
    assert aug.RandomCrop(20, 30)(rng(), IMAGE).shape == (20, 30, 3)


def test_contrast_and_brightness_are_those_of_their_formulas():
    grey = np.full((4, 4, 3), 100, np.float32)
    grey[0] = 140
    changed = aug.RandomContrast((0.5, -0.5))(rng(), grey)  # by one half
    np.testing.assert_allclose(changed - changed.mean(), (grey - grey.mean()) / 2, rtol=1e-5)
    np.testing.assert_allclose(aug.RandomBrightness((0.2, 0.2))(rng(), grey), grey + 51, rtol=1e-6)


def test_mixed_rows_have_mixed_labels():
    images = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1) * np.ones((4, 8, 8, 1), np.float32)
    labels = np.eye(4, dtype=np.float32)
    mixed, mixed_labels = aug.MixUp(1.0)(rng(1), images, labels)
    np.testing.assert_allclose(mixed[:, 0, 0, 0], mixed_labels @ np.arange(4), rtol=1e-5)
    cut, cut_labels = aug.CutMix()(rng(1), images, labels)
    np.testing.assert_allclose(cut.mean((1, 2, 3)), cut_labels @ np.arange(4), rtol=1e-5)
    for result in (mixed_labels, cut_labels):
        np.testing.assert_allclose(result.sum(1), 1, rtol=1e-6)
        assert result.dtype == np.float32 and (result.max(1) < 1).any()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: aug.RandomFlip("diagonal"), "mode"),
    (lambda: aug.RandomFlip(["horizontal"]), "mode"),
    (lambda: aug.RandomRotation(2.0), r"between -1 and 1.*2\.0"),
    (lambda: aug.RandomRotation(float("nan")), r"between -1 and 1.*nan"),
    (lambda: aug.RandomRotation("0.1"), "`factor` must be a number or a pair"),
    (lambda: aug.RandomZoom((0.3, -0.3)), "in order"),
    (lambda: aug.RandomZoom((0.1, 0.2, 0.3)), r"pair of numbers.*\(0\.1, 0\.2, 0\.3\)"),
    (lambda: aug.RandomZoom(0.1, (None, 0.2)), r"width_factor\[0\]"),
    (lambda: aug.RandomContrast((0.1, 5)), r"Received: \(0\.1, 5\)"),
    (lambda: aug.RandomContrast(-0.5), r"from 0 to 1.*-0\.5"),
    (lambda: aug.RandomContrast(None), "`factor` must be a number"),
    (lambda: aug.RandomBrightness(0.1, (255, 0)), "`value_range` must be two numbers, the lower first"),
    (lambda: aug.RandomBrightness(0.1, 255), "`value_range` must be a pair of numbers. Received: 255"),
    (lambda: aug.RandomCrop(0, 3), "height"),
    (lambda: aug.RandAugment(factor=2), r"\[0, 1\].*2"),
    (lambda: aug.MixUp(0), "above 0"),
    (lambda: aug.CutMix("1"), "`alpha` must be a number above 0"),
])
def test_arguments_that_cannot_work_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_a_change_takes_one_image_and_no_batch(change):
    with pytest.raises(ValueError, match=r"one image, of shape \(height, width, channels\)\. Received: array of shape "
                                         r"\(1, 9, 12, 3\).*`random_map` before `batch`.*batch_size=None"):
        change(rng(), IMAGE[None], 3)
    with pytest.raises(ValueError, match=r"shape \(9, 12\).*images?\[\.\.\., None\]"):
        change(rng(), IMAGE[..., 0])


@pytest.mark.parametrize("change", [aug.RandomFlip(), aug.MixUp()], ids=lambda change: type(change).__name__)
def test_a_change_without_a_generator_says_random_map(change):
    name = type(change).__name__
    with pytest.raises(ValueError, match=rf"Generator. first\. Received: array .*`dataset\.random_map\({name}\("):
        list(Dataset.from_arrays((IMAGE[None], np.eye(1))).map(change).batch(1))


def test_functions_apply_in_the_order_of_their_calls():
    dataset = RowDataset([1.0, 2.0]).map(lambda row: row + 1).map(lambda row: row * 10).batch(2)
    (batch,) = dataset.map(lambda rows: rows + 1).random_map(lambda rng, rows: rows * 10)
    assert batch.tolist() == [210, 310]


def test_a_batched_dataset_is_not_augmented_as_if_it_were_an_image():
    dataset = RowDataset([IMAGE] * 4).batch(2).random_map(aug.RandomFlip())
    batches = iter(dataset)
    with pytest.raises(ValueError, match="RandomFlip changes one image"):
        next(batches)
    batches.close()


@pytest.mark.parametrize("mix", [aug.MixUp(), aug.CutMix()], ids=lambda mix: type(mix).__name__)
@pytest.mark.parametrize(("batch", "message"), [
    ((IMAGE, np.eye(9, dtype=np.float32)), r"Received: array of shape \(9, 12, 3\).*`random_map` after `batch`"),
    ((IMAGE[None], np.array([1])), r"shape \(1,\) and dtype int64.*label_mode=\"categorical\""),
    ((IMAGE[None], np.array([1.0])), r"shape \(1,\).*label_mode"),
    ((IMAGE[None], np.eye(2, dtype=np.float32)), r"\(rows, classes\).*shape \(2, 2\)"),
    ((IMAGE[None],), "images and their labels, and nothing else.*label_mode"),
    ((IMAGE[None], np.eye(1, dtype=np.float32), np.ones(1)), "and nothing else"),
])
def test_mixing_needs_a_batch_of_images_and_vectors_of_labels(mix, batch, message):
    with pytest.raises(ValueError, match=message):
        mix(rng(), *batch)


@pytest.mark.slow
def test_a_training_on_random_rows_is_the_same_on_any_number_of_devices_and_when_it_is_continued():
    images = np.random.default_rng(0).random((21, 6, 6, 1), np.float32)
    rows = Dataset.from_arrays((images, images.mean((1, 2, 3)))).random_map(aug.RandomContrast(0.5))

    def weights_of(devices, *epochs):
        with distribute.MirroredStrategy([f"cpu:{index}" for index in range(devices)]).scope():
            model = trainer.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(1)], seed=0)
            model.compile(optax.sgd(0.1), "mse")
        for first, last in itertools.pairwise((0, *epochs)):
            model.fit(rows.shuffle(1).batch(4), initial_epoch=first, epochs=last, verbose=0)
        return model.get_weights()

    whole = weights_of(1, 2)
    for other in (weights_of(3, 2), weights_of(1, 1, 2)):
        for ours, theirs in zip(other, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-7)
