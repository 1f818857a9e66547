"""Plans of language models on H100s, which need not be there: memory, traffic, collectives and least time of a step.

    pip install 'trainer-jax[gpu-programs]'
    python benchmarks/large_models.py            # all rows, some ten minutes of CPU time
    python benchmarks/large_models.py gpt2       # those whose name begins so
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

import trainer
from trainer import distribute, models

GIB = 2**30
VOCABULARY = 50257


def gpt2(**options: Any) -> models.TransformerLM:
    return models.TransformerLM(VOCABULARY, **options)


def gpt_1b(**options: Any) -> models.TransformerLM:
    """GPT-3 XL: Brown et al., "Language models are few-shot learners", 2020."""
    return models.TransformerLM(VOCABULARY, num_layers=24, d_model=2048, num_heads=16, max_len=2048, **options)


def llama_7b(**options: Any) -> models.Llama:
    return models.Llama2_7B(max_len=4096, **options)


def on_meshes(topology: str, devices: int) -> dict[str, Any]:
    """Returns the arguments of rows that differ in their mesh."""
    meshes = {"shard": None, "replica x shard": {"replica": 2, "shard": devices // 2},
              "shard x model": {"shard": devices // 2, "model": 2}}
    return {f"7b {topology} {name}": (llama_7b, {"logits_chunk_size": 512}, 2 * devices, topology, shape)
            for name, shape in meshes.items()}


def rows() -> dict[str, Any]:
    """Returns the module, its options, the rows of a batch, the topology and the mesh of each row, by name."""
    found: dict[str, Any] = {}
    for name, module, rows_of_batch, topology, chunk in (
            ("gpt2", gpt2, 8, "1xh100", 128), ("1.3b", gpt_1b, 64, "8xh100", 256),
            ("7b 8xh100", llama_7b, 16, "8xh100", 512)):
        for text, options in (("scores and logits stored", {"attention": "xla"}), ("cuDNN's attention", {}),
                              ("and logits in chunks", {"logits_chunk_size": chunk})):
            found[f"{name}: {text}"] = (module, options, rows_of_batch, topology, None)
    return found | on_meshes("8xh100", 8) | on_meshes("2x8xh100", 16)


def planned(module: Any, options: dict[str, Any], batch: int, topology: str, mesh: dict[str, int] | None) -> Any:
    """Returns the plan of a step in bfloat16 with AdamW; the 7 B model recomputes its activations."""
    module = module(**options)
    devices = distribute.described_devices(topology)
    if mesh and "model" in mesh:
        strategy = distribute.ModelParallelStrategy(mesh, devices, models.layout_map(module, "model"))
    else:
        strategy = distribute.FullyShardedStrategy(devices, mesh_shape=mesh)
    model = trainer.Model(module)
    model.compile("adamw", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=1,
                  precision="mixed_bfloat16", remat="nothing_saveable" if isinstance(module, models.Llama) else False)
    tokens = jax.ShapeDtypeStruct((batch, module.max_len), jnp.int32)
    return strategy.plan(model, (tokens, tokens), verbose=False, alternatives=False)


def main() -> None:
    chosen = tuple(sys.argv[1:]) or ("",)
    for name, arguments in rows().items():
        if not name.startswith(chosen):
            continue
        plan = planned(*arguments)
        memory, least = plan.memory, plan.roofline
        compute, traffic, step = (1e3 * secs for secs in (least.compute, least.memory, least.step))
        print(f"{name}: temporary {memory.temporary / GIB:.1f} GiB, peak {memory.peak / GIB:.1f} GiB; at least "
              f"{compute:.1f} ms of compute, {traffic:.1f} ms of memory, {step:.1f} ms")
        for row in plan.collectives:
            print(f"    {row.kind} over {row.axes or row.devices}, hosts {row.hosts}: {row.sent_bytes / GIB:.1f} GiB, "
                  f"{1e3 * row.secs:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
