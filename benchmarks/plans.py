"""Plans of known models on 8 H100s: prints the table of docs/plan.md. Needs the extra "gpu-programs".

Each model is planned under three strategies, and compiled in a process of its own, as a program of 7 billion
parameters takes some memory to compile. `python benchmarks/plans.py MODEL STRATEGY` prints a single plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import trainer
from trainer import distribute, models
from trainer.core.tree_paths import named_leaves
from trainer.core.units import readable_bytes
from trainer.tools.plan.report import readable_secs

TOPOLOGY = "8xh100"
STRATEGIES = ("MirroredStrategy", "FullyShardedStrategy", "ModelParallelStrategy")
_TOKENS, _IMAGES = jnp.int32, jnp.float32
_CROSS_ENTROPY = {"loss": trainer.losses.SparseCategoricalCrossentropy(from_logits=True), "precision": "mixed_bfloat16"}
# Of transformers as in Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
# Parallelism" (2019): into a block by columns, out of it by rows. The table of tokens is split by its features.
_MEGATRON = {".*/(query|key|value|mlp_in)/kernel": (None, "model"), ".*/(out|mlp_out)/kernel": ("model", None),
             "(token|position)_embedding/embedding": (None, "model")}


class Case:
    """A model, its batch, and how it is compiled and split.

    Args:
      name: its name in the table.
      module: the module.
      batch: the shapes of `(x, y)`, and the dtype of `x`.
      optimizer: as of `compile`.
      model_axis: over how many devices ModelParallelStrategy splits it.
      layout: its layout map; None splits kernels of convolutions by their outputs.
      **options: of `compile`.
    """

    def __init__(self, name: str, module: Any, batch: tuple[Any, Any, Any], optimizer: str, model_axis: int,
                 layout: dict[str, Any] | None = None, **options: Any):
        x, y, dtype = batch
        self.name, self.rows, self.options = name, x[0], options
        self._sample = jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(y, jnp.int32)
        self._model = trainer.Model(module, name=name)
        self._model.compile(optimizer, **_CROSS_ENTROPY, **options)
        self._model_axis, self._layout = model_axis, layout

    def plan(self, strategy: str) -> Any:
        """Returns the plan of the model under a strategy."""
        devices = distribute.described_devices(TOPOLOGY)
        if strategy != "ModelParallelStrategy":
            return getattr(distribute, strategy)(devices).plan(
                self._model, self._sample, alternatives=False, verbose=False)
        layout = self._layout or {path: (*[None] * (len(leaf.shape) - 1), "model") for path, leaf in self._params()
                                  if len(leaf.shape) == 4 and leaf.shape[-1] % self._model_axis == 0}
        shape = {"replica": len(devices) // self._model_axis, "model": self._model_axis}
        return distribute.ModelParallelStrategy(shape, devices, layout).plan(
            self._model, self._sample, alternatives=False, verbose=False)

    def _params(self) -> Any:
        rows = jnp.zeros((1, *self._sample[0].shape[1:]), self._sample[0].dtype)
        return named_leaves(self._model.state_shapes(rows).params).items()


def cases() -> dict[str, Case]:
    """Returns the models by the names that the command line knows."""
    images = ((1024, 224, 224, 3), (1024,), _IMAGES)
    return {
        "mobilenet_v2": Case("MobileNetV2", models.MobileNetV2(num_classes=1000), images, "sgd", 2),
        "resnet50": Case("ResNet-50", models.ResNet50(num_classes=1000), images, "sgd", 2),
        "gpt2": Case("GPT-2 small", models.TransformerLM(vocab_size=50257), ((64, 1024), (64, 1024), _TOKENS), "adamw",
                     2, _MEGATRON),
        "1.3b": Case("1.3 B transformer", models.TransformerLM(
            vocab_size=50304, num_layers=24, d_model=2048, num_heads=16, max_len=2048),
            ((16, 2048), (16, 2048), _TOKENS), "adamw", 8, _MEGATRON, remat=True),
        "7b": Case("7 B transformer", models.TransformerLM(
            vocab_size=50304, num_layers=32, d_model=4096, num_heads=32, max_len=2048),
            ((8, 2048), (8, 2048), _TOKENS), "adamw", 8, _MEGATRON, remat=True),
    }


def row(name: str, strategy: str) -> str:
    """Returns a line of the table."""
    command = [sys.executable, __file__, name, strategy, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    case, plan = cases()[name], json.loads(done.stdout)
    memory, roofline = plan["memory"], plan["roofline"]
    sent = sum(each["sent_bytes"] for each in plan["collectives"])
    count = sum(each["times"] for each in plan["collectives"])
    held = memory["parameters"] + memory["optimizer_state"] + memory["model_state"]
    options = "".join(f", `{key}={value}`" for key, value in case.options.items())
    return (f"| {case.name}, {case.rows} rows{options} | `{plan['strategy']}` | {readable_bytes(held)} | "
            f"{readable_bytes(memory['temporary'])} | {readable_bytes(memory['peak'])} | "
            f"{'yes' if plan['fits'] else 'no'} | {readable_bytes(round(sent))} in {count:g} | "
            f"{plan['flops'] / 1e12:.3g} T | {plan['fused_steps']} | {readable_secs(roofline['step'])} | "
            f"{roofline['bound']} |")


def main() -> None:
    """Prints the table, or a single plan."""
    if len(sys.argv) > 2:
        plan = cases()[sys.argv[1]].plan(sys.argv[2])
        print(json.dumps(plan.to_dict()) if "--json" in sys.argv else plan)
        return
    print(f"""\
Plans of a train step on {TOPOLOGY}, with `precision="mixed_bfloat16"`, AdamW for the transformers and SGD for the other
models, by `python benchmarks/plans.py` (jax {jax.__version__}):

| Model and batch | Strategy | State | Temporary | Peak | Fits | Sent in a step | FLOP | Fused | Least step | Bound by |
|---|---|---|---|---|---|---|---|---|---|---|""", flush=True)
    for name in cases():
        for strategy in STRATEGIES:
            print(row(name, strategy), flush=True)
    print("""
Bytes, operations and times are per device. *Fits* means 75 % of 79.1 GiB, which JAX takes by default. The table names
the mesh of `ModelParallelStrategy`; transformers are split as in Megatron-LM, the other models by the outputs of their
convolutions.""")


if __name__ == "__main__":
    main()
