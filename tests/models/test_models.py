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


@pytest.mark.parametrize(("model", "shape", "expected"), CASES)
def test_parameters_are_as_many_as_the_layers_imply(model, shape, expected):
    params = model.init(jax.random.key(0), images(shape=shape))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


@pytest.mark.parametrize(("model", "shape", "expected"), CASES)
def test_rows_of_the_output_are_probabilities(model, shape, expected):
    out, _ = model.init_with_output(jax.random.key(0), images(shape=shape))
    assert out.shape == (3, model.num_classes)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("model", SMALL)
def test_without_an_activation_the_logits_come_out(model):
    variables = model.init(jax.random.key(0), images())
    logits = model.clone(classifier_activation=None).apply(variables, images())
    assert (logits < 0).any()
    np.testing.assert_allclose(nn.softmax(logits), model.apply(variables, images()), rtol=1e-6)


@pytest.mark.parametrize("model", SMALL)
def test_bfloat16_weights_still_give_float32_probabilities(model):
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.init(jax.random.key(0), images()))
    out = model.apply(variables, images(dtype=jnp.bfloat16))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.sum(-1), 1.0, rtol=1e-6)


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
