"""Models of feature columns train: on one device and on several, with tables that stay as they are."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.estimator import feature_columns as fc

COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green", "blue"])
CITY = fc.categorical_column_with_hash_bucket("city", 20)
WIDE = [COLOR, fc.crossed_column(["color", "city"], 50)]
DEEP = [fc.numeric_column("x"), fc.embedding_column(CITY, 4), fc.embedding_column(COLOR, 2, trainable=False)]


class WideAndDeep(nn.Module):
    @nn.compact
    def __call__(self, features):
        deep = nn.Dense(1)(nn.relu(nn.Dense(8)(fc.DenseFeatures(DEEP, name="deep")(features))))
        return fc.LinearFeatures(WIDE, name="wide")(features) + deep


def data(rows=40):
    random = np.random.default_rng(0)
    color, city = random.choice(["red", "green", "blue", "pink"], rows), random.choice(["Oslo", "Rome", "Lima"], rows)
    x = random.normal(size=rows)
    y = (color == "red") + 0.5 * ((city == "Oslo") & (color == "green")) + 0.1 * x
    return fc.HostTransform([*WIDE, *DEEP])({"color": color, "city": city, "x": x}), np.float32(y)[:, None]


def trained(module, optimizer, strategy):
    features, y = data()
    with strategy.scope():
        model = trainer.Model(module)
        model.compile(optimizer, "mse")
        model.build(jax.tree.map(lambda array: array[:1], features))
    before = model.get_weights()
    losses = model.fit(features, y, batch_size=16, epochs=15, verbose=0).history["loss"]
    return losses, before, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(("module", "optimizer"), [
    pytest.param(WideAndDeep(), trainer.optimizers.Adam(0.05), id="wide and deep"),
    pytest.param(fc.LinearFeatures(WIDE), trainer.optimizers.Ftrl(0.5), id="linear"),
])
@pytest.mark.parametrize("strategy", [
    trainer.distribute.MirroredStrategy, trainer.distribute.FullyShardedStrategy], ids=lambda made: made.__name__)
def test_models_train_alike_on_one_device_and_on_several(module, optimizer, strategy):
    losses, before, after = trained(module, optimizer, trainer.distribute.OneDeviceStrategy())
    assert losses[-1] < 0.3 * losses[0]
    others, _, other_weights = trained(module, optimizer, strategy(jax.devices()[:2]))
    np.testing.assert_allclose(others, losses, rtol=1e-3)
    for one, two in zip(after, other_weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3)
    if isinstance(module, WideAndDeep):
        (frozen,) = [place for place, weights in enumerate(after) if weights.shape == (3, 2)]
        np.testing.assert_array_equal(after[frozen], before[frozen])
