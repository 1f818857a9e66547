"""What users give an estimator by mistake is refused before anything is compiled, with what was expected."""

import numpy as np
import pytest
from flax import linen as nn

from tests.support.small_estimators import X, Y, spec_fn
from trainer import estimator as est

IDS = np.array([[0], [1], [1], [0], [1]])


def data():
    return X, Y


def train(tmp_path, input_fn=data, **options):
    return est.Estimator(spec_fn(**options), tmp_path).train(input_fn, steps=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"))


SPECS = {
    "a hook that is none": ({"evaluation_hooks": ["hook"]}, TypeError, "`evaluation_hooks` must be `SessionRunHook`s"),
    "hooks that are a number": ({"training_hooks": 3}, TypeError, "`training_hooks` must be .* type int"),
    "options that are no dict": ({"compile_options": "eager"}, TypeError, "`compile_options` must be a dict"),
    "a loss in the options": ({"compile_options": {"loss": "mae"}}, ValueError, "`compile_options` has loss"),
    "outputs that are a dict": ({"export_outputs": {"a": 1}}, TypeError, "`export_outputs` must be a list of names"),
    "outputs that are a number": ({"export_outputs": 3}, TypeError, "`export_outputs` must be a list of names"),
    "no outputs": ({"export_outputs": []}, ValueError, "`export_outputs` must be a list of at least one name"),
    "a batch_map of nothing": ({"batch_map": lambda x, y: None}, TypeError, "`batch_map` must return .* NoneType"),
    "a batch_map of features alone": ({"batch_map": lambda x, y: x}, TypeError, r"`batch_map` must return .*\(5, 2\)"),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs(tmp_path, name):
    options, error, message = SPECS[name]
    with pytest.raises(error, match=message):
        train(tmp_path, **options)


INPUTS = {
    "text": (lambda: "abc", TypeError, "`the result of input_fn` must be a `trainer.data.Dataset` of batches"),
    "a dict of lists": (lambda: {"x": X.tolist()}, TypeError, "`the result of input_fn` must be .* type dict"),
    "lists": (lambda: (X.tolist(), Y.tolist()), TypeError, r"must be arrays: .*Make arrays of lists, by `np.asarray`"),
    "labels in a list": (lambda: ({"x": X}, Y.tolist()), TypeError, r"Make arrays of lists, by `np.asarray`"),
    "batches that are lists": (lambda: [[X, Y]], TypeError, r"or a tuple `\(features, labels\)`. Received: \[array"),
    "features and labels in a list": (lambda: [X, Y], ValueError, "The loss needs targets"),
    "no rows": (lambda: (X[:0], Y[:0]), ValueError,
                "features of input_fn cannot be used: .*at least one row"),
    "other rows of labels": (lambda: (X, Y[:3]), ValueError, "must have the same number of rows"),
    "other columns of labels": (lambda: (X, np.c_[Y, Y]), ValueError, "Give one label for each number"),
    "no labels": (lambda: X, ValueError, "The loss needs targets"),
    "three parts": (lambda: (X, Y, Y), ValueError, r"must be `features` or `\(features, labels\)`. .*a tuple of 3"),
    "features that are text": (lambda: (IDS.astype(str), Y), ValueError,
                               "features of input_fn cannot be used: .*For text, give the spec a `batch_map`"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(tmp_path, name):
    input_fn, error, message = INPUTS[name]
    with pytest.raises(error, match=message):
        train(tmp_path, input_fn)


@pytest.mark.slow
def test_a_list_of_batches_without_labels_is_predicted_batch_by_batch(trained):
    found = list(trained.predict(lambda: [X[:2], X[2:4]]))
    np.testing.assert_array_equal(found, list(trained.predict(lambda: iter([X[:2], X[2:4]]))))
    assert len(found) == 4


CALLS = {
    "arrays in the place of an input_fn": (lambda made: made.train(X, Y), TypeError,
                                           r"`input_fn` must be a function .* `lambda: .*from_arrays.* type ndarray"),
    "arrays to evaluate": (lambda made: made.evaluate(X, Y), TypeError, "`input_fn` must be a function"),
    "arrays to predict": (lambda made: next(made.predict(X, hooks=3)), TypeError, "`input_fn` must be a function"),
    "TensorFlow's input functions": (lambda made: est.inputs, AttributeError, r"no attribute 'inputs'\. .*from_arrays"),
    "TensorFlow's feature columns": (lambda made: est.feature_column, AttributeError, "are here: .*numeric_column"),
    "one thing for listeners": (lambda made: made.train(data, steps=1, saving_listeners=3), TypeError,
                                "`saving_listeners` must be `CheckpointSaverListener`s"),
    "a number for exporters": (lambda made: est.EvalSpec(data, exporters=3), TypeError, "`exporters` must be"),
    "a number for a path": (lambda made: made.evaluate(data, 1, checkpoint_path=3), TypeError,
                            "`checkpoint_path` must be the path of a checkpoint"),
    "the folder for a path": (lambda made: made.evaluate(data, 1, checkpoint_path=made.model_dir), ValueError,
                              "is a folder of checkpoints. Give the path of one of them, such as '.*step_1'"),
    "a number for a name": (lambda made: made.evaluate(data, 1, name=3), TypeError, "`name` must be text"),
    "a number for keys": (lambda made: next(made.predict(data, predict_keys=3)), TypeError,
                          "`predict_keys` must be a list of names. Received: int"),
    "text for a switch": (lambda made: next(made.predict(data, yield_single_examples="no")), TypeError,
                          "`yield_single_examples` must be True or False"),
    "a number for a variable": (lambda made: made.get_variable_value(3), TypeError, "`name` must be text"),
    "rows for a receiver": (lambda made: made.export_saved_model("export", X), TypeError,
                            "`serving_input_receiver_fn` must be a function"),
    "a receiver without a result": (lambda made: made.export_saved_model("export", lambda: None), TypeError,
                                    "`the result of serving_input_receiver_fn` must be some rows"),
    "a number for a folder": (lambda made: made.export_saved_model(3, lambda: X), TypeError,
                              "`export_dir_base` must be the path of a folder"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(trained, name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call(trained)


@pytest.mark.parametrize(("labels", "fix"), [
    ([0, 1, 4], r" For 5 classes, give `n_classes=5`, or the head `MultiClassHead\(5\)`\.$"),
    ([0, 1.5], r"1\.5\.$"), ([2, -1], r"2\.$"), ([0, np.inf], r"inf\.$"),
    ([0, np.nan], r"nan\.$")])
def test_labels_of_more_than_two_classes(labels, fix):
    with pytest.raises(ValueError, match=r"^Labels must be in range \[0, 1\]\. Received: .*" + fix):
        est.BinaryClassHead().encoded_labels(np.array(labels)[:, None])


@pytest.mark.parametrize(("call", "error"), [
    (lambda module, features: module(features), "CallCompactUnboundModuleError"),
    (lambda module, features: module.apply({}, features), "ScopeCollectionNotFound")])
def test_a_model_fn_that_calls_its_module(tmp_path, call, error):
    def model_fn(features, labels, mode):
        return est.EstimatorSpec(mode, predictions=call(nn.Dense(3), features))

    message = rf"calls a module, .*\({error}\)\. Return the module, uncalled: `EstimatorSpec\(mode, module="
    with pytest.raises(TypeError, match=message):
        est.Estimator(model_fn, tmp_path).train(data, steps=1)


def test_a_model_fn_without_a_module(tmp_path):
    with pytest.raises(ValueError, match=r"Missing module.* and not its outputs: `module=nn\.Dense\(3\)`"):
        est.EstimatorSpec("infer", predictions=lambda outputs: outputs)


@pytest.mark.slow
def test_params_are_an_empty_dict_by_default(tmp_path):
    def model_fn(features, labels, mode, params):
        return spec_fn(nn.Dense(params.get("units", 1)))(features, labels, mode)

    assert est.Estimator(model_fn, tmp_path).train(data, steps=1).params == {}


def test_one_hook_or_listener_needs_no_list(tmp_path):
    ended = []

    class Listener(est.CheckpointSaverListener):
        def end(self, session, global_step_value):
            ended.append(global_step_value)

    model_fn = spec_fn(training_hooks=est.StopAtStepHook(num_steps=2))
    est.Estimator(model_fn, tmp_path).train(data, steps=5, saving_listeners=Listener())
    assert ended == [2]


def test_predictions_without_arrays_are_refused(tmp_path):
    made = train(tmp_path, predictions=lambda outputs: None)
    with pytest.raises(ValueError, match="`predictions` of the spec must return arrays"):
        next(made.predict(data))


CHECKPOINTS = {
    "another module": ({"module": nn.Sequential([nn.Dense(3), nn.Dense(1)])}, "layers_0"),
    "another optimizer": ({"optimizer": "adam"}, "opt_state"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_another_model_is_refused(trained, name):
    options, message = CHECKPOINTS[name]
    other = est.Estimator(spec_fn(**options), trained.model_dir)
    with pytest.raises(ValueError, match=rf"(?s)The module or the optimizer of model_fn does not match .*{message}"):
        other.evaluate(data, steps=1)
    with pytest.raises(ValueError, match=rf"(?s)The model and its optimizer do not match the run.*{message}"):
        other.train(data, steps=1)


HEADS = {
    "too few logits for classes": (lambda: est.MultiClassHead(3), IDS, 2, r"MultiClassHead, of shape \(rows, 3\)"),
    "too many logits for classes": (lambda: est.MultiClassHead(3), IDS, 4, r"MultiClassHead, of shape \(rows, 3\)"),
    "too many logits for a number": (lambda: est.RegressionHead(), Y, 3, r"RegressionHead, of shape \(rows, 1\)"),
    "too few logits for two heads": (
        lambda: est.MultiHead([est.RegressionHead(name="size"), est.BinaryClassHead(name="kind")]),
        {"size": Y, "kind": IDS}, 1, r"MultiHead, of shape \(rows, 2\)"),
    "rows that differ between heads": (
        lambda: est.MultiHead([est.RegressionHead(name="size"), est.BinaryClassHead(name="kind")]),
        {"size": Y, "kind": IDS[:3]}, 2, "must have as many rows. Received: {'size': 5, 'kind': 3}"),
    "labels that are not finite": (lambda: est.MultiClassHead(3), IDS * np.nan, 3, "must be whole numbers from 0"),
    "a weight column without names": (lambda: est.RegressionHead(weight_column="w"), Y, 1, "must be a dict by name"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(tmp_path, name):
    make, labels, logits, message = HEADS[name]

    def model_fn(features, labels, mode):
        return make().create_estimator_spec(mode, nn.Dense(logits), "sgd")

    with pytest.raises(ValueError, match=message):
        est.Estimator(model_fn, tmp_path).train(lambda: (X, labels), steps=1)


MADE = {
    "a head that is text": (lambda: est.LinearEstimator("head", [est.numeric_column("x")]), TypeError,
                            "`head` must be a head of `trainer.estimator`"),
    "no head": (lambda: est.DNNEstimator(None, [4], [est.numeric_column("x")]), TypeError, "`head` must be a head"),
    "one head for several": (lambda: est.MultiHead(est.RegressionHead(name="a")), TypeError, "`heads` must be a list"),
    "a weight that is text": (lambda: est.MultiHead([est.RegressionHead(name="a")], ["x"]), TypeError,
                              "`head_weights` must be a finite number"),
    "a weight that is not finite": (lambda: est.MultiHead([est.RegressionHead(name="a")], [np.nan]), ValueError,
                                    "`head_weights` must be a finite number"),
    "a name that is a number": (lambda: est.MultiClassHead(3, name=4), TypeError, "`name` must be text"),
    "one threshold": (lambda: est.BinaryClassHead(thresholds=0.5), TypeError, "`thresholds` must be a list of numbers"),
    "a name twice": (lambda: est.BinaryClassHead(label_vocabulary=["a", "a"]), ValueError, "names that differ"),
    "a link that is no function": (lambda: est.RegressionHead(inverse_link_fn=3), TypeError,
                                   "`inverse_link_fn` must be a function"),
}


@pytest.mark.parametrize("name", MADE)
def test_heads_that_cannot_be_made(name):
    make, error, message = MADE[name]
    with pytest.raises(error, match=message):
        make()


def test_weights_that_are_text_are_refused():
    with pytest.raises(ValueError, match=r"`weight_column` 'w' must have numbers\. Received: dtype <U1"):
        est.RegressionHead(weight_column="w").weights({"w": np.array(["a", "b"])}, 2)
