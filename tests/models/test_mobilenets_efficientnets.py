"""MobileNets and EfficientNets: layers and counts of Keras, training in bfloat16, and models without a classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from tests.support import keras_twins
from trainer import models

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras

# The values of each with 1000 classes, as Keras counts them; but for the count of batches in `Normalization`.
COUNTS = {
    "EfficientNetB0": 5_330_570, "EfficientNetB1": 7_856_238, "EfficientNetB2": 9_177_568,
    "EfficientNetB3": 12_320_534, "EfficientNetB4": 19_466_822, "EfficientNetB5": 30_562_526,
    "EfficientNetB6": 43_265_142, "EfficientNetB7": 66_658_686, "MobileNet": 4_253_864, "MobileNetV2": 3_538_984,
    "MobileNetV3Large": 5_507_432, "MobileNetV3Small": 2_554_968,
}
SMALL = [
    models.EfficientNetB0(num_classes=3, width_coefficient=0.25, depth_coefficient=0.1),
    models.MobileNet(num_classes=3, alpha=0.25),
    models.MobileNetV3Small(num_classes=3, alpha=0.35),
    models.MobileNetV3Small(num_classes=3, alpha=0.35, minimalistic=True),
]


def names(model):
    return type(model).__name__


def pixels(rows=4, size=32):
    return np.random.default_rng(0).integers(0, 256, (rows, size, size, 3), np.uint8)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_layers_are_those_of_keras_in_its_order(keras, name):
    expected, their_count = keras_twins.outline(keras, name, input_shape=(96, 96, 3))
    layers, count = keras_twins.own_outline(getattr(models, name)())
    assert layers == expected
    assert count == COUNTS[name] == their_count - name.startswith("EfficientNet")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "options"), [
    ("MobileNet", {"alpha": 0.5}), ("MobileNetV3Large", {"alpha": 1.5}),
    ("MobileNetV3Large", {"minimalistic": True}), ("MobileNetV3Small", {"alpha": 0.5, "minimalistic": True}),
])
def test_layers_of_other_widths_are_those_of_keras(keras, name, options):
    expected = keras_twins.outline(keras, name, input_shape=(96, 96, 3), **options)
    assert keras_twins.own_outline(getattr(models, name)(**options)) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", SMALL, ids=names)
def test_a_step_in_bfloat16_is_finite(model):
    trained = trainer.Model(model)
    trained.compile("sgd", "sparse_categorical_crossentropy", precision="mixed_bfloat16")
    history = trained.fit(pixels(), np.arange(4) % 3, batch_size=4, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert all(np.isfinite(array).all() for array in trained.get_weights())
    assert trained.predict(pixels(), verbose=0).dtype == np.float32


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("model", SMALL, ids=names)
def test_bfloat16_is_what_all_layers_compute_in(model):
    model = model.clone(dtype=jnp.bfloat16, include_top=False)
    shape = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), jnp.asarray(pixels()))[0])
    assert (shape.dtype, shape.shape[:3]) == (jnp.bfloat16, (4, 1, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", SMALL, ids=names)
def test_without_a_classifier_features_come_out(model):
    images = pixels(size=64).astype(np.float32)
    model = model.clone(include_top=False)
    features, variables = model.init_with_output(jax.random.key(0), images)
    assert features.shape[:3] == (4, 2, 2)
    for pooling, reduce in (("avg", np.mean), ("max", np.max)):
        np.testing.assert_allclose(model.clone(pooling=pooling).apply(variables, images),
                                   reduce(np.asarray(features), (1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    pytest.param("EfficientNetB0", {}, marks=pytest.mark.exhaustive), ("MobileNet", {"alpha": 0.25}),
    pytest.param("MobileNetV3Small", {"minimalistic": True}, marks=pytest.mark.exhaustive),
])
def test_weights_without_a_classifier_load(keras, name, options, tmp_path):
    theirs = getattr(keras.applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=(32, 32, 3), **options)
    if name == "EfficientNetB0":
        normalization = next(layer for layer in theirs.layers if isinstance(layer, keras.layers.Normalization))
        normalization.adapt(pixels().astype(np.float32) / 255)
    theirs.save_weights(tmp_path / "no_top.weights.h5")
    module = getattr(models, name)(num_classes=3, **options)
    whole = trainer.Model(module)
    whole.build(pixels())
    with pytest.raises(ValueError, match="skip_head=True"):
        models.load_keras_weights(whole, tmp_path / "no_top.weights.h5")
    models.load_keras_weights(whole, tmp_path / "no_top.weights.h5", skip_head=True)
    state = whole.state
    features = module.clone(include_top=False, pooling="avg").apply(
        {"params": state.params, **state.model_state}, pixels())
    np.testing.assert_allclose(features, theirs(pixels()), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_constants_of_an_efficientnet_are_state_that_training_leaves_alone():
    model = trainer.Model(SMALL[0])
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.build(pixels())
    assert "normalization" not in model.state.params
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(
        (model.state.params, model.state.model_state))]
    model.set_weights([array + 0.25 if "constants" in path else array
                       for path, array in zip(paths, model.get_weights(), strict=True)])
    model.fit(pixels(), np.arange(4) % 3, batch_size=2, epochs=1, verbose=0)
    constants = model.state.model_state["constants"]["normalization"]
    np.testing.assert_array_equal(constants["mean"], np.full(3, 0.25))
    np.testing.assert_array_equal(constants["var"], np.full(3, 1.25))


@pytest.mark.exhaustive
def test_published_weights_of_an_efficientnet_see_images_divided_by_the_standard_deviation():
    """Their files have standard deviations for variances; the square root is divided by twice."""
    model = SMALL[0].clone(divides_by_sqrt_stddev=True)
    mean, stddev = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    variables = SMALL[0].init(jax.random.key(0), pixels())
    published = {**variables, "constants": {"normalization": {"mean": mean, "var": stddev}}}
    normalized = (pixels() / np.float32(255) - mean) / stddev
    np.testing.assert_allclose(model.apply(published, pixels()), SMALL[0].apply(variables, 255 * normalized), rtol=1e-4)


@pytest.mark.slow
def test_an_image_loses_whole_blocks_of_an_efficientnet_in_training():
    model = SMALL[0].clone(depth_coefficient=0.5, drop_connect_rate=0.999, dropout_rate=0.0, include_top=False)
    images = np.repeat(pixels(1), 8, 0)
    variables = model.init(jax.random.key(0), images)

    def features(**options):
        return model.apply(variables, images, training=True, mutable=["batch_stats"],
                           rngs={"dropout": jax.random.key(1)}, **options)[0]

    assert np.abs(features() - features()[:1]).max() > 1e-3
    np.testing.assert_array_equal(model.apply(variables, images)[0], model.apply(variables, images)[1])


@pytest.mark.slow
def test_pixels_are_scaled_in_float32_and_keep_the_dtype_of_the_images():
    model = models.MobileNetV3Small(num_classes=3, alpha=0.35)
    variables = model.init(jax.random.key(0), pixels())
    expected = model.apply(variables, pixels().astype(np.float32))
    np.testing.assert_array_equal(model.apply(variables, pixels()), expected)
    scaled = pixels().astype(np.float32) / 127.5 - 1
    np.testing.assert_allclose(model.clone(include_preprocessing=False).apply(variables, scaled), expected, rtol=1e-5)
