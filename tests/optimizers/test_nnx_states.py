"""Labels, masks and filters of NNX, as loops with `nnx.Optimizer` have them, train the same weights."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer.optimizers.registry import as_optimizer

RATES = {"kernel": optax.sgd(0.5), "bias": optax.adam(0.1)}
X, Y = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), np.ones((8, 2), np.float32)


class Net(nnx.Module):
    """Its list has more than ten layers, whose numbers sort differently as strings."""

    def __init__(self, rngs):
        self.up = nnx.Linear(3, 2, rngs=rngs)
        self.layers = nnx.List([nnx.LoRA(2, 1, 2, rngs=rngs) for _ in range(11)])

    def __call__(self, x):
        x = self.up(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


NET = Net(nnx.Rngs(0))


def last(path, value):
    return {"kernel": "kernel"}.get(path[-1], "bias")


def weights(net):
    return {path: np.asarray(value.get_value()) for path, value in nnx.to_flat_state(nnx.state(net, nnx.Param))}


def by_hand(tx, wrt=nnx.Param):
    net = nnx.clone(NET)
    optimizer = nnx.Optimizer(net, tx, wrt=wrt)
    for _ in range(2):
        optimizer.update(net, nnx.grad(lambda net: ((net(X) - Y) ** 2).mean(), argnums=nnx.DiffState(0, wrt))(net))
    return weights(net)


def trained(tx, **options):
    net = nnx.clone(NET)
    model = trainer.Model(net)
    model.compile(tx, "mse", steps_per_execution=1, **options)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return weights(net)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("tx", "wrt", "options"), [
    (optax.partition(RATES, nnx.map_state(last, nnx.state(NET, nnx.Param))), nnx.Param, {}),
    (optax.partition(RATES, lambda state: nnx.map_state(last, state)), nnx.Param, {}),
    (optax.masked(optax.sgd(0.5), nnx.map_state(lambda path, value: "up" in path, nnx.state(NET, nnx.Param))),
     nnx.Param, {}),
    (optax.chain(optax.add_decayed_weights(0.5, lambda state: nnx.map_state(
        lambda path, value: "layers" in path, state)), optax.sgd(0.1)), nnx.Param, {}),
    (optax.adam(0.1), nnx.LoRAParam, {"freeze": nnx.Not(nnx.LoRAParam)}),
    (optax.partition(RATES, nnx.map_state(last, nnx.state(NET, nnx.PathContains("up")))), nnx.PathContains("up"),
     {"freeze": [nnx.LoRAParam]}),
], ids=["labels", "function", "mask", "decay", "wrt", "wrt and labels"])
def test_training_is_that_of_an_nnx_optimizer(tx, wrt, options):
    ours, theirs = trained(tx, **options), by_hand(tx, wrt)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-6, err_msg=str(path))
    before = weights(NET)
    assert any(np.any(value != before[path]) for path, value in ours.items())


@pytest.mark.slow
def test_one_optimizer_of_several_gets_the_state_of_its_part():
    labels = nnx.map_state(last, nnx.state(NET.up, nnx.Param))
    ours = trained({"up": optax.partition(RATES, labels), "layers": optax.set_to_zero()})
    theirs = by_hand(optax.partition({**RATES, "none": optax.set_to_zero()}, lambda state: nnx.map_state(
        lambda path, value: last(path, value) if "up" in path else "none", state)))
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-6, err_msg=str(path))


def test_a_transformation_that_takes_dicts_stays_itself():
    variables = dict(nnx.to_flat_state(nnx.state(NET, nnx.Param)))
    tx = optax.adam(0.1)
    assert as_optimizer(tx, variables).transformation is tx
    decayed = as_optimizer(optax.adamw(0.1, mask=lambda state: nnx.map_state(last, state)), variables)
    assert float(decayed.learning_rate) == pytest.approx(0.1)


@pytest.mark.parametrize("labels", [{"up": "kernel"}, lambda params: {"other": "kernel"},
                                    nnx.map_state(last, nnx.state(NET.up, nnx.Param))])
def test_labels_of_another_structure_are_refused_with_the_structure(labels):
    model = trainer.Model(nnx.clone(NET))
    model.compile(optax.partition(RATES, labels), "mse")
    with pytest.raises(ValueError, match=r"optax transformation .* cannot begin.*dicts, here with layers/0/lora_a"):
        model.build(X)


@pytest.mark.parametrize(("module", "freeze", "error", "message"), [
    (NET, nnx.PathContains("upp"), ValueError, "PathContains.*selects none of the 24 parameters: layers/0/lora_a"),
    (NET, nnx.BatchStat, ValueError, "filter BatchStat, which selects none"),
    (NET, [nnx.Param, 3], TypeError, "path patterns.*or of filters of NNX.*int"),
    (NET, True, TypeError, "path patterns.*or of filters of NNX.*bool"),
    (nn.Dense(2), nnx.PathContains("kernel"), TypeError, "NNX modules, and this model has none.*path patterns"),
])
def test_filters_that_select_nothing_are_refused(module, freeze, error, message):
    with pytest.raises(error, match=message):
        trainer.Model(module).compile("sgd", "mse", freeze=freeze)


def test_filters_and_patterns_select_together_also_among_named_modules():
    model = trainer.Model({"one": nnx.clone(NET), "other": nn.Dense(2)})
    model.compile({"one": "sgd", "other": "sgd"}, freeze=[nnx.LoRAParam, "other/bias"])
    is_frozen = model._core.configuration.options.is_frozen
    assert [is_frozen(path) for path in ("one/layers/10/lora_a", "one/up/kernel", "other/bias", "other/kernel")] == [
        True, False, True, False]


@pytest.mark.slow
def test_a_state_is_resumed_with_its_moments(tmp_path):
    labels = nnx.map_state(last, nnx.state(NET, nnx.Param))
    models = []
    for _ in range(2):
        models.append(trainer.Model(nnx.clone(NET)))
        models[-1].compile(optax.partition(RATES, labels), "mse", steps_per_execution=1)
    models[0].fit(X, Y, batch_size=8, verbose=0)
    models[0].save(tmp_path / "state")
    models[1].build(X)
    trainer.load(tmp_path / "state", models[1])
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(model.state.opt_state) for model in models))
