"""RunConfig, EstimatorSpec and checks of arguments of TensorFlow 2.15's Estimator, as ours has them.

Each function has the name of a behaviour in tests/reference/estimator_settings.json.
"""

from __future__ import annotations

import contextlib
import json
import os

from flax import linen as nn

from tests.support.estimator_behaviours import error_of, model_fn
from trainer import estimator as est

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
BEHAVIOURS = {}


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


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


def place(config):
    return [config.task_type, config.task_id, config.is_chief, config.num_ps_replicas, config.num_worker_replicas]


@behaviour
def a_process_without_tf_config():
    return place(est.RunConfig())


@contextlib.contextmanager
def tf_config(kind, index):
    """Sets TF_CONFIG while a block runs."""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": index}})
    try:
        yield
    finally:
        del os.environ["TF_CONFIG"]


def role(kind, index):
    with tf_config(kind, index):
        return place(est.RunConfig())


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
    return error_of(lambda: est.EstimatorSpec(est.ModeKeys.TRAIN, nn.Dense(1), optimizer="sgd"))


@behaviour
def an_eval_spec_without_loss():
    return error_of(lambda: est.EstimatorSpec(est.ModeKeys.EVAL, nn.Dense(1)))


@behaviour
def names_of_modes():
    return [est.ModeKeys.TRAIN, est.ModeKeys.EVAL, est.ModeKeys.PREDICT]
