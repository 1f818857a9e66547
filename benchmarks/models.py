"""The models of the benchmarks in Flax: Linen's, and in NNX the MLPs and the CNN of Flax's guide."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from cases import Workload
from flax import linen as nn
from flax import nnx

# Expansion, channels, blocks and stride of each stage: table 2 of Sandler et al., "MobileNetV2" (2018).
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class MLP(nn.Module):
    """One hidden layer."""

    hidden: int
    classes: int

    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(self.classes)(nn.relu(nn.Dense(self.hidden)(x)))


class MobileNetV2(nn.Module):
    """Inverted residual blocks, with BatchNorm after each convolution."""

    classes: int

    @nn.compact
    def __call__(self, x, training=False):
        def conv(x, channels, kernel=1, stride=1, groups=1, activation=nn.relu6):
            x = nn.Conv(channels, (kernel, kernel), stride, feature_group_count=groups, use_bias=False)(x)
            return activation(nn.BatchNorm(use_running_average=not training, momentum=0.999, epsilon=1e-3)(x))

        x = conv(x, 32, kernel=3, stride=2)
        for expansion, channels, blocks, stride in _STAGES:
            for index in range(blocks):
                shortcut, wide = x, expansion * x.shape[-1]
                if expansion > 1:
                    x = conv(x, wide)
                x = conv(x, wide, kernel=3, stride=1 if index else stride, groups=wide)
                x = conv(x, channels, activation=lambda x: x)
                if index:
                    x += shortcut
        return nn.Dense(self.classes)(conv(x, 1280).mean((1, 2)))


class LanguageModel(nn.Module):
    """A causal transformer."""

    vocabulary: int
    width: int = 128
    layers: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, tokens, training=False):
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x += nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x += nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


class NNXMLP(nnx.Module):
    """Two dense layers."""

    def __init__(self, features: int, hidden: int, classes: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(features, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class GuideCNN(nnx.Module):
    """The model of "MNIST tutorial", the first guide of Flax's NNX."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(32, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025)
        self.linear2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        return self.linear2(nnx.relu(self.dropout2(self.linear1(x.reshape(len(x), -1)), rngs=rngs)))


def linen(workload: Workload) -> nn.Module:
    """Returns the Linen module of a workload; all give logits."""
    classes = workload.classes
    if workload.model in ("cnn", "small_cnn"):
        # Here, so that no other loop by hand has the trainer in its process.
        from trainer.models import CNN

        width = 16 if workload.model == "small_cnn" else 32
        return CNN(classes, features=(width, 2 * width), hidden=4 * width, classifier_activation=None)
    return {
        "mlp": lambda: MLP(128, classes),
        "small_mlp": lambda: MLP(8, classes),
        "mobilenet": lambda: MobileNetV2(classes),
        "lm": lambda: LanguageModel(classes),
    }[workload.model]()


def new_nnx(workload: Workload) -> nnx.Module:
    """Returns the NNX module of a workload with an MLP."""
    features, hidden = {"mlp": (784, 128), "small_mlp": (8, 8)}[workload.model]
    return NNXMLP(features, hidden, workload.classes, nnx.Rngs(0))
