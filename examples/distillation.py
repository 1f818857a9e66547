"""Distils a network that knows scikit-learn's digits into a smaller one, for which few of the images have labels.

The student learns from the teacher's logits for all images, and from labels where there are any: Hinton et al.,
"Distilling the knowledge in a neural network", https://arxiv.org/abs/1503.02531. It is compared with the same network,
trained on the labels alone.
"""

from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import models

LABELLED = 60  # of 1,437 images


class Distiller(trainer.Model):
    """A student whose loss has its distance to a teacher; both return logits."""

    def __init__(self, student: Any, teacher: trainer.Model, temperature: float = 3.0, share: float = 0.8):
        super().__init__(student)
        self.teacher, self.temperature, self.share = teacher, temperature, share
        self.divergence = trainer.losses.KLDivergence()

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> jax.Array:
        state = self.teacher.state  # a constant of the step
        logits, _ = self.teacher.apply(state.params, state, x)
        distance = self.divergence(jax.nn.softmax(logits / self.temperature), jax.nn.softmax(y_pred / self.temperature))
        # The square keeps the size of the gradients, whatever the temperature is.
        return (self.share * self.temperature ** 2 * distance
                + (1 - self.share) * super().compute_loss(x, y, y_pred, sample_weight))


def compiled(model: trainer.Model) -> trainer.Model:
    """Returns a model of logits, compiled."""
    model.compile(trainer.optimizers.Adam(3e-3), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                  weighted_metrics=["accuracy"])
    return model


def student() -> models.MLP:
    """Returns a network of 2,410 parameters; the teacher has about twenty times as many."""
    return models.MLP(num_classes=10, hidden=(32,), classifier_activation=None)


def main() -> None:
    images, labels = load_digits().images.astype(np.float32)[..., None] / 16, load_digits().target
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0)

    teacher = compiled(trainer.Model(models.CNN(num_classes=10, features=(32, 64), classifier_activation=None)))
    teacher.fit(images, labels, batch_size=64, epochs=10, verbose=2)

    alone = compiled(trainer.Model(student()))
    alone.fit(images[:LABELLED], labels[:LABELLED], batch_size=20, epochs=100, verbose=0)

    distilled = compiled(Distiller(student(), teacher))
    known = (np.arange(len(labels)) < LABELLED).astype(np.float32)
    history = distilled.fit(images, np.where(known, labels, 0), sample_weight=known, batch_size=64, epochs=25,
                            verbose=2)
    history.plot().savefig("curves.png")

    print({f"accuracy_{name}": float(np.mean(model.predict(test_images, verbose=0).argmax(-1) == test_labels))
           for name, model in (("teacher", teacher), ("alone", alone), ("distilled", distilled))}
          | {f"parameters_{name}": model.count_params() for name, model in (("teacher", teacher), ("student", alone))})


if __name__ == "__main__":
    main()
