"""`model_to_estimator` trains the module of a compiled model as `fit` does, and leaves the model as it is."""

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.small_estimators import X, Y, variables
from trainer import estimator as est


def data():
    return X, Y


def compiled(**options):
    model = trainer.Model(nn.Dense(1))
    model.compile(trainer.optimizers.SGD(0.05), "mse", **options)
    return model


@pytest.mark.slow
def test_an_estimator_trains_on_from_the_models_weights_as_fit_does(tmp_path):
    model = compiled(metrics=["mae"])
    model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    before = model.get_weights()
    made = est.model_to_estimator(model, tmp_path).train(data, steps=3)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    model.fit(X, Y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    bias, kernel = variables(made).values()
    np.testing.assert_allclose(bias, model.state.params["bias"], rtol=1e-5)
    np.testing.assert_allclose(kernel, model.state.params["kernel"], rtol=1e-5)
    logs, expected = made.evaluate(data, steps=1), model.evaluate(X, Y, verbose=0)
    assert logs.pop("global_step") == 3
    assert logs == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(next(made.predict(data)), model.predict(X, verbose=0)[0], rtol=1e-5)


@pytest.mark.slow
def test_a_model_without_weights_begins_as_it_would(tmp_path):
    model = trainer.Model(nn.Dense(1), seed=3)
    model.compile(trainer.optimizers.SGD(0.05), "mse")
    made = est.model_to_estimator(model, tmp_path).train(data, steps=1)
    model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    np.testing.assert_allclose(made.get_variable_value("params/kernel"), model.state.params["kernel"], rtol=1e-5)


@pytest.mark.parametrize(("seed", "expected"), [(None, 3), (4, 4)])
def test_the_seed_is_that_of_the_config_or_else_of_the_model(tmp_path, seed, expected):
    model = trainer.Model(nn.Dense(1), seed=3)
    model.compile("sgd", "mse")
    made = est.model_to_estimator(model, tmp_path, est.RunConfig(tf_random_seed=seed))
    assert made.config.seed == expected


@pytest.mark.slow
def test_arguments_of_compile_are_kept(tmp_path):
    model = compiled(freeze=["bias"])
    model.build(X[:1])
    bias, kernel = (np.asarray(model.state.params[name]) for name in ("bias", "kernel"))
    made = est.model_to_estimator(model, tmp_path).train(data, steps=2)
    np.testing.assert_array_equal(made.get_variable_value("params/bias"), bias)
    assert not np.array_equal(made.get_variable_value("params/kernel"), kernel)


@pytest.mark.slow
def test_logs_get_the_names_of_the_map(tmp_path):
    made = est.model_to_estimator(compiled(metrics=["mae"]), tmp_path, metric_names_map={"mae": "distance"})
    assert sorted(made.train(data, steps=1).evaluate(data, steps=1)) == ["distance", "global_step", "loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "message"), [
    ({"mea": "distance"}, "Unknown metric in `metric_names_map` 'mea'. Did you mean 'mae'"),
    ({"mae": "loss"}, "`metric_names_map` gives two logs one name"),
])
def test_a_map_that_names_no_log_or_hides_one_is_refused(tmp_path, names, message):
    made = est.model_to_estimator(compiled(metrics=["mae"]), tmp_path, metric_names_map=names).train(data, steps=1)
    with pytest.raises(ValueError, match=message):
        made.evaluate(data, steps=1)


class OwnStep(trainer.Model):
    def train_step(self, state, batch):
        return super().train_step(state, batch)


def own_step():
    model = OwnStep(nn.Dense(1))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: est.model_to_estimator(nn.Dense(1)), TypeError, r"`model` must be a compiled `trainer.Model`. .*Dense"),
    (lambda: est.model_to_estimator(trainer.Model(nn.Dense(1))), ValueError, "has not been compiled"),
    (lambda: est.model_to_estimator(own_step()), ValueError, "overrides train_step, which an estimator would"),
    (lambda: est.model_to_estimator(compiled(), config={}), TypeError, "`config` must be a `RunConfig`"),
    (lambda: est.model_to_estimator(compiled(), metric_names_map=["mae"]), TypeError,
     "`metric_names_map` must be a dict of names by names"),
], ids=["a module", "not compiled", "an own step", "a config", "a list of names"])
def test_what_cannot_be_an_estimator_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_data_of_another_width_than_the_models_weights_are_refused(tmp_path):
    model = compiled()
    model.build(X[:1])
    with pytest.raises(ValueError, match=r"has shape \(2, 1\), but the model's has \(4, 1\)"):
        est.model_to_estimator(model, tmp_path).train(lambda: (np.c_[X, X], Y), steps=1)
