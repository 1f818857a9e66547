"""A model's step, compiled for GPUs that need not be there: `strategy.plan(model, sample, topology)`.

Owns how a model and its strategy are made again over described devices, and which changes are tried where a step does
not fit. Nothing is allocated: the state is known by its shapes alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np

from trainer.compile.compiler_options import CompilerOptions
from trainer.compile.cost_analysis import peak_bytes
from trainer.compile.hlo_text import Program
from trainer.compile.jit import compile_lowered
from trainer.compile.program_contents import collectives_of, host_transfers, kernels, traffic_bytes, unknown_loops
from trainer.core import precision
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.data.sources.batches import Batch
from trainer.distribute import FullyShardedStrategy, ModelParallelStrategy, Strategy
from trainer.distribute.placement.described import EXTRA, Topology, described_devices
from trainer.distribute.placement.gpu_kinds import GPU_KINDS, NETWORK_BANDWIDTH
from trainer.distribute.placement.placement import REPLICA_AXIS
from trainer.distribute.strategies import explain
from trainer.distribute.strategies.fully_sharded import ShardedStrategy
from trainer.loop.run_context import RunContext
from trainer.model import inputs
from trainer.model.current_run import CurrentRun
from trainer.model.loop_model import LoopModel
from trainer.model.overridable_steps import OverridableSteps
from trainer.model.state_holder import StateHolder, first_rows
from trainer.step.compiled_phase import CompiledPhase
from trainer.step.planning.report import Alternative, DeviceMemory, Plan
from trainer.step.planning.roofline import KERNEL_SECS, roofline, sent_rows

if TYPE_CHECKING:
    from trainer.model.model import Model
    from trainer.model.stateful_model import StatefulModel

# There is no GPU to time kernels on. Only these programs are compiled so.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}
GROUPS_AHEAD = 2  # that `fit` has placed, at most, beside the group in use
_MOST_OF_MEMORY = 0.92  # a `XLA_PYTHON_CLIENT_MEM_FRACTION` that leaves room for CUDA, cuDNN and NCCL
_MICROBATCHES = (2, 4, 8)


class PlannedPhase(NamedTuple):
    """A phase of a model, compiled for described devices.

    Attributes:
      phase: the phase.
      state: the shapes of the state.
      compiled: the `jax.stages.Compiled` of an execution.
      program: its text.
    """

    phase: CompiledPhase
    state: TrainState
    compiled: Any
    program: Program


class _Change(NamedTuple):
    """Another way to train.

    Attributes:
      text: as a user would write it.
      options: arguments of `compile`.
      strategy: another strategy; None for the same.
      batch: another batch; None for the same.
    """

    text: str
    options: Mapping[str, Any] = {}
    strategy: Strategy | None = None
    batch: Any = None


def plan(
    model: StatefulModel, strategy: Strategy, sample: Any, topology: Any, batch_size: int | None,
    alternatives: bool | str, memory_fraction: float, verbose: bool,
) -> Plan:
    """Returns the plan that `Strategy.plan` describes."""
    model._configuration.require_compiled("plan")
    if alternatives not in (True, False, "auto"):
        raise ValueError(f"`alternatives` must be True, False or 'auto'. Received: {alternatives!r}.")
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"`memory_fraction` must be above 0 and at most 1. Received: {memory_fraction!r}.")
    found = _topology_of(strategy) if topology is None else Topology.of(topology)
    described = strategy_over(strategy, found) if topology is not None else strategy
    batch = inputs.sample_batch(_host_arrays(sample), batch_size)
    planned = _plan(model, described, batch, found, memory_fraction)
    if alternatives is True or (alternatives == "auto" and not planned.fits):
        rows = tuple(_alternatives(model, described, batch, found, planned))
        planned = dataclasses.replace(planned, alternatives=rows)
    if verbose:
        print(planned)
    return planned


def state_and_step(model: StatefulModel, strategy: Strategy, batch: Any) -> tuple[TrainState, explain.StepSize]:
    """Returns the shapes of a model's state, and what a train step takes of one device.

    Args:
      model: a compiled model, made under any strategy. It stays as it is.
      strategy: the strategy, over devices that are there or described.
      batch: one batch over all replicas, of arrays or shapes.
    """
    model._configuration.require_compiled("explain")
    _check_is_synchronous(strategy)
    train = planned_phase(model, strategy, "train", inputs.sample_batch(_host_arrays(batch), None))
    temporary = int(train.compiled.memory_analysis().temp_size_in_bytes)
    return train.state, explain.StepSize(
        peak_bytes(train.compiled), temporary, train.phase.step_flops, train.phase.partitioned_because)


def strategy_over(strategy: Strategy, topology: Any) -> Strategy:
    """Returns a strategy of the same kind over the devices of a topology.

    Raises:
      ValueError: if the strategy is asynchronous, or cannot use so many devices.
    """
    _check_is_synchronous(strategy)
    return strategy.over(described_devices(topology))


def planned_phase(model: StatefulModel, strategy: Strategy, kind: str, batch: Batch, **changes: Any) -> PlannedPhase:
    """Returns a phase of a model, compiled under a strategy for its devices, which may be described.

    Args:
      model: a compiled model, made under any strategy. It stays as it is.
      strategy: the strategy.
      kind: "train", "test" or "predict".
      batch: a host batch.
      **changes: `microbatches`, `remat` and `precision` of `compile`, where they are others than the model's.

    Raises:
      ImportError: if something that XLA compiles with is not installed.
    """
    planned = _copy(model, strategy, changes)
    state = planned._state_holder.shapes(planned.sample_inputs(first_rows(batch)))
    step = {"train": planned.train_step, "test": planned.test_step, "predict": planned.predict_step}[kind]
    options = planned._configuration.options
    phase = CompiledPhase(kind, step, strategy, options.steps_per_execution, eager=False,
                          deterministic=options.deterministic,
                          why_partitioned=functools.partial(LoopModel(cast("Model", planned)).why_partitioned, kind))
    phase.prepare(state, batch)
    compiler_options = strategy.compiler_options(options.deterministic)
    compiled = _compiled(phase.lowered(state, batch, phase.steps_per_execution),
                         {**compiler_options, **COMPILER_OPTIONS} if strategy.is_described else compiler_options)
    return PlannedPhase(phase, state, compiled, Program(compiled.as_text()))


def _check_is_synchronous(strategy: Strategy) -> None:
    if strategy.is_asynchronous:
        raise ValueError(f"{strategy!r} has no step over several devices that could be planned: its workers train on "
                         "their own. Plan `OneDeviceStrategy()` on one GPU.")


def _compiled(lowered: Any, options: CompilerOptions) -> Any:
    try:
        return compile_lowered(lowered, options)
    except jax.errors.JaxRuntimeError as error:
        if not any(name in str(error) for name in ("libdevice", "ptxas")):
            raise
        raise ImportError("XLA has not found CUDA's assembler (ptxas) or its libdevice, which it compiles with. This "
                          f"brings both, and needs no GPU: pip install 'trainer-jax[{EXTRA}]'") from error


def _copy(model: StatefulModel, strategy: Strategy, changes: Mapping[str, Any]) -> StatefulModel:
    """Returns the model under another strategy, with other arguments of `compile`, and without weights."""
    made = object.__new__(type(model))
    vars(made).update(vars(model))
    made.strategy = strategy
    options = {**changes, "policy": precision.get(changes["precision"])} if "precision" in changes else dict(changes)
    options.pop("precision", None)
    made._configuration = model._configuration.with_options(
        dataclasses.replace(model._configuration.options, eager=False, **options))
    made._run_context = RunContext()
    made._state_holder = StateHolder(
        made._functional, strategy, model._state_holder.seed, made._configuration, made._run_context)
    made.current_run = CurrentRun(made._state_holder, made._configuration, strategy, made._run_context)
    return made


def _plan(model: StatefulModel, strategy: Strategy, batch: Batch, topology: Topology, memory_fraction: float,
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
        memory_fraction=memory_fraction, collectives=sent_rows(collectives, topology, executed),
        flops=cost.flops * per_device, product_flops=products, traffic_bytes=moved,
        kernels=launched, roofline=roofline(products, moved, launched, collectives, topology, executed),
        unknown_loops=len(unknown_loops(train.program)), host_transfers=len(host_transfers(train.program)),
        assumptions=_assumptions(topology, devices, strategy))


def _executed_steps(program: Program, steps: int) -> int:
    """Returns for how many steps the text counts: a loop of unknown length counts as one step."""
    return steps if any(loop.trip_count == steps for loop in program.loops) else 1


def _memory(train: PlannedPhase, strategy: Strategy, batch: Batch) -> DeviceMemory:
    state, stats = train.state, train.compiled.memory_analysis()
    shardings = strategy.state_shardings(state)
    size = explain.report(
        "", named_leaves(state.params), named_leaves(shardings.params),
        named_leaves(state.opt_state), named_leaves(shardings.opt_state),
        named_leaves(state.model_state), named_leaves(shardings.model_state),
        named_leaves(strategy.gradient_shardings(state)))
    steps = train.phase.steps_per_execution
    group = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((steps, *leaf.shape), leaf.dtype), batch)
    batches = sum(_batch_bytes(leaf, strategy) for leaf in jax.tree.leaves(group))
    # What XLA has found unused is no argument.
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
            if topology.hosts > 1 else ".") + " Collectives with kernels beside them are hidden by these.")
    if devices > strategy.num_replicas_in_sync:
        lines.append("The devices of a replica share its operations evenly.")
    return tuple(lines)


# --- alternatives -----------------------------------------------------------------------------------------------------


def _alternatives(model: StatefulModel, strategy: Strategy, batch: Batch, topology: Topology,
                  planned: Plan) -> Iterator[Alternative]:
    if planned.memory_fraction < _MOST_OF_MEMORY:
        fits = planned.memory.peak <= planned.device_bytes * _MOST_OF_MEMORY
        yield Alternative(f"XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST_OF_MEMORY}", planned.memory.peak, fits,
                          planned.roofline.step)
    for change in _changes(model, strategy, batch, topology):
        try:
            found = _plan(model, change.strategy or strategy, batch if change.batch is None else change.batch,
                          topology, planned.memory_fraction, **change.options)
        except Exception as error:  # of whatever kind: it is one row of the table
            yield Alternative(change.text, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}")
        else:
            yield Alternative(change.text, found.memory.peak, found.fits, found.roofline.step)


def _changes(model: StatefulModel, strategy: Strategy, batch: Batch, topology: Topology) -> Iterator[_Change]:
    options, replicas = model._configuration.options, strategy.num_replicas_in_sync
    rows = jax.tree.leaves(batch)[0].shape[0]
    if type(model).train_step is OverridableSteps.train_step:
        for factor in _MICROBATCHES:
            parts = factor * options.microbatches
            if rows % (parts * replicas) == 0:
                yield _Change(f"microbatches={parts}", {"microbatches": parts})
    cheap: dict[str, Any] = {}
    if not options.remat:
        cheap["remat"] = True
        yield _Change("remat=True", {"remat": True})
    if options.policy is None:
        cheap["precision"] = "mixed_bfloat16"
        yield _Change('precision="mixed_bfloat16"', {"precision": "mixed_bfloat16"})
    if len(cheap) > 1:
        yield _Change('remat=True, precision="mixed_bfloat16"', cheap)
    others = _other_strategies(model, strategy, batch, topology)
    for other, text in others:
        yield _Change(text, strategy=other)
        if cheap:
            written = ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in cheap.items())
            yield _Change(f"{text}, {written}", cheap, other)
    if rows % (2 * replicas) == 0:
        half = jax.tree.map(lambda leaf: leaf[:rows // 2], batch)
        yield _Change(f"batches of {rows // 2} rows", batch=half)


def _other_strategies(
    model: StatefulModel, strategy: Strategy, batch: Batch, topology: Topology
) -> Iterator[tuple[Strategy, str]]:
    devices = list(strategy.mesh.devices.flat)
    if len(devices) == 1 or isinstance(strategy, (ShardedStrategy, ModelParallelStrategy)):
        return
    yield FullyShardedStrategy(devices), "FullyShardedStrategy()"
    layouts = _copy(model, strategy, {})._state_holder.shapes(model.sample_inputs(first_rows(batch))).layouts
    names = {name for _, layout in layouts for entry in layout for name in _axes(entry)} - {REPLICA_AXIS}
    if len(names) == 1 and topology.gpus_per_host > 1:
        axis, size = names.pop(), topology.gpus_per_host
        shape = {REPLICA_AXIS: len(devices) // size, axis: size}
        yield ModelParallelStrategy(shape, devices), f"ModelParallelStrategy({shape})"


def _axes(entry: Any) -> Sequence[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _topology_of(strategy: Strategy) -> Topology:
    """Returns the topology of a strategy over described devices."""
    devices = list(strategy.mesh.devices.flat)
    kinds = {gpu.name: kind for kind, gpu in GPU_KINDS.items()}
    if not strategy.is_described or devices[0].device_kind not in kinds:
        raise ValueError(f"`plan` needs `topology`, such as '8xh100': the devices of {strategy!r} are there, or of an "
                         "unknown kind.")
    per_host = [len(list(group)) for _, group in itertools.groupby(devices, lambda device: device.process_index)]
    return Topology(len(per_host), per_host[0], kinds[devices[0].device_kind])


def _host_arrays(sample: Any) -> Any:
    """Returns a sample with arrays of zeros, which take no memory, in place of shapes."""
    if isinstance(sample, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), sample.dtype), sample.shape)
    if isinstance(sample, Mapping):
        return type(sample)({name: _host_arrays(part) for name, part in sample.items()})  # type: ignore[call-arg]
    if type(sample) in (tuple, list):
        return type(sample)(map(_host_arrays, sample))
    return sample

