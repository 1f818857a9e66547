"""Warm start: which weights are taken from another training, and what is refused."""

import re

import numpy as np
import pytest
from flax import linen as nn

from tests.support.small_estimators import X, Y, spec_fn
from trainer import estimator as est
from trainer.core.tree_paths import named_leaves


class Named(nn.Module):
    first: str = "first"

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(1, name="last")(nn.Dense(3, name=self.first)(inputs))


def data():
    return X, Y


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return est.Estimator(spec_fn(Named()), tmp_path_factory.mktemp("source")).train(data, steps=2)


class Look(est.SessionRunHook):
    """Keeps the weights that a training begins with, by name."""

    def after_create_session(self, session, coord):
        self.found = {name: np.asarray(leaf) for name, leaf in named_leaves({"params": session.state.params}).items()}


def warm_started(tmp_path, settings, module=None):
    """Returns the weights that a training begins with."""
    look = Look()
    config = est.RunConfig(tmp_path, tf_random_seed=7)
    est.Estimator(spec_fn(module or Named()), config=config, warm_start_from=settings).train(data, hooks=look, steps=1)
    return look.found


def is_taken(found, source, name, previous=None):
    return np.array_equal(found[name], source.get_variable_value(previous or name))


@pytest.mark.slow
def test_a_regular_expression_says_which_variables_are_taken(tmp_path, source):
    found = warm_started(tmp_path, est.WarmStartSettings(source.model_dir, "first/"))
    assert is_taken(found, source, "params/first/kernel")
    assert is_taken(found, source, "params/first/bias")
    assert not is_taken(found, source, "params/last/kernel")


@pytest.mark.slow
def test_one_of_several_expressions_is_enough(tmp_path, source):
    found = warm_started(tmp_path, est.WarmStartSettings(source.model_dir, ["first/bias", "last/kernel"]))
    assert is_taken(found, source, "params/first/bias")
    assert is_taken(found, source, "params/last/kernel")
    assert not is_taken(found, source, "params/first/kernel")


@pytest.mark.slow
def test_a_variable_with_another_name_there_is_taken_by_it(tmp_path, source):
    names = {f"params/begin/{part}": f"params/first/{part}" for part in ("kernel", "bias")}
    settings = est.WarmStartSettings(source.latest_checkpoint(), var_name_to_prev_var_name=names)
    found = warm_started(tmp_path, settings, Named("begin"))
    assert is_taken(found, source, "params/begin/kernel", "params/first/kernel")
    assert is_taken(found, source, "params/last/kernel")


def test_no_expression_takes_nothing(tmp_path, source):
    found = warm_started(tmp_path, est.WarmStartSettings(source.model_dir, None))
    assert not is_taken(found, source, "params/first/kernel")


KERNEL = "params/first/kernel"
REFUSED = {
    "an expression that matches nothing": (
        {"vars_to_warm_start": "dense"}, r"'dense', which matches no variable of the model. They are: .*first/kernel"),
    "one of several that matches nothing": (
        {"vars_to_warm_start": ["first", "frist"]}, r"has 'frist', which matches no variable"),
    "a name that the model has not": (
        {"var_name_to_prev_var_name": {"params/frist/kernel": KERNEL}}, "which the model has not. Did you mean"),
    "a name that the checkpoint has not": (
        {"var_name_to_prev_var_name": {KERNEL: "params/frist/kernel"}}, r"has no variable 'params/frist/kernel'"),
    "a new name that no expression matches": (
        {"vars_to_warm_start": "last", "var_name_to_prev_var_name": {KERNEL: KERNEL}},
        "which `vars_to_warm_start` does not match"),
    "another shape": (
        {"var_name_to_prev_var_name": {KERNEL: "params/first/bias"}}, r"has the shape \(2, 3\), and .* \(3,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_take_less_than_they_say_are_refused(tmp_path, source, name):
    options, message = REFUSED[name]
    made = est.Estimator(spec_fn(Named()), tmp_path, warm_start_from=est.WarmStartSettings(source.model_dir, **options))
    with pytest.raises(ValueError, match=message):
        made.train(data, steps=1)
    assert made.latest_checkpoint() is None


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"vars_to_warm_start": "(("}, ValueError, r"'\(\(', which is no regular expression"),
    ({"vars_to_warm_start": 3}, TypeError, "`vars_to_warm_start` must be a regular expression"),
    ({"var_name_to_prev_var_name": None}, TypeError, "`var_name_to_prev_var_name` must be a dict"),
    ({"var_name_to_prev_var_name": {"params/kernel": 3}}, TypeError, "`var_name_to_prev_var_name` must be a dict"),
])
def test_settings_of_a_wrong_form_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        est.WarmStartSettings("folder", **options)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    made = est.Estimator(spec_fn(), tmp_path / "new", warm_start_from=tmp_path / "nothing")
    with pytest.raises(ValueError, match=f"has no checkpoint: {re.escape(repr(str(tmp_path / 'nothing')))}"):
        made.train(data, steps=1)


@pytest.mark.slow
def test_categories_that_do_not_occur_keep_the_weights_that_they_were_started_with(tmp_path):
    # As in TensorFlow, whose sparse updates leave such rows alone.
    column = est.categorical_column_with_identity("category", 3)

    def linear(folder, **options):
        return est.LinearRegressor([column], model_dir=tmp_path / folder, **options)

    all_three = {"category": np.array([[0], [1], [2]])}
    source = linear("source").train(lambda: (all_three, np.array([[1.0], [-2.0], [3.0]])), steps=5)
    warm = linear("warm", warm_start_from=source.model_dir).train(
        lambda: ({"category": np.array([[0], [0]])}, np.array([[5.0], [5.0]])), steps=3)
    name = next(name for name in source.get_variable_names() if name.startswith("params/") and "bias" not in name)
    before, after = source.get_variable_value(name).ravel(), warm.get_variable_value(name).ravel()
    assert before.all()
    assert after[0] != before[0]
    np.testing.assert_array_equal(after[1:], before[1:])
