"""Records how TensorFlow 2.15's Estimator behaves: `python tests/reference/make_estimator.py` with TensorFlow 2.15.

Each behaviour is a function here, and one of the same name in `tests/estimator/behaviours.py`, whose result must be
the same. Results are numbers, names, or the type of an error.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
import tempfile

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

tf.config.set_visible_devices([], "GPU")
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
est = tf.estimator

X = np.array([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5], [4.0, 4.5], [0.5, -1.0]], np.float32)
Y = np.array([[0.3], [0.5], [0.7], [0.8], [-0.2]], np.float32)
BEHAVIOURS = {}


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return None


def data(batch_size=1, rows=3, repeat=False):
    dataset = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch_size)
    return dataset.repeat() if repeat else dataset


def model_fn(features, labels, mode):
    outputs = tf.compat.v1.layers.dense(features, 1, kernel_initializer=tf.compat.v1.zeros_initializer(), name="dense")
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"outputs": outputs, "doubled": 2 * outputs})
    loss = tf.reduce_mean(tf.square(labels - outputs))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)
    train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def estimator(**config):
    return est.Estimator(model_fn, config=est.RunConfig(model_dir=tempfile.mkdtemp(), **config))


def checkpoints(trained):
    names = glob.glob(os.path.join(trained.model_dir, "model.ckpt-*.index"))
    return sorted(int(name.split("-")[-1].split(".")[0]) for name in names)


def step(trained):
    return int(trained.get_variable_value("global_step"))


# --- steps and checkpoints --------------------------------------------------------------------------------------------


@behaviour
def steps_add_up():
    trained = estimator()
    trained.train(lambda: data(repeat=True), steps=2).train(lambda: data(repeat=True), steps=3)
    return step(trained)


@behaviour
def data_end_the_training_and_begin_again():
    trained = estimator()
    found = [step(trained.train(lambda: data())) for _ in range(2)]
    return found


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
    trained = estimator().train(lambda: (X[:3], Y[:3]), steps=4)
    return step(trained)


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
    return [trained.get_variable_value("dense/kernel").ravel().tolist(),
            trained.get_variable_value("dense/bias").tolist()]


@behaviour
def a_new_object_goes_on():
    trained = estimator().train(lambda: data(2, 4, repeat=True), steps=10)
    again = est.Estimator(model_fn, config=trained.config).train(lambda: data(2, 4, repeat=True), steps=10)
    return again.get_variable_value("dense/kernel").ravel().tolist()


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
    return step(estimator().train(lambda: data(repeat=True), hooks=[tf.compat.v1.train.StopAtStepHook(num_steps=4)]))


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

    trained = estimator(save_checkpoints_steps=4)
    trained.train(lambda: data(repeat=True), steps=10, saving_listeners=[Listener()])
    return seen


@behaviour
def a_listener_stops_the_training():
    class Listener(est.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            return global_step_value >= 4

    trained = estimator(save_checkpoints_steps=4)
    return step(trained.train(lambda: data(repeat=True), steps=20, saving_listeners=[Listener()]))


# --- evaluate and predict ---------------------------------------------------------------------------------------------


@behaviour
def evaluate_of_batches_of_2_and_1():
    return float(estimator().evaluate(lambda: data(2, 3))["loss"])


@behaviour
def evaluate_of_a_limited_number_of_steps():
    return float(estimator().evaluate(lambda: data(1, 3, repeat=True), steps=2)["loss"])


@behaviour
def evaluate_names():
    return sorted(estimator().evaluate(lambda: data()))


@behaviour
def evaluate_without_a_checkpoint():
    return int(estimator().evaluate(lambda: data())["global_step"])


@behaviour
def evaluate_of_an_older_checkpoint():
    trained = estimator(save_checkpoints_steps=2).train(lambda: data(repeat=True), steps=6)
    path = os.path.join(trained.model_dir, "model.ckpt-2")
    return int(trained.evaluate(lambda: data(), checkpoint_path=path)["global_step"])


@behaviour
def evaluate_no_steps():
    return error_of(lambda: estimator().evaluate(lambda: data(), steps=0))


@behaviour
def folders_of_evaluations():
    trained = estimator()
    trained.evaluate(lambda: data())
    trained.evaluate(lambda: data(), name="other")
    return sorted(name for name in os.listdir(trained.model_dir) if name.startswith("eval"))


@behaviour
def predictions_of_an_endless_input():
    found = estimator().predict(lambda: data(repeat=True))
    return [sorted(next(found)) for _ in range(7)][-1]


@behaviour
def predictions_are_of_rows():
    return [list(row["outputs"].shape) for row in estimator().predict(lambda: data(2, 3))]


@behaviour
def predictions_of_batches():
    found = estimator().predict(lambda: data(2, 3), yield_single_examples=False)
    return [list(batch["outputs"].shape) for batch in found]


@behaviour
def predict_keys_choose():
    return sorted(next(estimator().predict(lambda: data(), predict_keys="doubled")))


@behaviour
def unknown_predict_keys():
    return error_of(lambda: next(estimator().predict(lambda: data(), predict_keys="nothing")))


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


def evaluations(throttle_secs, save=10):
    recorder = Recorder()
    results = est.train_and_evaluate(
        estimator(save_checkpoints_steps=save), est.TrainSpec(lambda: data(repeat=True), max_steps=40),
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


def receiver():
    features = tf.compat.v1.placeholder(tf.float32, [None, 2])
    return est.export.TensorServingInputReceiver(features, features)


def exporting_model_fn(features, labels, mode):
    spec = model_fn(features, labels, mode)
    if mode != est.ModeKeys.PREDICT:
        return spec
    return spec._replace(export_outputs={"serving_default": est.export.PredictOutput(spec.predictions)})


@behaviour
def exports_of_the_final_exporter():
    return exports_with(est.FinalExporter("final", receiver))


@behaviour
def exports_of_the_latest_exporter():
    return exports_with(est.LatestExporter("latest", receiver, exports_to_keep=3))


@behaviour
def exports_of_the_best_exporter():
    return exports_with(est.BestExporter("best", receiver, exports_to_keep=None))


def exports_with(exporter):
    trained = est.Estimator(exporting_model_fn, config=est.RunConfig(
        model_dir=tempfile.mkdtemp(), save_checkpoints_steps=10))
    est.train_and_evaluate(trained, est.TrainSpec(lambda: data(repeat=True), max_steps=40),
                           est.EvalSpec(lambda: data(), throttle_secs=0, exporters=exporter))
    folder = os.path.join(trained.model_dir, "export", exporter.name)
    return len([name for name in os.listdir(folder) if name.isdigit()])


# --- warm start -------------------------------------------------------------------------------------------------------


@behaviour
def a_warm_start_has_weights_and_no_step():
    first = estimator().train(lambda: data(2, 4, repeat=True), steps=5)
    second = est.Estimator(model_fn, model_dir=tempfile.mkdtemp(), warm_start_from=first.model_dir)
    second.train(lambda: data(2, 4, repeat=True), steps=1)
    return [step(second), second.get_variable_value("dense/kernel").ravel().tolist()]


def write(name: str) -> None:
    """Writes what all behaviours so far are to a file."""
    found = {}
    for behaviour_name, function in BEHAVIOURS.items():
        found[behaviour_name] = function()
    path = pathlib.Path(__file__).with_name(name)
    path.write_text(json.dumps({"tensorflow": tf.__version__, "behaviours": found}, indent=1) + "\n")
    print(f"{len(found)} behaviours")


if __name__ == "__main__":
    write("estimator.json")
