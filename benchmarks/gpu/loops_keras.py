"""The large models in Keras on JAX: mixed bfloat16, batches that are on the device, compiled by XLA."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # read by the import of Keras

import jax
import keras
from gpu.loops import Run, placed_batches, round_of
from gpu.workloads import Workload
from keras import layers
from loops_keras import LanguageModel


def _network(workload: Workload) -> keras.Model:
    if (sizes := workload.transformer) is not None:
        return LanguageModel(sizes.vocabulary, sizes.tokens, sizes.width, sizes.depth, sizes.heads)
    if workload.tiny:
        return keras.Sequential([
            layers.Conv2D(8, 3, strides=4), layers.BatchNormalization(), layers.ReLU(),
            layers.GlobalAveragePooling2D(), layers.Dense(workload.classes)])
    application = {"mobilenet_v2": keras.applications.MobileNetV2, "resnet50": keras.applications.ResNet50}
    return application[workload.model](weights=None, input_shape=(workload.side, workload.side, 3),
                                       classes=workload.classes, classifier_activation=None)


def _new_model(workload: Workload) -> keras.Model:
    model = _network(workload)
    optimizer = (keras.optimizers.AdamW(1e-4, weight_decay=1e-4) if workload.transformer
                 else keras.optimizers.SGD(1e-3, momentum=0.9))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True,
                  metrics=["accuracy"] if workload.has_accuracy else None)
    return model


def fit(workload: Workload) -> Run:
    """Calls `fit` once for all epochs, with a generator of batches that are on the device.

    Steps take far longer than their dispatch, so an execution has one step.
    """
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    if jax.device_count() > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    batches, model = placed_batches(workload), _new_model(workload)

    def run(epochs):
        model.fit((batch for _ in range(epochs) for batch in batches), epochs=epochs, steps_per_epoch=workload.steps,
                  verbose=0)
        return round_of(workload, epochs)

    return run
