"""Records TensorFlow 2.15's RunConfig, EstimatorSpec and checks of arguments: `python make_estimator_settings.py`.

See make_estimator.py, next to which it must lie.
"""

from __future__ import annotations

import json
import os

import tensorflow as tf
from make_estimator import BEHAVIOURS, behaviour, error_of, est, model_fn, write

BEHAVIOURS.clear()


@behaviour
def defaults_of_run_config():
    config = est.RunConfig()
    return [config.save_checkpoints_secs, config.save_checkpoints_steps, config.keep_checkpoint_max,
            config.log_step_count_steps, config.save_summary_steps]


@behaviour
def steps_replace_secs():
    config = est.RunConfig(save_checkpoints_steps=5)
    return [config.save_checkpoints_secs, config.save_checkpoints_steps]


@behaviour
def steps_and_secs():
    return error_of(lambda: est.RunConfig(save_checkpoints_steps=5, save_checkpoints_secs=5))


@behaviour
def replacing_what_is_not_replaceable():
    return error_of(lambda: est.RunConfig().replace(task_id=1))


@behaviour
def a_process_without_tf_config():
    config = est.RunConfig()
    return [config.task_type, config.task_id, config.is_chief, config.num_ps_replicas, config.num_worker_replicas]


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def role(kind, index):
    os.environ["TF_CONFIG"] = json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": index}})
    try:
        config = est.RunConfig()
    finally:
        del os.environ["TF_CONFIG"]
    return [config.task_type, config.task_id, config.is_chief, config.num_ps_replicas, config.num_worker_replicas]


@behaviour
def a_worker_of_a_cluster():
    return role("worker", 1)


@behaviour
def the_chief_of_a_cluster():
    return role("chief", 0)


@behaviour
def an_evaluator():
    return role("evaluator", 0)


@behaviour
def two_model_dirs():
    return error_of(lambda: est.Estimator(model_fn, model_dir="a", config=est.RunConfig(model_dir="b")))


@behaviour
def a_model_fn_without_features():
    return error_of(lambda: est.Estimator(lambda labels, mode: None))


@behaviour
def a_model_fn_with_other_arguments():
    return error_of(lambda: est.Estimator(lambda features, labels, mode, others: None))


@behaviour
def params_that_are_not_taken():
    return error_of(lambda: est.Estimator(lambda features, labels, mode: None, params={"a": 1}))


@behaviour
def params_are_copies():
    params = {"a": [1]}
    made = est.Estimator(lambda features, labels, mode, params: None, params=params)
    params["a"].append(2)
    made.params["a"].append(3)
    return made.params["a"]


@behaviour
def a_train_spec_without_loss():
    return error_of(lambda: est.EstimatorSpec(est.ModeKeys.TRAIN, train_op=tf.no_op()))


@behaviour
def an_eval_spec_without_loss():
    return error_of(lambda: est.EstimatorSpec(est.ModeKeys.EVAL))


@behaviour
def names_of_modes():
    return [est.ModeKeys.TRAIN, est.ModeKeys.EVAL, est.ModeKeys.PREDICT]


if __name__ == "__main__":
    write("estimator_settings.json")
