"""The small models: shapes, parameter counts, probabilities, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from trainer import models

# (model, shape of one example, parameters counted by hand: weights + biases of each layer)
CASES = [
    (models.MLP(num_classes=5), (20,), (20 * 128 + 128) + (128 * 5 + 5)),
    (models.MLP(num_classes=5, hidden=()), (4, 5), 20 * 5 + 5),
    (models.MLP(num_classes=3, hidden=(16, 8)), (8, 8, 1), (64 * 16 + 16) + (16 * 8 + 8) + (8 * 3 + 3)),
    (models.CNN(num_classes=5), (28, 28, 1),
     (9 * 32 + 32) + (9 * 32 * 64 + 64) + (7 * 7 * 64 * 128 + 128) + (128 * 5 + 5)),
    (models.CNN(num_classes=10, features=(4,), hidden=8), (8, 6, 3),
     (9 * 3 * 4 + 4) + (4 * 3 * 4 * 8 + 8) + (8 * 10 + 10)),
]
SMALL = [models.MLP(num_classes=4, hidden=(16,)), models.CNN(num_classes=4, features=(4,), hidden=16)]


def images(*, rows: int = 3, shape: tuple[int, ...] = (8, 8, 1), dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).uniform(size=(rows, *shape)).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape", "expected"), CASES)
def test_parameters_are_as_many_as_the_layers_imply(model, shape, expected):
    params = model.init(jax.random.key(0), images(shape=shape))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("model", "shape", "expected"), CASES)
def test_rows_of_the_output_are_probabilities(model, shape, expected):
    out, _ = model.init_with_output(jax.random.key(0), images(shape=shape))
    assert out.shape == (3, model.num_classes)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.sum(-1), 1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("model", SMALL)
def test_without_an_activation_the_logits_come_out(model):
    variables = model.init(jax.random.key(0), images())
    logits = model.clone(classifier_activation=None).apply(variables, images())
    assert (logits < 0).any()
    np.testing.assert_allclose(nn.softmax(logits), model.apply(variables, images()), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("model", SMALL)
def test_bfloat16_weights_still_give_float32_probabilities(model):
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.init(jax.random.key(0), images()))
    out = model.apply(variables, images(dtype=jnp.bfloat16))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.sum(-1), 1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("model", SMALL)
def test_dropout_acts_in_training_only(model):
    dropping = model.clone(dropout_rate=0.5)
    variables = model.init(jax.random.key(0), images())
    first, second = (dropping.apply(variables, images(), training=True, rngs={"dropout": jax.random.key(seed)})
                     for seed in (1, 2))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(dropping.apply(variables, images()), model.apply(variables, images()))


@pytest.mark.parametrize(("model", "shape", "message"), [
    (models.CNN(num_classes=4), (8, 8), r"channel axis"),
    (models.CNN(num_classes=4), (3, 8, 1), r"at least 4x4 pixels.*\(3, 3, 8, 1\)"),
])
def test_images_that_cannot_be_convolved_are_refused(model, shape, message):
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), images(shape=shape))


def test_every_public_name_leads_to_its_object():
    assert all(getattr(models, name).__name__ == name for name in models.__all__)
    with pytest.raises(AttributeError, match=r"'trainer\.models' has no attribute 'ResNet19'"):
        _ = models.ResNet19


ZOO = {name: getattr(models, name) for name in models.__all__ if name[0].isupper()}
CLASSIFIERS = {name: kind for name, kind in ZOO.items() if "num_classes" in kind.__dataclass_fields__}


def made(kind, **options):
    return kind(**{**({"vocab_size": 5} if kind is models.TransformerEncoder else {}), "num_classes": 3, **options})


@pytest.mark.parametrize("kind", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_arguments_of_every_model_are_checked_before_it_is_initialized(kind):
    for options in ({"num_classes": 0}, {"num_classes": 2.0}, {"num_classes": True}, {"dropout_rate": 1.0},
                    {"dropout_rate": -0.1}, {"classifier_activation": "softmx"}, {"classifier_activation": 3}):
        name, value = next(iter(options.items()))
        with pytest.raises(ValueError, match=f"`{name}` of {kind.__name__} must be .*{value}"):
            made(kind, **options)
    for name, value in {"include_top": "yes", "alpha": 0, "minimalistic": 1, "width_coefficient": float("nan"),
                        "drop_path_rate": "0.1"}.items():
        if name in kind.__dataclass_fields__:
            with pytest.raises(ValueError, match=f"`{name}` of {kind.__name__} must be"):
                made(kind, **{name: value})
    assert made(kind, num_classes=np.int64(4), dropout_rate=np.float32(0.5)).num_classes == 4


@pytest.mark.parametrize("kind", [models.MobileNetV2, models.ResNet50, models.EfficientNetB1, models.UNet])
def test_attributes_of_models_of_images_are_keyword_only(kind):
    with pytest.raises(TypeError, match="positional"):
        kind(10)

    class Mine(kind):
        more: int = 1

    with pytest.raises(TypeError, match="positional"):
        Mine(10)


@pytest.mark.slow
@pytest.mark.parametrize("module", [
    models.MLP(3), models.CNN(3, features=(2,), hidden=2), models.UNet(num_classes=3, features=(2,)),
    models.MobileNetV2(num_classes=3, alpha=0.1)], ids=lambda module: type(module).__name__)
def test_activations_of_classifiers_have_the_names_of_keras(module):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 32, 3)), jnp.float32)
    variables = module.clone(classifier_activation=None).init(jax.random.key(0), x)
    logits = module.clone(classifier_activation=None).apply(variables, x)
    for name, expected in (("linear", logits), ("softmax", nn.softmax(logits)), ("sigmoid", nn.sigmoid(logits))):
        np.testing.assert_array_equal(module.clone(classifier_activation=name).apply(variables, x), expected)


def test_a_residual_network_of_torchvision_normalizes_as_there():
    assert [(model.norm_epsilon, model.norm_momentum) for model in (
        models.ResNet50(), models.ResNet50(style="torchvision"), models.ResNet18(),
        models.ResNet50(style="torchvision", norm_epsilon=1e-3))] == [
        (1.001e-5, 0.99), (1e-5, 0.9), (1e-5, 0.9), (1e-3, 0.9)]


@pytest.mark.parametrize(("name", "fix"), [
    ("resnet", r"`models\.preprocess_input\(images, \"ResNet50\"\)`"), ("mobilenet_v2", r"classes are in `trainer\.m"),
    ("decode_predictions", r"`outputs\.argmax\(-1\)`"), ("load_model", r"`trainer\.load_model\(path, model=\.\.\.\)`")])
def test_a_name_of_keras_that_is_elsewhere_says_where(name, fix):
    with pytest.raises(AttributeError, match=rf"'trainer\.models' has no attribute '{name}'\. .*{fix}"):
        getattr(models, name)
