"""Adapts a Transformer in NNX to other data by LoRA: small matrices beside its layers are trained, and nothing else.

The Transformer reads scikit-learn's digits row by row. It learns them as they are, and is then adapted to negatives
of mirrored ones. Hu et al., "LoRA: Low-rank adaptation of large language models", https://arxiv.org/abs/2106.09685.
"""

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


def add_lora(module: Transformer, rngs: nnx.Rngs) -> None:
    """Puts LoRA's matrices beside the linear layers of each block."""
    for block in module.blocks:
        for name in ("query", "key", "value", "out", "up", "down"):
            layer = getattr(block, name)
            setattr(block, name, nnx.LoRA(layer.in_features, RANK, layer.out_features, base_module=layer, rngs=rngs))


def weights(module: nnx.Module, of: nnx.filterlib.Filter) -> list[np.ndarray]:
    """Returns copies of some of a module's weights."""
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(module, of))]


def compiled(module: nnx.Module, freeze: list[str] | None = None) -> trainer.Model:
    """Returns a model of logits, compiled."""
    model = trainer.Model(module)
    model.compile(trainer.optimizers.Adam(2e-3), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"], freeze=freeze)
    return model


def main() -> None:
    images, labels = load_digits().images.astype(np.float32) / 16, load_digits().target
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0)
    others, other_test = 1 - images[..., ::-1], (1 - test_images[..., ::-1], test_labels)

    transformer = Transformer(8, nnx.Rngs(0))
    compiled(transformer).fit(images, labels, batch_size=64, epochs=10, verbose=2)

    add_lora(transformer, nnx.Rngs(1))
    base = nnx.Not(nnx.LoRAParam)
    before = weights(transformer, base)
    model = compiled(transformer, freeze=["^(?!.*/lora_).*$"])  # all paths without "/lora_"
    first = model.evaluate(*other_test, verbose=0)
    model.fit(others, labels, batch_size=64, epochs=15, verbose=2)
    model.summary()
    last = model.evaluate(*other_test, verbose=0)

    same = all(np.array_equal(one, other) for one, other in zip(before, weights(transformer, base), strict=True))
    count = sum(array.size for array in weights(transformer, nnx.LoRAParam))
    print({"loss_before": first["loss"], "loss_after": last["loss"], "accuracy_before": first["accuracy"],
           "accuracy_after": last["accuracy"], "base_is_unchanged": same, "trained_parameters": count,
           "parameters": model.count_params()})


if __name__ == "__main__":
    main()
