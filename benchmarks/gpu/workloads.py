"""The large models, and the costs of their steps. A tiny workload has a small model of the same kind.

Light on purpose, as the parent of all workers imports it: JAX is imported where a model is made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

LARGE_MEMORY = 40e9  # bytes of a device from which on it takes the whole batch, beside two other processes


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The sizes of a language model."""

    vocabulary: int
    tokens: int
    width: int
    depth: int
    heads: int

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations that a model needs to train on a token; recomputation does not count.

        Source: Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B. The table of tokens is the
        output layer, and counts as that.
        """
        weights = 12 * self.depth * self.width**2 + self.vocabulary * self.width
        return 6 * weights + 12 * self.depth * self.width * self.tokens


GPT2_SMALL, TINY_LM = Transformer(50257, 1024, 768, 12, 12), Transformer(64, 16, 16, 1, 2)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its optimizer and synthetic data that stay on the devices, in mixed bfloat16.

    Attributes:
      model: "mobilenet_v2", "resnet50" or "gpt2".
      rows_per_device: of a batch.
      steps: batches of an epoch.
      tiny: whether a small model stands in for it.
      replicas: how many devices there are.
    """

    model: str
    rows_per_device: int
    steps: int
    tiny: bool = False
    replicas: int = 1

    @property
    def transformer(self) -> Transformer | None:
        """The sizes of a language model; None for a model of images."""
        return (TINY_LM if self.tiny else GPT2_SMALL) if self.model == "gpt2" else None

    @property
    def side(self) -> int:
        """Pixels of an image's side."""
        return 32 if self.tiny else 224

    @property
    def classes(self) -> int:
        """How many classes images have."""
        return 10 if self.tiny else 1000

    def module(self, dtype: Any = None) -> Any:
        """Returns the Linen module, which gives logits; its layers compute in `dtype`."""
        from trainer import models

        if (sizes := self.transformer) is not None:
            return models.TransformerLM(sizes.vocabulary, sizes.depth, sizes.width, sizes.heads, sizes.tokens,
                                        dtype=dtype)
        options = {"num_classes": self.classes, "classifier_activation": None, "dtype": dtype}
        if self.tiny:
            from trainer.models.vision.resnet import ResNet

            return ResNet(blocks=(1,), bottleneck=self.model == "resnet50", **options)
        return {"mobilenet_v2": models.MobileNetV2, "resnet50": models.ResNet50}[self.model](**options)

    def optimizer(self) -> Any:
        """Returns the optax transformation."""
        import optax

        return optax.adamw(1e-4) if self.transformer else optax.sgd(1e-3, momentum=0.9)

    @property
    def has_accuracy(self) -> bool:
        """Whether the accuracy is computed, beside the loss."""
        return self.transformer is None

    def batch_size(self) -> int:
        """Returns the rows of a batch over all devices of this process: fewer rows on devices with little memory."""
        import jax

        device = jax.local_devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit", LARGE_MEMORY)
        return jax.device_count() * max(1, self.rows_per_device // (1 if memory >= LARGE_MEMORY else 4))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels of an epoch; all devices have the same rows."""
        batch_size = self.batch_size()
        import jax

        copies, rng = jax.device_count(), np.random.default_rng(0)
        rows = batch_size * self.steps // copies
        if (sizes := self.transformer) is not None:
            tokens = rng.integers(0, sizes.vocabulary, (rows, sizes.tokens + 1)).astype(np.int32)
            x, y = tokens[:, :-1], tokens[:, 1:]
        else:
            x = rng.random((rows, self.side, self.side, 3), np.float32)
            y = rng.integers(0, self.classes, rows).astype(np.int32)
        return (np.concatenate([x] * copies), np.concatenate([y] * copies)) if copies > 1 else (x.copy(), y.copy())
