"""Adapts a Transformer in NNX to other data by `trainer.lora`: small matrices beside its layers are trained alone.

The Transformer reads scikit-learn's digits row by row. It learns them as they are, and is then adapted to negatives of
mirrored ones: the file of its adapters is small, the weights of the base stay as they were, and `merge` gives a plain
model again. Hu et al., "LoRA: Low-rank adaptation of large language models", https://arxiv.org/abs/2106.09685.
"""

import pathlib
import tempfile

import jax
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer

RANK = 4


class Block(nnx.Module):
    """Attention and two dense layers, each added to its normalized inputs."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.query, self.key, self.value, self.out = (nnx.Linear(dim, dim, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], self.heads, -1)

        normal = self.attention_norm(x)
        attended = jax.nn.dot_product_attention(
            split(self.query(normal)), split(self.key(normal)), split(self.value(normal)))
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Logits of ten classes for images, whose rows are the tokens."""

    def __init__(self, side: int, rngs: nnx.Rngs, dim: int = 64, heads: int = 4, layers: int = 1):
        self.embedding = nnx.Linear(side, dim, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (side, dim)))
        self.blocks = nnx.List(Block(dim, heads, rngs) for _ in range(layers))
        self.norm, self.head = nnx.LayerNorm(dim, rngs=rngs), nnx.Linear(dim, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embedding(images) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def compile_model(model: trainer.Model) -> None:
    """Compiles a model of logits."""
    model.compile(trainer.optimizers.Adam(2e-3), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])


def main() -> None:
    images, labels = load_digits().images.astype(np.float32) / 16, load_digits().target
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0)
    others, other_test = 1 - images[..., ::-1], (1 - test_images[..., ::-1], test_labels)

    base = trainer.Model(Transformer(8, nnx.Rngs(0)))
    compile_model(base)
    base.fit(images, labels, batch_size=64, epochs=10, verbose=2)
    before = base.get_weights()

    model = trainer.lora(base, RANK, ["blocks"])  # all linear layers of the blocks
    compile_model(model)
    first = model.evaluate(*other_test, verbose=0)
    history = model.fit(others, labels, batch_size=64, epochs=15, validation_data=other_test, verbose=2)
    history.plot().savefig("curves.png")
    model.summary()
    last = model.evaluate(*other_test, verbose=0)

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "adapters.safetensors"
        model.save_adapters(path)  # a small file, for `load_adapters` of another model of the same base
        size = path.stat().st_size
    merged = model.merge()  # a model without adapters, with equal outputs
    difference = np.abs(merged.predict(other_test[0], verbose=0) - model.predict(other_test[0], verbose=0)).max()
    frozen = [weight.numpy() for weight in model.weights if not weight.trainable]
    same = all(any(np.array_equal(one, other) for other in frozen) for one in before)
    print({"loss_before": first["loss"], "loss_after": last["loss"], "accuracy_before": first["accuracy"],
           "accuracy_after": last["accuracy"], "base_is_unchanged": same, "merged_differs_by": float(difference),
           "trained_parameters": sum(weight.numpy().size for weight in model.trainable_weights),
           "parameters": model.count_params(), "bytes_of_adapters": size})


if __name__ == "__main__":
    main()
