"""A `train_and_evaluate` to be killed: `python estimator_training.py`, also as a process of estimator_job.py.

Alone it trains on two replicas, and writes all arrays of the last checkpoint, and the last evaluation, to result.npz.
"""

from __future__ import annotations

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + ("1" if "TF_CONFIG" in os.environ else "2")
import numpy as np
from flax import linen as nn

import trainer
from trainer import estimator as est
from trainer.estimator.training import checkpoints

STEPS = 30
IN_JOB = "TF_CONFIG" in os.environ

rng = np.random.default_rng(0)
x = rng.normal(size=(50, 6)).astype(np.float32)
y = x[:, :1] - 0.5 * x[:, 1:2] ** 2


class Network(nn.Module):
    """A network with state and random numbers."""

    @nn.compact
    def __call__(self, x, training=False):
        x = nn.BatchNorm(use_running_average=not training)(nn.Dense(8)(x))
        x = nn.Dropout(0.2, deterministic=not training)(nn.tanh(x))
        return nn.Dense(1)(x)


def model_fn(features, labels, mode):
    return est.EstimatorSpec(mode, module=Network(), loss="mse", optimizer="adam", metrics=["mae"])


def train_input_fn():
    # Rows in another order in each of the passes, of which the third ends the training.
    return trainer.data.Dataset.from_arrays((x, y)).shuffle(seed=1).repeat(None).batch(4)


def eval_input_fn():
    return trainer.data.Dataset.from_arrays((x, y)).batch(16)


def variables():
    """Returns all arrays of the last checkpoint."""
    return checkpoints.read_variables(checkpoints.opened(os.path.join("run", f"step_{STEPS}")))


def main():
    is_evaluator = IN_JOB and trainer.distribute.TFConfigClusterResolver().task_type == "evaluator"
    is_worker = IN_JOB and not is_evaluator
    strategy = (trainer.distribute.MultiWorkerMirroredStrategy if is_worker else trainer.distribute.MirroredStrategy)()
    config = est.RunConfig("run", save_checkpoints_steps=6, train_distribute=strategy)
    estimator = est.Estimator(model_fn, config=config)
    exporter = est.BestExporter("best", lambda: x[:1], exports_to_keep=1)
    train_spec = est.TrainSpec(train_input_fn, max_steps=STEPS, hooks=[trainer.testing.kill_at()])
    eval_spec = est.EvalSpec(eval_input_fn, start_delay_secs=0, throttle_secs=0, exporters=exporter)
    est.train_and_evaluate(estimator, train_spec, eval_spec)
    if is_worker:
        return
    logs = estimator.evaluate(eval_input_fn)
    assert logs["global_step"] == STEPS
    assert len(list(pathlib.Path("run/export/best").glob("[0-9]*"))) == 1
    evaluated = {f"eval_{name}": np.asarray(value) for name, value in logs.items()}
    if is_evaluator:
        np.savez("evaluated.npz", **evaluated)
    else:
        np.savez("result.npz", **variables(), **evaluated)


if __name__ == "__main__":
    main()
