"""Calls of newcomers that train, to nothing or to other numbers than meant, and the words of their warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import trainer
from tests.support.newcomers_calls import _DENSE, IDS, Y, _fit, _model
from trainer import callbacks, losses, metrics, optimizers


class _InTrainMode(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, is_train_mode: bool = False) -> jax.Array:
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not is_train_mode)(x))


class _Softmax(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.softmax(nn.Dense(1)(x))


class _Stops(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.stop_training = True


WARNED: dict[str, tuple[Callable[[], Any], str]] = {
    "a warm-up without its end": (lambda: optimizers.schedules.CosineDecay(0.1, 10, warmup_steps=2),
                                  "no effect without `warmup_target`"),
    "a flag of another name": (lambda: _fit(_model(module=_InTrainMode())),
                               "stays False.*train_kwargs={'is_train_mode"),
    "precision of logits": (
        lambda: _fit(_model(loss=losses.BinaryCrossentropy(from_logits=True), metrics=[metrics.Precision()]), y=Y),
        r"above 0.5 for yes.*`trainer\.metrics\.Precision\(thresholds=0\.0"),
    "no epoch": (lambda: _fit(epochs=3, initial_epoch=3), "trains no epoch: initial_epoch=3"),
    "an optax chain without a rate": (
        lambda: _model(optimizer=optax.chain(optax.clip(1.0), optax.scale_by_adam())),
        "clip, scale_by_adam has no learning rate.*scale_by_learning_rate"),
    "a softmax of one output": (
        lambda: _fit(_model(module=_Softmax(), loss="binary_crossentropy")), "over a single output.*`nn.sigmoid`"),
    "equality with probabilities": (
        lambda: _fit(_model(3, metrics=[metrics.Accuracy()], loss=_DENSE), y=np.eye(3)[IDS]),
        r'equal their labels.*`metrics=\["accuracy"\]`'),
    "a callback's own stop_training": (lambda: _fit(callbacks=[_Stops()]), r"`self\.model\.stop_training = True`"),
    "Lightning's training_step": (lambda: type("Own", (trainer.Model,), {"training_step": lambda self, batch: 0.0}),
                                  "does not call `Own.training_step`.*`train_step"),
    "Keras's call": (lambda: type("Own", (trainer.Model,), {"call": lambda self, x: x}),
                     "does not call `Own.call`.*Flax module"),
}
