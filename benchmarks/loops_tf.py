"""TF-Keras under TensorFlow's MirroredStrategy. Needs neither JAX nor the trainer.

The packages `tensorflow` and `tf_keras` may be in another environment, whose interpreter `TF_PYTHON` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import tensorflow as tf
import tf_keras
from cases import Unavailable, Workload

STEPS_PER_EXECUTION = (1, 32)


def fit(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Calls `fit` once for all epochs, with several `steps_per_execution`: the faster one counts."""
    if os.environ["BENCHMARK_PLATFORM"] == "gpu" and not tf.config.list_physical_devices("GPU"):
        raise Unavailable("TensorFlow sees no GPU")
    x, y = workload.data()

    def candidate(count):
        with tf.distribute.MirroredStrategy().scope():
            hidden = {"mlp": 128, "small_mlp": 8}[workload.model]
            model = tf_keras.Sequential([
                tf_keras.layers.Dense(hidden, "relu"), tf_keras.layers.Dense(workload.classes)])
            model.compile("adam", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                          metrics=["accuracy"], steps_per_execution=count)

        def run(epochs):
            model.fit(x, y, batch_size=workload.batch_size, epochs=epochs, verbose=0)
            return epochs * workload.steps

        return run

    return {f"steps_per_execution={count}": candidate(count) for count in STEPS_PER_EXECUTION}
