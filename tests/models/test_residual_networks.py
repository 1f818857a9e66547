"""ResNet, ResNetV2, DenseNet and VGG: sizes, the order of layers, training, and features without the classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support import keras_twins
from trainer import models
from trainer.models.vision.densenet import DenseNet
from trainer.models.vision.resnet import ResNet
from trainer.models.vision.resnet_v2 import ResNetV2
from trainer.models.vision.vgg import VGG

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras

# With 1000 classes and images of 224x224 pixels, statistics included: `count_params()` of Keras 3.15.
SIZES = {
    "ResNet50": 25_636_712, "ResNet101": 44_707_176, "ResNet152": 60_419_944,
    "ResNet50V2": 25_613_800, "ResNet101V2": 44_675_560, "ResNet152V2": 60_380_648,
    "DenseNet121": 8_062_504, "DenseNet169": 14_307_880, "DenseNet201": 20_242_984,
    "VGG16": 138_357_544, "VGG19": 143_667_240,
}
LARGE = ("ResNet101", "ResNet152", "ResNet101V2", "ResNet152V2", "DenseNet169", "DenseNet201", "VGG19")
SMALL = [
    ResNet(num_classes=5, blocks=(1, 2)), ResNet(num_classes=5, blocks=(1, 2), bottleneck=False, style="torchvision"),
    ResNetV2(num_classes=5, blocks=(1, 2)), DenseNet(num_classes=5, blocks=(2, 2), growth_rate=8),
    VGG(num_classes=5, convolutions=(1, 1, 1, 1, 1)),
]
NAMES = ["ResNet", "ResNet-basic", "ResNetV2", "DenseNet", "VGG"]


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


def keras_model(keras, name, size, **options):
    keras.utils.set_random_seed(0)
    return getattr(keras.applications, name)(weights=None, classes=10, input_shape=(size, size, 3), **options)


def shapes(module, size):
    return jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, size, size, 3)))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def called(module, size, *kinds):
    """Returns the names of layers of some classes, as Keras has them, in the order of their calls."""
    names = []

    def record(call, args, kwargs, context):
        if isinstance(context.module, kinds) and context.method_name == "__call__":
            names.append("_".join(context.module.path))
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        shapes(module, size)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_as_many_values_as_in_keras(name):
    assert count(shapes(getattr(models, name)(), 224)) == SIZES[name]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "expected"), [("ResNet18", 11_689_512), ("ResNet34", 21_797_672)])
def test_resnets_of_basic_blocks_have_as_many_parameters_as_in_torchvision(name, expected):
    assert count(shapes(getattr(models, name)(), 224)["params"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *(pytest.param(name, marks=pytest.mark.exhaustive) if name in LARGE else name for name in SIZES)])
def test_layers_are_called_in_the_order_of_keras(keras, name):
    theirs, ours = keras_model(keras, name, 32), getattr(models, name)(num_classes=10)
    for kind, own in [(keras.layers.Conv2D, nn.Conv), (keras.layers.BatchNormalization, nn.BatchNorm),
                      (keras.layers.Dense, nn.Dense)]:
        assert called(ours, 32, own) == [layer.name for layer in theirs.layers if isinstance(layer, kind)]
    assert count(shapes(ours, 32)) == theirs.count_params()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ResNet50", "DenseNet121"])
def test_statistics_after_training_are_those_of_keras(keras, name, tmp_path):
    steps, rows, size = 12, 8, 64
    theirs = keras_model(keras, name, size)
    ours = keras_twins.twin(theirs, getattr(models, name)(num_classes=10), size, tmp_path / "theirs.weights.h5")
    batches = [keras_twins.images(size, rows, seed) for seed in range(steps)]

    trainable = [variable.value for variable in theirs.trainable_variables]
    state = [variable.value for variable in theirs.non_trainable_variables]
    step = jax.jit(lambda state, images: theirs.stateless_call(trainable, state, images, training=True)[1])
    for images in batches:
        state = step(state, images)
    for variable, value in zip(theirs.non_trainable_variables, state, strict=True):
        variable.assign(value)

    ours.compile(optax.sgd(0.0), "sparse_categorical_crossentropy")
    ours.fit(np.concatenate(batches), np.zeros(steps * rows, np.int32), batch_size=rows, shuffle=False, verbose=0)
    received = {"_".join(key.key for key in path): np.asarray(leaf) for path, leaf
                in jax.tree_util.tree_leaves_with_path(ours.state.model_state["batch_stats"])}

    normalizing = [layer for layer in theirs.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(received) == 2 * len(normalizing)
    for layer in normalizing:
        mean, variance = (np.asarray(layer.moving_mean), np.asarray(layer.moving_variance))
        assert abs(variance - 1).max() > 1e-3, "the steps must have changed them"
        np.testing.assert_allclose(received[f"{layer.name}_mean"], mean, rtol=0, atol=1e-4 * np.sqrt(variance.max()))
        np.testing.assert_allclose(received[f"{layer.name}_var"], variance, rtol=0, atol=1e-4 * variance.max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", SMALL, ids=NAMES)
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=["float32-params", "bfloat16-params"])
def test_a_step_in_bfloat16_gives_finite_numbers(module, param_dtype):
    module = module.clone(dtype=jnp.bfloat16, param_dtype=param_dtype)
    images, labels = jnp.asarray(keras_twins.images(32), jnp.bfloat16), jnp.arange(4)
    variables = module.init(jax.random.key(0), images)

    @jax.jit
    def step(variables):
        def loss(params):
            outputs, state = module.apply({**variables, "params": params}, images, training=True, mutable="batch_stats")
            return -jnp.log(outputs[jnp.arange(4), labels]).mean(), (outputs, state)

        grads, (outputs, state) = jax.grad(loss, has_aux=True)(variables["params"])
        return outputs, state, grads, jax.tree.map(lambda param, grad: param - 0.01 * grad, variables["params"], grads)

    outputs, state, grads, params = step(variables)
    assert outputs.dtype == jnp.float32
    assert all(leaf.dtype == param_dtype for leaf in jax.tree.leaves(params))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((outputs, state, grads, params)))


@pytest.mark.slow
@pytest.mark.parametrize("module", SMALL, ids=NAMES)
def test_without_the_classifier_features_come_out(module):
    images = keras_twins.images(40)
    whole = module.clone(include_top=False)
    variables = whole.init(jax.random.key(0), images)
    features = whole.apply(variables, images)
    assert features.ndim == 4 and "predictions" not in variables["params"]
    for pooling, reduce in [("avg", np.mean), ("max", np.max)]:
        pooled = whole.clone(pooling=pooling).apply(variables, images)
        np.testing.assert_allclose(pooled, reduce(np.asarray(features), (1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else [])
                                  for name in ["ResNet18", *SIZES]])
@pytest.mark.sampled
def test_features_have_a_thirty_second_of_the_side(name):
    module = getattr(models, name)(include_top=False)
    features = jax.eval_shape(lambda images: module.init_with_output(jax.random.key(0), images)[0],
                              jnp.zeros((2, 64, 96, 3)))
    channels = {"DenseNet121": 1024, "DenseNet169": 1664, "DenseNet201": 1920}.get(
        name, 2048 if name.startswith("ResNet") and name != "ResNet18" else 512)
    assert features.shape == (2, 2, 3, channels)


@pytest.mark.slow
def test_a_resnet_of_basic_blocks_computes_what_torchvision_does():
    module, images = SMALL[1].clone(norm_epsilon=1e-5), keras_twins.images(45)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: leaf + rng.uniform(0, 0.2, leaf.shape).astype(np.float32),
                             module.init(jax.random.key(0), images))

    def conv(x, name, strides, padding):
        kernel = at(variables["params"], name)["kernel"]
        return jax.lax.conv_general_dilated(x, kernel, (strides, strides), [(padding, padding)] * 2,
                                            dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x, name):
        learned, kept = at(variables["params"], name), at(variables["batch_stats"], name)
        return (x - kept["mean"]) / jnp.sqrt(kept["var"] + 1e-5) * learned["scale"] + learned["bias"]

    def at(tree, name):
        for part in name.split("/"):
            tree = tree[part]
        return tree

    def block(x, name, strides):
        y = nn.relu(norm(conv(x, f"{name}/1_conv", strides, 1), f"{name}/1_bn"))
        y = norm(conv(y, f"{name}/2_conv", 1, 1), f"{name}/2_bn")
        if strides > 1:
            x = norm(conv(x, f"{name}/0_conv", strides, 0), f"{name}/0_bn")
        return nn.relu(x + y)

    x = nn.relu(norm(conv(images, "conv1_conv", 2, 3), "conv1_bn"))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])
    x = block(block(block(x, "conv2_block1", 1), "conv3_block1", 2), "conv3_block2", 1).mean((1, 2))
    head = variables["params"]["predictions"]
    expected = nn.softmax(x @ head["kernel"] + head["bias"])
    np.testing.assert_allclose(module.apply(variables, images), expected, atol=1e-5)


@pytest.mark.slow
def test_a_resnet_trains():
    images, labels = keras_twins.images(32, rows=8), np.arange(8) % 2
    model = trainer.Model(SMALL[1])
    model.compile(optax.adam(1e-3), "sparse_categorical_crossentropy")
    losses = model.fit(images, labels, batch_size=8, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_vgg_drops_what_both_dense_layers_give():
    module = SMALL[-1].clone(dropout_rate=0.5)
    images = keras_twins.images(32)
    variables = module.init(jax.random.key(0), images)
    dropped = []

    def record(call, args, kwargs, context):
        outputs = call(*args, **kwargs)
        if isinstance(context.module, nn.Dropout):
            dropped.append(float((outputs == 0).mean() - (args[0] == 0).mean()))
        return outputs

    with nn.intercept_methods(record):
        module.apply(variables, images, training=True, rngs={"dropout": jax.random.key(0)})
    assert len(dropped) == 2 and all(part > 0.1 for part in dropped)
    np.testing.assert_array_equal(module.apply(variables, images), SMALL[-1].apply(variables, images))


def test_vgg_takes_only_images_of_the_size_it_was_made_with():
    module = SMALL[-1]
    variables = shapes(module, 32)
    with pytest.raises(ValueError, match=r"VGG was made with .* 512 features.*4608 features.*include_top=False"):
        jax.eval_shape(module.apply, variables, jnp.zeros((1, 96, 96, 3)))
