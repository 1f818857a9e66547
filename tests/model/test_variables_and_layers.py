"""Weights and layers of a model as objects with names, for all kinds of modules."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import trainer

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.ones((8, 1), np.float32)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm()(nn.Dense(4)(x), use_running_average=not train)


class LinenNet(nn.Module):
    def setup(self):
        self.encoder = Encoder()
        self.drop = nn.Dropout(0.0)
        self.head = nn.Dense(1)

    def __call__(self, x, train=False):
        return self.head(self.drop(self.encoder(x, train), deterministic=not train))


class NNXEncoder(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NNXEncoder(rngs), nnx.Dropout(0.0, rngs=rngs)])
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks[1](self.blocks[0](x)))


class Two(trainer.Model):
    def sample_inputs(self, batch):
        x, _, _ = trainer.unpack_x_y_sample_weight(batch)
        return {"a": x, "b": np.zeros((len(x), 4), np.float32)}


def built(module, kind=trainer.Model, **options):
    model = kind(module)
    model.compile("sgd", "mse", **options)
    model.build(X)
    return model


MODELS = {
    "linen": (lambda **options: built(LinenNet(), **options), ["encoder", "drop", "head"],
              ["encoder/BatchNorm_0/bias", "encoder/BatchNorm_0/scale", "encoder/Dense_0/bias",
               "encoder/Dense_0/kernel", "batch_stats/encoder/BatchNorm_0/mean",
               "batch_stats/encoder/BatchNorm_0/var"]),
    "nnx": (lambda **options: built(NNXNet(nnx.Rngs(0)), **options), ["blocks/0", "blocks/1", "head"],
            ["blocks/0/dense/bias", "blocks/0/dense/kernel", "blocks/0/norm/bias", "blocks/0/norm/scale",
             "blocks/0/norm/mean", "blocks/0/norm/var"]),
    "sequential": (lambda **options: built([Encoder(), nn.relu, nn.Dense(1, name="head")], **options),
                   ["layers_0", "layers_1", "head"],
                   ["layers_0/BatchNorm_0/bias", "layers_0/BatchNorm_0/scale", "layers_0/Dense_0/bias",
                    "layers_0/Dense_0/kernel", "batch_stats/layers_0/BatchNorm_0/mean",
                    "batch_stats/layers_0/BatchNorm_0/var"]),
    "nnx sequential": (lambda **options: built(
        [NNXEncoder(nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 1, rngs=nnx.Rngs(1))], **options),
                       ["layers/0", "layers/1", "layers/2"],
                       ["layers/0/dense/bias", "layers/0/dense/kernel", "layers/0/norm/bias", "layers/0/norm/scale",
                        "layers/0/norm/mean", "layers/0/norm/var"]),
    "named": (lambda **options: built({"a": Encoder(), "b": nn.Dense(1)}, Two, **options), ["a", "b"],
              ["a/BatchNorm_0/bias", "a/BatchNorm_0/scale", "a/Dense_0/bias", "a/Dense_0/kernel",
               "a/batch_stats/BatchNorm_0/mean", "a/batch_stats/BatchNorm_0/var"]),
}
every_model = pytest.mark.parametrize("kind", MODELS)


@pytest.mark.sampled
@every_model
def test_weights_are_those_of_get_weights_by_path(kind):
    make, _, _ = MODELS[kind]
    model = make()
    for weights in (model.weights, model.variables):
        for weight, value in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(weight.numpy(), value)
            np.testing.assert_array_equal(np.asarray(weight), weight.value)
            assert (weight.shape, weight.dtype, weight.ndim, weight.size) == (
                value.shape, value.dtype, value.ndim, value.size)
            assert weight.name == weight.path.split("/")[-1]
    assert [weight.number for weight in model.weights] == list(range(len(model.weights)))
    assert sum(weight.size for weight in model.weights) == model.count_params()


@every_model
def test_layers_are_those_that_the_module_holds_in_the_order_of_their_calls(kind):
    make, names, paths = MODELS[kind]
    model = make()
    assert [layer.name for layer in model.layers] == names
    first = model.layers[0]
    assert [weight.path for weight in first.weights] == paths
    assert [weight.path for weight in first.variables] == paths
    assert [layer.path for layer in first.layers] == sorted(
        {path.replace("batch_stats/", "").rpartition("/")[0] for path in paths},
        key=lambda path: "orm" in path)  # the normalisation comes after the dense layer
    assert first.count_params() == sum(weight.size for weight in first.weights)
    assert sum(layer.count_params() for layer in model.layers) == model.count_params()
    assert model.get_layer(index=-1).name == model.get_layer(names[-1]).name == names[-1]
    assert model.get_layer(first.layers[0].path).path == first.layers[0].path


@pytest.mark.slow
@every_model
def test_what_is_assigned_to_weights_and_layers_is_trained_on(kind):
    make, _, _ = MODELS[kind]
    model, other = make(), make()
    values = [np.full_like(value, 0.5) for value in model.get_weights()]
    for weight, value in zip(model.weights, values, strict=True):
        weight.assign(value)
    for layer in other.layers:
        layer.set_weights([np.full_like(value, 0.5) for value in layer.get_weights()])
    expected = make()
    expected.set_weights(values)
    if kind != "named":  # whose step is the user's
        for each in (model, other, expected):
            each.fit(X, Y, epochs=2, verbose=0)
    for each in (model, other):
        for value, same in zip(each.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(value, same)


@pytest.mark.sampled
@every_model
def test_frozen_weights_and_state_are_not_trainable(kind):
    make, names, paths = MODELS[kind]
    frozen, head = make(freeze=names[0]), {path for path in paths if "stats" in path or path.endswith(("mean", "var"))}
    assert {weight.path for weight in frozen.non_trainable_weights} == set(paths)
    assert {weight.path for weight in frozen.trainable_weights} == {f"{names[-1]}/bias", f"{names[-1]}/kernel"}
    assert not frozen.layers[0].trainable and frozen.layers[-1].trainable
    model = make()
    assert {weight.path for weight in model.non_trainable_variables} == head
    assert {weight.path for weight in model.layers[0].non_trainable_variables} == head
    assert len(model.layers[0].trainable_variables) == 4
    model.trainable = False
    assert model.trainable_variables == [] and not model.layers[-1].trainable


@pytest.mark.slow
def test_a_weight_under_a_sharding_strategy_keeps_its_place():
    with trainer.distribute.FullyShardedStrategy(["cpu:0", "cpu:1", "cpu:2"], min_shard_bytes=0).scope():
        model = built(nn.Dense(4, use_bias=False))
    (kernel,) = model.weights
    place = model.state.params["kernel"].sharding
    kernel.assign(np.arange(12).reshape(3, 4))
    assert model.state.params["kernel"].sharding == place
    np.testing.assert_array_equal(kernel, np.arange(12).reshape(3, 4))


def test_values_that_were_read_stay_valid():
    model = built(nn.Dense(1, use_bias=False))
    (kernel,) = model.weights
    before, copied = kernel.value, kernel.numpy()
    model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(before, copied)
    assert np.abs(kernel.numpy() - copied).max() > 0
    now = kernel.numpy()
    np.testing.assert_array_equal(jnp.square(jnp.asarray(kernel)), np.square(now))
    kernel.assign_add(np.ones((3, 1)))
    np.testing.assert_array_equal(kernel, now + 1)
    kernel.assign_sub(1)
    assert repr(kernel) == "<ModelVariable path=kernel, shape=(3, 1), dtype=float32>"


@pytest.mark.slow
def test_averages_start_from_what_is_assigned():
    model = built(nn.Dense(1), ema_decay=0.5)
    model.fit(X, Y, epochs=2, verbose=0)
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape))
    assert np.abs(model.predict(X, verbose=0)).max() == 0.0


@pytest.mark.parametrize(("value", "error", "message"), [
    (np.ones((3, 2)), ValueError, r"must match the weight 'kernel', \(3, 1\). Received: .* \(3, 2\)"),
    (np.full((3, 1), 1e300), ValueError, "'kernel' has numbers that are too large"),
    (np.ones((3, 1), complex), ValueError, "complex numbers"),
    (np.full((3, 1), "a"), TypeError, "numbers for the weight 'kernel'"),
    ([[1], [2, 3]], ValueError, "inhomogeneous"),
])
def test_bad_values_change_nothing(value, error, message):
    model = built(nn.Dense(1, use_bias=False))
    (kernel,) = model.weights
    before = kernel.numpy()
    with pytest.raises(error, match=message):
        kernel.assign(value)
    np.testing.assert_array_equal(kernel, before)
    with pytest.raises(ValueError, match="has 2 arrays, but the layer has 1"):
        model.layers[0].set_weights([before, before])
    with pytest.raises(ValueError, match=r"shape \(1,\), but the layer's has \(3, 1\)"):
        model.layers[0].set_weights([np.ones(1)])


def test_a_single_layer_is_its_own_layer():
    model = built(nn.Dense(1))
    assert [layer.name for layer in model.layers] == ["Dense"]
    assert len(model.get_layer("Dense").get_weights()) == 2


@pytest.mark.slow
def test_what_a_layer_shares_is_listed_once():
    shared = nn.Dense(3)
    model = built([shared, nn.relu, shared])
    assert [(layer.name, layer.count_params()) for layer in model.layers] == [("layers_0", 12), ("layers_1", 0)]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"name": "heads"}, ValueError, "No such layer: 'heads'. .*'head'"),
    ({"index": 7}, ValueError, "Was asked to retrieve layer at index 7 but model only has 3 layers"),
    ({}, ValueError, "Provide either a layer name or a layer index"),
    ({"name": "head", "index": 0}, ValueError, "Received: index=0, name=head"),
    ({"index": "head"}, TypeError, "`index` must be a whole number"),
    ({"name": 3}, TypeError, "`name` must be the name of a layer"),
])
def test_a_layer_that_is_not_there_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        MODELS["linen"][0]().get_layer(**arguments)


def test_what_cannot_be_read_or_set_says_what_to_do():
    model = trainer.Model(LinenNet())
    with pytest.raises(RuntimeError, match=r"no weights yet. Call `build\(sample\)`"):
        _ = model.weights
    with pytest.raises(RuntimeError, match=r"it is not built. Call `build\(sample\)`"):
        _ = model.layers
    model = MODELS["linen"][0]()
    with pytest.raises(AttributeError, match=r"Call `compile\(..., freeze=\['encoder'\]\)`"):
        model.get_layer("encoder").trainable = False
    with pytest.raises(AttributeError):
        model.layers = []


@pytest.mark.slow
def test_a_stack_is_filled_and_emptied_before_it_is_built():
    model = trainer.Sequential()
    with pytest.raises(ValueError, match=r"has no layers. Call `add\(layer\)`"):
        model.build(X)
    model.compile("sgd", "mse")
    model.add(nn.Dense(4))
    model.add(nn.relu)
    model.add(nn.Dense(7))
    assert isinstance(model.pop(), nn.Dense)
    model.add(nn.Dense(1))
    assert [layer.name for layer in model.layers] == ["layers_0", "layers_1", "layers_2"]
    assert model.layers[0].weights == [] and model.layers[2].module.features == 1
    same = trainer.Sequential([nn.Dense(4), nn.relu, nn.Dense(1)])
    same.compile("sgd", "mse")
    for each in (model, same):
        each.fit(X, Y, epochs=2, verbose=0)
    for value, other in zip(model.get_weights(), same.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
    with pytest.raises(RuntimeError, match="The model is built: layers cannot be added or removed"):
        model.add(nn.Dense(1))
    with pytest.raises(RuntimeError, match="The model is built"):
        model.pop()
    assert len(model.layers) == 3
    # What the message proposes.
    other = trainer.Sequential([*(layer.module for layer in model.layers), nn.Dense(2)])
    other.build(X)
    other.layers[0].set_weights(model.layers[0].get_weights())
    np.testing.assert_array_equal(other.layers[0].weights[1], model.layers[0].weights[1])


def test_bad_layers_are_refused_and_change_nothing():
    model = trainer.Sequential()
    with pytest.raises(IndexError, match="no layers to remove"):
        model.pop()
    model.add(nn.Dense(1))
    with pytest.raises(TypeError, match=r"Layer 1 must be an instance\. Received: the class Dense"):
        model.add(nn.Dense)
    with pytest.raises(TypeError, match="Received: both"):
        model.add(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    assert len(model.layers) == 1
    with pytest.raises(TypeError, match="a list of Flax layers and functions"):
        trainer.Sequential(nn.Dense(1))
