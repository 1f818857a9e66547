"""Learns from pairs of scikit-learn's digits whether both are the same digit, with one encoder for both.

The contrastive loss is that of Hadsell et al., "Dimensionality reduction by learning an invariant mapping", 2006:
images of one digit come near to each other, others get at least a margin apart. The encoder never
sees which digit an image shows. It is good if the nearest neighbours of an embedding have its digit.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import models

MARGIN = 1.0


class Siamese(nn.Module):
    """The distance of the embeddings of two batches of images, row by row."""

    dim: int = 3

    def setup(self) -> None:
        self.encoder = models.CNN(num_classes=self.dim, features=(16, 32), hidden=64, classifier_activation=None)

    def __call__(self, one: jax.Array, other: jax.Array) -> jax.Array:
        # The root of 0 has no gradient.
        return jnp.sqrt(jnp.square(self.encoder(one) - self.encoder(other)).sum(-1) + 1e-9)

    def embed(self, images: jax.Array) -> jax.Array:
        """Returns an embedding for each image."""
        return self.encoder(images)


def contrastive(is_same: jax.Array, distance: jax.Array) -> jax.Array:
    """Returns the loss of each pair."""
    return jnp.where(is_same == 1, jnp.square(distance), jnp.square(jnp.maximum(MARGIN - distance, 0)))


def accuracy(is_same: jax.Array, distance: jax.Array) -> jax.Array:
    """Returns for each pair whether half of the margin tells it."""
    return (distance < MARGIN / 2) == (is_same == 1)


def pairs(images: np.ndarray, labels: np.ndarray, number: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Returns pairs of images, of which half show the same digit, and 1 for those that do."""
    rng = np.random.default_rng(0)
    is_same = np.arange(number) % 2
    one = rng.integers(0, len(labels), number)
    other = [rng.choice(np.flatnonzero((labels == label) == same))
             for label, same in zip(labels[one], is_same, strict=True)]
    return (images[one], images[other]), is_same


def main() -> None:
    images, labels = load_digits().images.astype(np.float32)[..., None] / 16, load_digits().target
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0)
    siamese = Siamese()
    model = trainer.Model(siamese)
    model.compile(trainer.optimizers.Adam(2e-3), contrastive, metrics=[accuracy])
    test_pairs = pairs(test_images, test_labels, 2000)
    history = model.fit(
        *pairs(images, labels, 6000), batch_size=64, epochs=10, validation_data=test_pairs, verbose=2)
    history.plot().savefig("curves.png")

    known, unknown = (np.asarray(siamese.apply({"params": model.state.params}, part, method="embed"))
                      for part in (images, test_images))
    nearest = np.square(unknown[:, None] - known).sum(-1).argsort(-1)[:, :5]
    votes = (labels[nearest][..., None] == np.arange(10)).sum(1)
    print({**model.evaluate(*test_pairs, verbose=0),
           "accuracy_of_neighbours": float(np.mean(votes.argmax(-1) == test_labels))})


if __name__ == "__main__":
    main()
