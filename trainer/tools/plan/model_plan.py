"""`plan` and `explain`: the cost of a model's training, from its compiled step and its strategy's shardings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from trainer.core.ambient.notebook import print_table
from trainer.core.calls.entry_points import entry_point
from trainer.core.compile.hlo_text import Program
from trainer.core.types import PyTree
from trainer.data.sources.arrays import Batch
from trainer.distribute import Strategy
from trainer.distribute.placement.described import Topology, kind_of
from trainer.distribute.placement.gpu_kinds import NETWORK_BANDWIDTH
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.model import Model
from trainer.tools.plan.changes import changes_to_try
from trainer.tools.plan.planned_phase import PlannedPhase, host_batch, planned_phase, strategy_over, train_phase
from trainer.tools.plan.program_contents import collectives_of, host_transfers, kernels, traffic_bytes, unknown_loops
from trainer.tools.plan.report import Alternative, DeviceMemory, Plan
from trainer.tools.plan.roofline import COLLECTIVE_SECS, KERNEL_SECS, roofline, sent_rows
from trainer.tools.plan.state_report import StateReport, state_report

GROUPS_AHEAD = 2  # maximum number that `fit` places ahead, in addition to the group in use
_MOST_OF_MEMORY = 0.92  # a `XLA_PYTHON_CLIENT_MEM_FRACTION` that leaves room for CUDA, cuDNN and NCCL


@entry_point
def plan(
    model: Model, sample: PyTree, topology: Any = None, *, strategy: Strategy | None = None,
    batch_size: int | None = None, alternatives: bool | str = "auto", memory_fraction: float = 0.75,
    verbose: bool = True,
) -> Plan:
    """Prints and returns the cost of a train step on GPUs that may be absent; see docs/plan.md.

    JAX's CUDA plugin compiles it (`pip install 'trainer-jax[gpu-programs]'`); nothing of the model is allocated.

    Args:
      model: a compiled model.
      sample: the data of `fit`, or a single batch, whose leaves may be `jax.ShapeDtypeStruct`s.
      topology: the GPUs: "8xh100", or "2x8xh200" for two hosts with eight GPUs each. The strategy is recreated over
        them; by default, its own devices must be described devices.
      strategy: the strategy; by default the model's.
      batch_size: rows per batch over all replicas, if `sample` is all rows of arrays; by default they are a single
        batch.
      alternatives: whether to compile and list changes too; "auto" does so if the step does not fit.
      memory_fraction: the fraction of a GPU's memory that JAX allocates: `XLA_PYTHON_CLIENT_MEM_FRACTION`.
      verbose: whether to print the plan.

    Raises:
      ImportError: if the plugin is not installed.
      RuntimeError: if the model is not compiled.
      ValueError: for a topology that does not suit the strategy, or data that the model cannot take.

    Example:
      >>> trainer.plan(model, (x, y), "8xh100", strategy=trainer.distribute.FullyShardedStrategy())  # doctest: +SKIP
    """
    core_of(model).checked("plan")
    if alternatives not in (True, False, "auto"):
        raise ValueError(f"`alternatives` must be True, False or 'auto'. Received: {alternatives!r}.")
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"`memory_fraction` must be above 0 and at most 1. Received: {memory_fraction!r}.")
    strategy = strategy or model.strategy
    found = _topology_of(strategy) if topology is None else Topology.of(topology)
    described = strategy if topology is None else strategy_over(strategy, found)
    batch = host_batch(sample, batch_size)
    planned = _plan(model, described, batch, found, memory_fraction)
    if alternatives is True or (alternatives == "auto" and not planned.fits):
        rows = tuple(_alternatives(model, described, batch, found, planned))
        planned = dataclasses.replace(planned, alternatives=rows)
    if verbose:
        print_table(str(planned))
    return planned


def explain(model: Model, strategy: Strategy, sample: PyTree, batch: PyTree) -> StateReport:
    """Prints and returns the report of `Strategy.explain`."""
    title = f"{model.name} under {strategy!r}"
    if batch is None:
        found = state_report(title, strategy, model.state_shapes(sample))
    else:
        core_of(model).checked("explain")
        train = train_phase(model, strategy, batch)
        found = dataclasses.replace(
            state_report(title, strategy, train.state), peak_bytes=train.peak_bytes,
            temporary_bytes=int(train.compiled.memory_analysis().temp_size_in_bytes),
            step_flops=train.phase.step_flops, partitioned_because=train.phase.partitioned_because)
    print_table(str(found))
    return found


def _plan(model: Model, strategy: Strategy, batch: Batch, topology: Topology, memory_fraction: float,
          **changes: Any) -> Plan:
    train = planned_phase(model, strategy, "train", batch, **changes)
    steps, cost = train.phase.steps_per_execution, train.phase.step_cost
    assert cost is not None, "a described step is counted by its trace"
    executed = _executed_steps(train.program, steps)
    devices = strategy.mesh.devices.size
    collectives = collectives_of(train.program, devices)
    moved, launched = traffic_bytes(train.program) / executed, kernels(train.program) / executed
    per_device = strategy.num_replicas_in_sync / devices
    products = {dtype: flops * per_device for dtype, flops in cost.products.items()}
    rows = jax.tree.leaves(batch)[0].shape[0]
    return Plan(
        model=model.name, strategy=_strategy_text(strategy), topology=str(topology), device=topology.gpu.name,
        num_devices=devices, num_replicas=strategy.num_replicas_in_sync, batch_rows=rows, fused_steps=steps,
        memory=_memory(train, strategy, batch), device_bytes=topology.gpu.memory_bytes,
        memory_fraction=memory_fraction, collectives=sent_rows(collectives, topology, executed, strategy.mesh.shape),
        flops=cost.flops * per_device, product_flops=products, traffic_bytes=moved,
        kernels=launched, roofline=roofline(products, moved, launched, collectives, topology, executed),
        unknown_loops=len(unknown_loops(train.program)), host_transfers=len(host_transfers(train.program)),
        assumptions=_assumptions(topology, devices, strategy))


def _executed_steps(program: Program, steps: int) -> int:
    """Returns the number of steps that the text covers: a loop of unknown length counts as a single step."""
    return steps if any(loop.trip_count == steps for loop in program.loops) else 1


def _memory(train: PlannedPhase, strategy: Strategy, batch: Batch) -> DeviceMemory:
    state, stats = train.state, train.compiled.memory_analysis()
    size = state_report("", strategy, state)
    steps = train.phase.steps_per_execution
    group = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((steps, *leaf.shape), leaf.dtype), batch)
    batches = sum(_batch_bytes(leaf, strategy) for leaf in jax.tree.leaves(group))
    # Unused data are not arguments of the program.
    held = size.parameter_bytes + size.optimizer_bytes + size.model_state_bytes
    others = max(stats.argument_size_in_bytes - held - batches, 0)
    return DeviceMemory(
        parameters=size.parameter_bytes, optimizer_state=size.optimizer_bytes, model_state=size.model_state_bytes,
        batches=batches, other_arguments=others, temporary=stats.temp_size_in_bytes,
        results=max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0), batches_ahead=GROUPS_AHEAD * batches,
        gradients=size.gradient_bytes)


def _batch_bytes(leaf: jax.ShapeDtypeStruct, strategy: Strategy) -> int:
    replicas = strategy.num_replicas_in_sync
    shape = (leaf.shape[0], -(-leaf.shape[1] // replicas), *leaf.shape[2:])
    return int(np.prod(shape)) * jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize


def _strategy_text(strategy: Strategy) -> str:
    is_mesh = len(strategy.mesh.axis_names) > 1
    return f"{type(strategy).__name__}({dict(strategy.mesh.shape) if is_mesh else ''})"


def _assumptions(topology: Topology, devices: int, strategy: Strategy) -> tuple[str, ...]:
    gpu = topology.gpu
    peaks = ", ".join(f"{peak / 1e12:.4g} TFLOP/s in {dtype}" for dtype, peak in gpu.peak_flops.items()
                      if dtype in ("float32", "tensorfloat32", "bfloat16"))
    lines = [
        f"Peak rates, which no program reaches throughout: {peaks}; {gpu.memory_bandwidth / 1e12:.3g} TB/s of memory.",
        f"A kernel takes {KERNEL_SECS * 1e6:g} us at least.",
        "float32 products are computed as tensorfloat32, JAX's default precision on these GPUs.",
        "Memory traffic: each kernel reads its operands once and writes its results once; caches are left aside.",
        "No autotuning, which needs a GPU: other kernels may be picked there, with workspaces of their own.",
        f"Batches are sent from the host, {GROUPS_AHEAD} executions ahead. Arrays that `fit` keeps on the devices "
        "(`data_on_device`) come on top.",
        "The rest of the memory is CUDA's, cuDNN's and NCCL's."]
    if devices > 1:
        lines.insert(3, f"Rings over NVLink at {gpu.link_bandwidth / 1e9:g} GB/s in each direction" + (
            f", and between hosts over a network adapter of {NETWORK_BANDWIDTH / 1e9:g} GB/s for each GPU."
            if topology.hosts > 1 else ".") + " Collectives with kernels beside them are hidden by these."
            f" Each takes {COLLECTIVE_SECS * 1e6:g} us at least.")
    if devices > strategy.num_replicas_in_sync:
        lines.append("The devices of a replica share its operations evenly.")
    return tuple(lines)


def _alternatives(model: Model, strategy: Strategy, batch: Batch, topology: Topology,
                  planned: Plan) -> Iterator[Alternative]:
    if planned.memory_fraction < _MOST_OF_MEMORY:
        fits = planned.memory.peak <= planned.device_bytes * _MOST_OF_MEMORY
        yield Alternative(f"XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST_OF_MEMORY}", planned.memory.peak, fits,
                          planned.roofline.step)
    for change in changes_to_try(model, strategy, batch, topology):
        try:
            found = _plan(model, change.strategy or strategy, batch if change.batch is None else change.batch,
                          topology, planned.memory_fraction, **change.options)
        except Exception as error:  # any error becomes a row of the table
            yield Alternative(change.text, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}")
        else:
            yield Alternative(change.text, found.memory.peak, found.fits, found.roofline.step)


def _topology_of(strategy: Strategy) -> Topology:
    """Returns the topology of a strategy over described devices."""
    devices = list(strategy.mesh.devices.flat)
    kind = kind_of(devices[0])
    if not strategy.is_described or kind is None:
        raise ValueError(f"`plan` needs `topology`, such as '8xh100': the devices of {strategy!r} are there, or of an "
                         "unknown kind.")
    per_host = [len(list(group)) for _, group in itertools.groupby(devices, lambda device: device.process_index)]
    return Topology(len(per_host), per_host[0], kind)
