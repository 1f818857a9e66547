"""Recorded behaviours of TensorFlow 2.15's Estimator (tests/reference/make_estimator.py), repeated with ours.

Each function has the name of a recorded behaviour, and returns the values that must be the same: numbers, names, the
type of an error.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import estimator as est
from trainer.estimator.training import serving

X = np.array([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5], [4.0, 4.5], [0.5, -1.0]], np.float32)
Y = np.array([[0.3], [0.5], [0.7], [0.8], [-0.2]], np.float32)
BEHAVIOURS = {}


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


def recorded(name):
    """Returns TensorFlow's results by the names of behaviours."""
    path = pathlib.Path(__file__).parents[1] / "reference" / name
    return json.loads(path.read_text())["behaviours"]


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return None


def data(batch_size=1, rows=3, repeat=False):
    dataset = trainer.data.Dataset.from_arrays((X[:rows], Y[:rows])).batch(batch_size)
    return dataset.repeat() if repeat else dataset


def model_fn(features, labels, mode):
    return est.EstimatorSpec(
        mode, module=nn.Dense(1, kernel_init=nn.initializers.zeros_init()), loss="mse",
        optimizer=trainer.optimizers.SGD(0.01),
        predictions=lambda outputs: {"outputs": outputs, "doubled": 2 * outputs})


def estimator(**config):
    return est.Estimator(model_fn, config=est.RunConfig(model_dir=tempfile.mkdtemp(), **config))


def checkpoints(trained):
    return sorted(int(name.removeprefix("step_")) for name in os.listdir(trained.model_dir) if name.startswith("step_"))


def step(trained):
    return int(trained.get_variable_value("global_step"))


def kernel(trained):
    return trained.get_variable_value("params/kernel").ravel().tolist()


# --- steps and checkpoints --------------------------------------------------------------------------------------------


@behaviour
def steps_add_up():
    trained = estimator()
    trained.train(lambda: data(repeat=True), steps=2).train(lambda: data(repeat=True), steps=3)
    return step(trained)


@behaviour
def data_end_the_training_and_begin_again():
    trained = estimator()
    return [step(trained.train(lambda: data())) for _ in range(2)]


@behaviour
def max_steps_count_from_the_beginning():
    trained = estimator()
    trained.train(lambda: data(repeat=True), max_steps=5).train(lambda: data(repeat=True), max_steps=7)
    return step(trained)


@behaviour
def input_fn_is_not_called_at_max_steps():
    trained, calls = estimator(), []
    trained.train(lambda: data(repeat=True), max_steps=5)
    trained.train(lambda: calls.append(1) or data(repeat=True), max_steps=5)
    return len(calls)


@behaviour
def input_fn_is_called_once():
    calls = []
    estimator().train(lambda: calls.append(1) or data(repeat=True), steps=5)
    return len(calls)


@behaviour
def train_returns_the_estimator():
    trained = estimator()
    return trained.train(lambda: data(), steps=1) is trained


@behaviour
def steps_and_max_steps():
    return error_of(lambda: estimator().train(lambda: data(), steps=1, max_steps=1))


@behaviour
def no_steps():
    return error_of(lambda: estimator().train(lambda: data(), steps=0))


@behaviour
def no_max_steps():
    return error_of(lambda: estimator().train(lambda: data(), max_steps=0))


@behaviour
def arrays_are_one_batch_for_ever():
    return step(estimator().train(lambda: (X[:3], Y[:3]), steps=4))


@behaviour
def checkpoints_of_25_steps():
    trained = estimator(save_checkpoints_steps=10)
    return checkpoints(trained.train(lambda: data(repeat=True), steps=25))


@behaviour
def checkpoints_of_a_second_call():
    trained = estimator(save_checkpoints_steps=10, keep_checkpoint_max=None)
    trained.train(lambda: data(repeat=True), steps=25).train(lambda: data(repeat=True), steps=25)
    return checkpoints(trained)


@behaviour
def five_checkpoints_are_kept():
    trained = estimator(save_checkpoints_steps=2)
    return checkpoints(trained.train(lambda: data(repeat=True), steps=20))


@behaviour
def two_checkpoints_are_kept():
    trained = estimator(save_checkpoints_steps=2, keep_checkpoint_max=2)
    return checkpoints(trained.train(lambda: data(repeat=True), steps=9))


@behaviour
def checkpoints_by_default():
    return checkpoints(estimator().train(lambda: data(repeat=True), steps=25))


@behaviour
def weights_after_20_steps():
    trained = estimator().train(lambda: data(2, 4, repeat=True), steps=20)
    return [kernel(trained), trained.get_variable_value("params/bias").tolist()]


@behaviour
def a_new_object_goes_on():
    trained = estimator().train(lambda: data(2, 4, repeat=True), steps=10)
    return kernel(est.Estimator(model_fn, config=trained.config).train(lambda: data(2, 4, repeat=True), steps=10))


@behaviour
def a_hook_stops_the_training():
    class Stop(est.SessionRunHook):
        def __init__(self):
            self.count = 0

        def after_run(self, run_context, run_values):
            self.count += 1
            if self.count == 3:
                run_context.request_stop()

    return step(estimator().train(lambda: data(repeat=True), hooks=[Stop()], steps=10))


@behaviour
def a_hook_alone_stops_the_training():
    return step(estimator().train(lambda: data(repeat=True), hooks=[est.StopAtStepHook(num_steps=4)]))


@behaviour
def order_of_a_hooks_methods():
    calls = []

    class Hook(est.SessionRunHook):
        def begin(self):
            calls.append("begin")

        def after_create_session(self, session, coord):
            calls.append("after_create_session")

        def before_run(self, run_context):
            calls.append("before_run")

        def after_run(self, run_context, run_values):
            calls.append("after_run")

        def end(self, session):
            calls.append("end")

    estimator().train(lambda: data(repeat=True), hooks=[Hook()], steps=2)
    return calls


@behaviour
def what_is_no_hook():
    return error_of(lambda: estimator().train(lambda: data(), hooks=["hook"]))


@behaviour
def steps_that_listeners_see():
    seen = []

    class Listener(est.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            seen.append(int(global_step_value))

        def end(self, session, global_step_value):
            seen.append(-int(global_step_value))

    estimator(save_checkpoints_steps=4).train(lambda: data(repeat=True), steps=10, saving_listeners=[Listener()])
    return seen


@behaviour
def a_listener_stops_the_training():
    class Listener(est.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            return global_step_value >= 4

    trained = estimator(save_checkpoints_steps=4)
    return step(trained.train(lambda: data(repeat=True), steps=20, saving_listeners=[Listener()]))


# --- evaluate and predict ---------------------------------------------------------------------------------------------


def fresh(function):
    """Returns the result of a call on weights that no checkpoint has, of which it warns."""
    with pytest.warns(UserWarning, match="Could not find trained model"):
        return function(estimator())


@behaviour
def evaluate_of_batches_of_2_and_1():
    return fresh(lambda made: float(made.evaluate(lambda: data(2, 3))["loss"]))


@behaviour
def evaluate_of_a_limited_number_of_steps():
    return fresh(lambda made: float(made.evaluate(lambda: data(1, 3, repeat=True), steps=2)["loss"]))


@behaviour
def evaluate_names():
    return fresh(lambda made: sorted(made.evaluate(lambda: data())))


@behaviour
def evaluate_without_a_checkpoint():
    return fresh(lambda made: int(made.evaluate(lambda: data())["global_step"]))


@behaviour
def evaluate_of_an_older_checkpoint():
    trained = estimator(save_checkpoints_steps=2).train(lambda: data(repeat=True), steps=6)
    path = os.path.join(trained.model_dir, "step_2")
    return int(trained.evaluate(lambda: data(), checkpoint_path=path)["global_step"])


@behaviour
def evaluate_no_steps():
    return error_of(lambda: estimator().evaluate(lambda: data(), steps=0))


@behaviour
def folders_of_evaluations():
    trained = estimator().train(lambda: data(), steps=1)
    trained.evaluate(lambda: data())
    trained.evaluate(lambda: data(), name="other")
    return sorted(name for name in os.listdir(trained.model_dir) if name.startswith("eval"))


@behaviour
def predictions_of_an_endless_input():
    found = estimator().train(lambda: data(), steps=1).predict(lambda: data(repeat=True))
    last = [sorted(next(found)) for _ in range(7)][-1]
    found.close()
    return last


@behaviour
def predictions_are_of_rows():
    return fresh(lambda made: [list(row["outputs"].shape) for row in made.predict(lambda: data(2, 3))])


@behaviour
def predictions_of_batches():
    return fresh(lambda made: [list(batch["outputs"].shape) for batch in made.predict(
        lambda: data(2, 3), yield_single_examples=False)])


@behaviour
def predict_keys_choose():
    return fresh(lambda made: sorted(next(made.predict(lambda: data(), predict_keys="doubled"))))


@behaviour
def unknown_predict_keys():
    return fresh(lambda made: error_of(lambda: next(made.predict(lambda: data(), predict_keys="nothing"))))


# --- train_and_evaluate -----------------------------------------------------------------------------------------------


class Recorder(est.Exporter):
    """An exporter that notes when it is called."""

    def __init__(self):
        self.seen = []

    @property
    def name(self):
        return "recorder"

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.seen.append([int(eval_result["global_step"]), bool(is_the_final_export)])


def evaluations(throttle_secs):
    recorder = Recorder()
    results = est.train_and_evaluate(
        estimator(save_checkpoints_steps=10), est.TrainSpec(lambda: data(repeat=True), max_steps=40),
        est.EvalSpec(lambda: data(), throttle_secs=throttle_secs, exporters=recorder))
    return recorder.seen, results


@behaviour
def evaluations_without_throttle():
    return evaluations(0)[0]


@behaviour
def evaluations_with_a_throttle_of_600_secs():
    return evaluations(600)[0]


@behaviour
def what_train_and_evaluate_returns():
    metrics, exports = evaluations(600)[1]
    return [sorted(metrics), int(metrics["global_step"]), exports]


@behaviour
def train_and_evaluate_at_max_steps():
    trained = estimator().train(lambda: data(repeat=True), max_steps=4)
    metrics, exports = est.train_and_evaluate(
        trained, est.TrainSpec(lambda: data(repeat=True), max_steps=4), est.EvalSpec(lambda: data()))
    return [metrics, len(exports or [])]


@behaviour
def defaults_of_eval_spec():
    spec = est.EvalSpec(lambda: data())
    return [spec.steps, spec.start_delay_secs, spec.throttle_secs]


@behaviour
def specs_in_the_wrong_order():
    return error_of(lambda: est.train_and_evaluate(
        estimator(), est.EvalSpec(lambda: data()), est.TrainSpec(lambda: data(), max_steps=1)))


@behaviour
def exporters_of_one_name():
    return error_of(lambda: est.EvalSpec(lambda: data(), exporters=[Recorder(), Recorder()]))


@behaviour
def a_negative_throttle():
    return error_of(lambda: est.EvalSpec(lambda: data(), throttle_secs=-1))


@behaviour
def a_name_that_is_no_text():
    return error_of(lambda: est.EvalSpec(lambda: data(), name=3))


def exports_with(exporter):
    trained = estimator(save_checkpoints_steps=10)
    est.train_and_evaluate(trained, est.TrainSpec(lambda: data(repeat=True), max_steps=40),
                           est.EvalSpec(lambda: data(), throttle_secs=0, exporters=exporter))
    found = serving.exports_in(os.path.join(trained.model_dir, "export", exporter.name))
    outputs = trainer.load_exported(os.path.join(found[-1], serving.FILE_NAME)).predict(X)
    assert sorted(outputs) == ["doubled", "outputs"]
    return len(found)


@behaviour
def exports_of_the_final_exporter():
    return exports_with(est.FinalExporter("final", lambda: X[:1]))


@behaviour
def exports_of_the_latest_exporter():
    return exports_with(est.LatestExporter("latest", lambda: X[:1], exports_to_keep=3))


@behaviour
def exports_of_the_best_exporter():
    return exports_with(est.BestExporter("best", lambda: X[:1], exports_to_keep=None))


# --- warm start -------------------------------------------------------------------------------------------------------


@behaviour
def a_warm_start_has_weights_and_no_step():
    first = estimator().train(lambda: data(2, 4, repeat=True), steps=5)
    second = est.Estimator(model_fn, model_dir=tempfile.mkdtemp(), warm_start_from=first.model_dir)
    second.train(lambda: data(2, 4, repeat=True), steps=1)
    return [step(second), kernel(second)]
