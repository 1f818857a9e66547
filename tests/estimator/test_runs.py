"""Runs of an estimator: interrupted ones that go on, hooks in evaluations and predictions, and exports."""

import numpy as np
import pytest

import trainer
from tests.support.small_estimators import StopWithError, X, Y, dataset, spec_fn, trained_by_hand
from trainer import estimator as est
from trainer.estimator.training import serving


def interrupted(tmp_path, input_fn):
    """Returns a new estimator of a training that was interrupted in its third step, and saved after two."""
    config = est.RunConfig(tmp_path, save_checkpoints_steps=1)
    with pytest.raises(KeyboardInterrupt):
        est.Estimator(spec_fn(), config=config).train(input_fn, hooks=StopWithError(3), max_steps=6)
    made = est.Estimator(spec_fn(), config=config)
    return made, int(made.get_variable_value("global_step"))


@pytest.mark.slow
def test_an_interrupted_call_goes_on_where_it_was(tmp_path):
    made, step = interrupted(tmp_path, lambda: dataset(repeat=True))
    assert 0 < step < 6
    made.train(lambda: dataset(repeat=True), max_steps=6)
    kernel, _ = trained_by_hand([[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]])
    np.testing.assert_allclose(made.get_variable_value("params/kernel"), kernel, rtol=1e-5)


def test_an_interrupted_call_with_other_data_warns_and_begins_them_again(tmp_path):
    made, step = interrupted(tmp_path, lambda: dataset(repeat=True))
    message = f"cannot go on where it was: .* go on from step {step}, and the data begin again"
    with pytest.warns(UserWarning, match=message):
        made.train(lambda: dataset(3, repeat=True), max_steps=6)
    before = [[0, 1], [2, 3], [4]][:step]
    kernel, _ = trained_by_hand([*before, *([[0, 1, 2], [3, 4]] * 3)[:6 - step]])
    np.testing.assert_allclose(made.get_variable_value("params/kernel"), kernel, rtol=1e-5)


class Column:
    """A column of a table that is no array, but can become an array, such as a series of pandas."""

    def __init__(self, values):
        self._values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self._values

    def __len__(self):
        return len(self._values)


class Table:
    """Columns by name, such as a data frame of pandas."""

    def __init__(self, columns):
        self.columns, self._columns = list(columns), columns

    def __getitem__(self, name):
        return self._columns[name]

    def __array__(self, dtype=None, copy=None):
        return np.stack([np.asarray(column, object) for column in self._columns.values()], 1)


COLUMNS = {"age": Column([20.0, 30.0, 40.0]), "city": Column(np.array(["a", "b", None], object))}


@pytest.mark.parametrize("input_fn", [
    lambda: (COLUMNS, Column([0, 1, 0])), lambda: (Table(COLUMNS), Column([0, 1, 0])),
    lambda: iter([(Table(COLUMNS), Column([0, 1, 0]))]),
    lambda: trainer.data.Dataset.from_tensors((COLUMNS, np.array([0, 1, 0])))],
    ids=["columns", "table", "generator", "dataset"])
def test_an_input_fn_may_return_columns_of_a_table(tmp_path, input_fn):
    cities = est.categorical_column_with_vocabulary_list("city", ["a", "b"])
    made = est.LinearRegressor([est.numeric_column("age"), cities], optimizer=trainer.optimizers.SGD(1e-3),
                               config=est.RunConfig(tmp_path))
    made.train(input_fn, steps=1)
    # The gradient of the mean of (0 - label)**2 is -2/3 for the second row, whose city is "b".
    weights = made.get_variable_value("params/linear_model/city/weights")
    np.testing.assert_allclose(np.ravel(weights), [0.0, 2e-3 / 3], rtol=1e-5)


class Recorder(est.SessionRunHook):
    def __init__(self, steps=None):
        self.calls, self.results, self._left = [], [], steps

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, session, coord):
        self.calls.append(int(session.state.step))

    def before_run(self, run_context):
        self.calls.append("before_run")

    def after_run(self, run_context, run_values):
        self.calls.append("after_run")
        self.results.append(dict(run_values.results))
        if len(self.results) == self._left:
            run_context.request_stop()

    def end(self, session):
        self.calls.append("end")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return est.Estimator(spec_fn(), tmp_path_factory.mktemp("trained")).train(lambda: (X, Y), steps=4)


@pytest.mark.parametrize("run", [
    lambda made, hook: made.evaluate(dataset, hooks=hook), lambda made, hook: list(made.predict(dataset, hooks=[hook])),
], ids=["evaluate", "predict"])
def test_hooks_are_called_around_each_batch_of_an_evaluation_and_a_prediction(trained, run):
    hook = Recorder()
    run(trained, hook)
    assert hook.calls == ["begin", 4, *["before_run", "after_run"] * 3, "end"]
    assert [results["global_step"] for results in hook.results] == [4, 4, 4]
    stopping = Recorder(2)
    run(trained, stopping)
    assert stopping.calls == ["begin", 4, *["before_run", "after_run"] * 2, "end"]


def test_a_hook_sees_the_loss_of_an_evaluation_so_far_and_may_end_it(trained):
    kernel, bias = trained_by_hand([range(5)] * 4)
    squares = np.square(X @ kernel + bias - Y)
    hook = Recorder(2)
    logs = trained.evaluate(dataset, hooks=[hook])
    assert hook.results[0]["loss"] == pytest.approx(squares[:2].mean(), rel=1e-4)
    assert logs["loss"] == pytest.approx(np.mean([squares[:2].mean(), squares[2:4].mean()]), rel=1e-4)


@pytest.mark.slow
def test_hooks_of_the_spec_are_called_in_their_mode(tmp_path):
    hooks = {name: Recorder() for name in ("training_hooks", "evaluation_hooks", "prediction_hooks")}
    made = est.Estimator(spec_fn(**hooks), tmp_path).train(dataset)
    assert [hook.calls.count("after_run") for hook in hooks.values()] == [3, 0, 0]
    made.evaluate(dataset, steps=2)
    list(made.predict(dataset))
    assert [hook.calls.count("after_run") for hook in hooks.values()] == [3, 2, 3]


def exporting(tmp_path, names, **options):
    options = {"predictions": lambda outputs: {"outputs": outputs, "doubled": 2 * outputs}, **options}
    return est.Estimator(spec_fn(export_outputs=names, **options), tmp_path / "run").train(lambda: (X, Y), steps=1)


def test_an_export_has_the_outputs_that_the_spec_names(tmp_path):
    made = exporting(tmp_path, ["doubled"])
    folder = made.export_saved_model(tmp_path / "exports", lambda: X[:1])
    found = trainer.load_exported(f"{folder}/{serving.FILE_NAME}").predict(X)
    assert list(found) == ["doubled"]
    kernel, bias = trained_by_hand([range(5)])
    np.testing.assert_allclose(found["doubled"], 2 * (X @ kernel + bias), rtol=1e-5)
    assert sorted(next(made.predict(lambda: X))) == ["doubled", "outputs"]


@pytest.mark.parametrize(("names", "options", "message"), [
    (["double"], {}, "Unknown name in `export_outputs` 'double'. Did you mean 'doubled'"),
    (["outputs"], {"predictions": None}, "`export_outputs` names outputs, and the predictions are no dict"),
])
def test_outputs_that_are_not_predicted_are_not_exported(tmp_path, names, options, message):
    made = exporting(tmp_path, names, **options)
    with pytest.raises(ValueError, match=message):
        made.export_saved_model(tmp_path / "exports", lambda: X[:1])
    assert not serving.exports_in(str(tmp_path / "exports"))
