"""PyTorch on CPUs: eager, compiled, and under Lightning. Needs neither JAX nor the trainer.

The packages `torch` and `lightning` may be in another environment, whose interpreter `TORCH_PYTHON` names.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import torch
from cases import Unavailable, Workload
from torch import nn
from torch.nn import functional

OPTIMIZERS = {"Adam": {}, "fused Adam": {"fused": True}}  # the faster one counts


class LanguageModel(nn.Module):
    """A causal transformer."""

    def __init__(self, vocabulary: int, tokens: int, width: int = 128, depth: int = 2, heads: int = 4):
        super().__init__()
        self.heads, self.depth = heads, depth
        self.embed, self.embed_position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
            for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens) + self.embed_position.weight
        for index in range(self.depth):
            split = self.inner[index](self.norms[2 * index](x)).unflatten(-1, (3, self.heads, -1)).movedim(-2, 1)
            attended = functional.scaled_dot_product_attention(*split.unbind(3), is_causal=True)
            x = x + self.outer[index](attended.transpose(1, 2).flatten(2))
            x = x + self.mlps[index](self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x))


def new_module(workload: Workload) -> nn.Module:
    """Returns the module of a workload, which gives logits."""
    def cnn(width: int, side: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2 * width * (side // 4) ** 2, 4 * width), nn.ReLU(), nn.Linear(4 * width, workload.classes))

    def mlp(features: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, workload.classes))

    torch.manual_seed(0)
    return {"mlp": lambda: mlp(784, 128), "small_mlp": lambda: mlp(8, 8), "small_cnn": lambda: cnn(16, 8),
            "cnn": lambda: cnn(32, 28), "lm": lambda: LanguageModel(workload.classes, 64)}[workload.model]()


def data_of(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and labels; images are channels first, as PyTorch takes them."""
    if os.environ["BENCHMARK_PLATFORM"] != "cpu":
        raise Unavailable("compared on CPUs alone")
    torch.set_num_threads(os.cpu_count() or 1)
    x, y = workload.data()
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2).copy()
    return torch.from_numpy(x), torch.from_numpy(y).long()


def loss_and_accuracy(logits, y):
    """Returns the mean loss and the accuracy of a batch."""
    logits, y = logits.flatten(0, -2), y.flatten()
    return functional.cross_entropy(logits, y), (logits.detach().argmax(-1) == y).float().mean()


def eager(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Gathers each batch, and calls forward, backward and the optimizer; the logs of an epoch are read at its end."""
    return _loops(workload, lambda forward: forward)


def compiled(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Is `eager` with the forward pass, and so the backward pass, by `torch.compile`."""
    return _loops(workload, torch.compile)


def _loops(workload: Workload, compiler: Callable) -> dict[str, Callable[[int], int]]:
    x, y = data_of(workload)

    def candidate(options):
        module = new_module(workload)
        optimizer = torch.optim.Adam(module.parameters(), **options)
        compute = compiler(functools.partial(_forward, module))

        def run(epochs):
            for _ in range(epochs):
                logs = torch.zeros(2)
                for rows in torch.randperm(workload.rows).split(workload.batch_size):
                    optimizer.zero_grad()
                    loss, accuracy = compute(x[rows], y[rows])
                    loss.backward()
                    optimizer.step()
                    logs += torch.stack((loss.detach(), accuracy))
                (logs / workload.steps).tolist()
            return epochs * workload.steps

        return run

    return {name: candidate(options) for name, options in OPTIMIZERS.items()}


def lightning(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Fits a LightningModule from a `DataLoader`, without checkpoints, loggers and a bar."""
    from lightning import pytorch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dataset = torch.utils.data.TensorDataset(*data_of(workload))
    loader = torch.utils.data.DataLoader(dataset, workload.batch_size, shuffle=True)

    class Module(pytorch.LightningModule):
        def __init__(self, options):
            super().__init__()
            self.module, self.options = new_module(workload), options

        def training_step(self, batch, _):
            loss, accuracy = _forward(self.module, *batch)
            self.log_dict({"loss": loss, "accuracy": accuracy}, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), **self.options)

    def candidate(options):
        module = Module(options)

        def run(epochs):
            pytorch.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False).fit(module, loader)
            return epochs * workload.steps

        return run

    return {name: candidate(options) for name, options in OPTIMIZERS.items()}


def _forward(module: nn.Module, x, y):
    return loss_and_accuracy(module(x), y)
