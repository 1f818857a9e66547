"""The language model in PyTorch: `torch.compile`, bfloat16, attention that stores no scores. Needs no trainer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Unavailable
from gpu.workloads import Workload
from loops_torch import LanguageModel
from torch.nn import functional


def compiled(workload: Workload) -> Callable[[int], dict[str, float]]:
    """Compiles forward pass and loss, and so the backward pass; the optimizer is fused. Batches are on the GPU."""
    if not torch.cuda.is_available():
        raise Unavailable("PyTorch sees no GPU")
    sizes, size = workload.transformer, workload.batch_size()
    assert sizes is not None, "a language model"
    torch.set_float32_matmul_precision("high")  # TF32, as in JAX
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = LanguageModel(sizes.vocabulary, sizes.tokens, sizes.width, sizes.depth, sizes.heads)
        module.head = torch.nn.Linear(sizes.width, sizes.vocabulary, bias=False)
    torch.nn.init.normal_(module.embed.weight, std=0.02)
    module.head.weight = module.embed.weight
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, weight_decay=1e-4, fused=True)
    x, y = (torch.from_numpy(tokens).long().cuda().split(size) for tokens in workload.data())

    @torch.compile
    def loss_of(x, y):
        with torch.autocast("cuda", torch.bfloat16):
            logits = module(x)
        return functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def run(epochs):
        for _ in range(epochs):
            losses = []
            for batch in zip(x, y, strict=True):
                optimizer.zero_grad()
                loss = loss_of(*batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.stack(losses).mean().item()
        steps = epochs * len(x)
        return {"steps": steps, "rows": steps * size, "peak_megabytes": torch.cuda.max_memory_allocated() / 1e6}

    return run
