"""Weights that `exclude_from_weight_decay` names do not decay, and all others are updated as before."""

import copy
import pickle

import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import optimizers

PARAMS = {"Dense_0": {"kernel": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
                      "bias": np.linspace(0.5, 1, 3, dtype=np.float32)},
          "head": {"kernel": np.linspace(1, 2, 6, dtype=np.float32).reshape(3, 2)}}
GRADS = {"Dense_0": {"kernel": np.full((2, 3), 0.3, np.float32), "bias": np.full(3, -0.2, np.float32)},
         "head": {"kernel": np.full((3, 2), 0.1, np.float32)}}
MAKERS = {
    "AdamW": lambda **decay: optimizers.AdamW(0.1, **decay), "SGD": lambda **decay: optimizers.SGD(0.1, 0.9, **decay),
    "accumulated": lambda **decay: optimizers.Adam(0.1, gradient_accumulation_steps=2, **decay),
    "Muon": lambda **decay: optimizers.Muon(0.1, adam_weight_decay=decay["weight_decay"], **decay),
}
X, Y = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2), np.ones((8, 1), np.float32)


def updated(optimizer, steps=4):
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        updates, state = optimizer.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params


def excluding(optimizer, **given):
    optimizer.exclude_from_weight_decay(**given)
    return optimizer


class Variable:
    def __init__(self, path):
        self.path = path


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("given", "excluded"), [
    ({"var_names": ["bias"]}, ["Dense_0/bias"]), ({"var_names": ["^head/", "bi.s$"]}, ["head/kernel", "Dense_0/bias"]),
    ({"var_list": [Variable("Dense_0/kernel")]}, ["Dense_0/kernel"]), ({}, []),
    ({"var_list": [Variable("head/kernel")], "var_names": ["bias"]}, ["head/kernel", "Dense_0/bias"]),
])
def test_the_excluded_weights_are_those_of_no_weight_decay(name, given, excluded):
    received = updated(excluding(MAKERS[name](weight_decay=0.25), **given))
    decayed, plain = updated(MAKERS[name](weight_decay=0.25)), updated(MAKERS[name](weight_decay=0.0))
    for path in ("Dense_0/kernel", "Dense_0/bias", "head/kernel"):
        layer, weight = path.split("/")
        assert not np.array_equal(decayed[layer][weight], plain[layer][weight])
        np.testing.assert_array_equal(received[layer][weight], (plain if path in excluded else decayed)[layer][weight])


def test_the_weights_are_those_of_kerass_formula():
    optimizer = excluding(optimizers.SGD(0.5, weight_decay=0.1), var_names=["bias"])
    received = updated(optimizer, steps=1)["Dense_0"]
    np.testing.assert_allclose(received["kernel"], PARAMS["Dense_0"]["kernel"] * (1 - 0.5 * 0.1) - 0.5 * 0.3, rtol=1e-6)
    np.testing.assert_allclose(received["bias"], PARAMS["Dense_0"]["bias"] + 0.5 * 0.2, rtol=1e-6)


def test_the_last_call_counts():
    optimizer = excluding(MAKERS["SGD"](weight_decay=0.25), var_names=["bias"])
    optimizer.exclude_from_weight_decay(var_names=["head"])
    assert optimizer == excluding(MAKERS["SGD"](weight_decay=0.25), var_names=["head"])
    assert optimizer != excluding(MAKERS["SGD"](weight_decay=0.25), var_names=["bias"])


COPIES = {
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)), "deepcopy": copy.deepcopy, "copy": copy.copy,
    "configuration": lambda optimizer: optimizers.deserialize(optimizers.serialize(optimizer)),
    "from_config": lambda optimizer: type(optimizer).from_config(optimizer.get_config()),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_excludes_the_same_weights(way):
    optimizer = excluding(optimizers.AdamW(0.1), var_list=[Variable("head/kernel")], var_names=["bias"])
    assert COPIES[way](optimizer) == optimizer and COPIES[way](optimizer) != optimizers.AdamW(0.1)
    assert "exclude_from_weight_decay" in repr(COPIES[way](optimizer))
    assert "exclude_from_weight_decay" not in optimizers.AdamW(0.1).get_config()


def model_with(optimizer, module=None):
    model = trainer.Model(module or nn.Dense(1, bias_init=nn.initializers.ones), seed=0)
    model.compile(optimizer, "mse")
    return model


def weights_of(optimizer):
    model = model_with(optimizer)
    model.fit(X, Y, epochs=2, batch_size=4, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.slow
def test_a_fit_and_a_resumed_fit_leave_them_out(tmp_path):
    built = trainer.Model(nn.Dense(1))
    built.build(X)
    variables = [variable for variable in built.variables if variable.name == "bias"]
    by_name, by_variable = (excluding(optimizers.SGD(0.1, weight_decay=0.5), **given) for given in (
        {"var_names": ["bias"]}, {"var_list": variables}))
    received = weights_of(by_name)
    for same in (weights_of(by_variable), weights_of(optimizers.LossScaleOptimizer(by_name).inner_optimizer)):
        np.testing.assert_array_equal(received, same)
    assert not np.array_equal(received, weights_of(optimizers.SGD(0.1, weight_decay=0.5)))
    model = model_with(by_name)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "state")
    again = trainer.load_model(tmp_path / "state", model_with(copy.deepcopy(by_name)))
    again.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_array_equal(np.concatenate([weight.ravel() for weight in again.get_weights()]), received)


def test_the_optimizer_of_a_model_can_be_told_until_the_model_is_built():
    model = model_with(optimizers.AdamW(0.1))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match="can only be configured before the optimizer is built"):
        model.optimizer.exclude_from_weight_decay(var_names=["kernel"])


@pytest.mark.parametrize(("optimizer", "given", "error", "message"), [
    (optimizers.AdamW(), {"var_names": "bias"}, TypeError, "`var_names` must be a list of regular expressions"),
    (optimizers.AdamW(), {"var_names": [3]}, TypeError, "`var_names` must be a list of regular expressions"),
    (optimizers.AdamW(), {"var_names": ["("]}, ValueError, "is no regular expression"),
    (optimizers.AdamW(), {"var_list": ["bias"]}, TypeError, "`var_list` must be a list .* use `var_names`"),
    (optimizers.AdamW(), {"var_list": 3}, TypeError, "`var_list` must be a list of a model's variables"),
    (optimizers.get(optax.adamw(0.1)), {"var_names": ["bias"]}, ValueError, "no `weight_decay` argument.*mask"),
])
def test_what_names_no_weights_is_refused(optimizer, given, error, message):
    with pytest.raises(error, match=message):
        optimizer.exclude_from_weight_decay(**given)


@pytest.mark.parametrize(("given", "message"), [
    ({"var_names": ["bais", "^scale"]}, r"\['bais', '\^scale'\]\)` matches no weight of the model, .*bias, .*kernel"),
    ({"var_list": [Variable("Dense_7/bias")]}, "'Dense_7/bias', which the optimizer does not update"),
])
def test_weights_that_the_model_has_not_are_refused_before_training(given, message):
    with pytest.raises(ValueError, match=message):
        model_with(excluding(optimizers.AdamW(), **given)).fit(X, Y, verbose=0)
