"""A model's step, compiled under any strategy, over real or described devices.

Owns the recreation of a model and its strategy over other devices. Nothing is allocated: only the shapes of the state
are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.core import precision
from trainer.core.compile.compiler_options import CompilerOptions
from trainer.core.compile.hlo_text import Program
from trainer.core.compile.jit import compile_lowered
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data.sources.arrays import Batch
from trainer.distribute import Strategy
from trainer.distribute.placement.described import EXTRA, described_devices, kind_of
from trainer.distribute.placement.described_cudnn import traced_for
from trainer.distribute.placement.gpu_kinds import GPU_KINDS
from trainer.engine.model import inputs
from trainer.engine.model.core.model_core import copied, core_of
from trainer.engine.model.core.state_holder import first_rows
from trainer.engine.model.model import Model
from trainer.engine.step.compiled_phase import CompiledPhase
from trainer.tools.plan.program_contents import peak_bytes

# Without a GPU, kernels cannot be timed. Only these programs are compiled in this way.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}


class PlannedPhase(NamedTuple):
    """A phase of a model, compiled for real or described devices.

    Attributes:
      state: the shapes of the state.
      compiled: the `jax.stages.Compiled` of an execution.
      program: its text.
    """

    phase: CompiledPhase
    state: TrainState
    compiled: Any
    program: Program

    @property
    def peak_bytes(self) -> int:
        """The device memory of an execution, in bytes."""
        return peak_bytes(self.compiled)


def train_phase(model: Model, strategy: Strategy, batch: PyTree) -> PlannedPhase:
    """Returns the train phase on a batch of arrays or shapes; raises ValueError for an asynchronous strategy."""
    _check_is_synchronous(strategy)
    return planned_phase(model, strategy, "train", host_batch(batch))


def strategy_over(strategy: Strategy, topology: Any) -> Strategy:
    """Returns a strategy of the same kind over the devices of a topology.

    Raises:
      ValueError: if the strategy is asynchronous, or does not support this number of devices.
    """
    _check_is_synchronous(strategy)
    return strategy.over(described_devices(topology))


def planned_phase(model: Model, strategy: Strategy, kind: str, batch: Batch, **changes: Any) -> PlannedPhase:
    """Returns a phase of a model, compiled under a strategy for its devices, which may be described.

    Args:
      model: a compiled model, made under any strategy. It is not changed.
      batch: a host batch.
      **changes: `microbatches`, `remat` and `precision` of `compile`, if they differ from the model's.

    Raises:
      ImportError: if a package for XLA's compilation is not installed.
    """
    planned = copy_under(model, strategy, changes)
    core = core_of(planned)
    step = {"train": planned.train_step, "test": planned.test_step, "predict": planned.predict_step}[kind]
    options = core.configuration.options
    phase = CompiledPhase(kind, step, strategy, options.steps_per_execution, eager=False,
                          deterministic=options.deterministic,
                          why_not_replicated=functools.partial(core.why_not_replicated, kind))
    gpu = kind_of(strategy.mesh.devices.flat[0]) if strategy.is_described else None
    with contextlib.nullcontext() if gpu is None else traced_for(GPU_KINDS[gpu]):
        state = core.state.shapes(planned.sample_inputs(first_rows(batch)))
        phase.trace(state, batch)
        lowered = phase.lowered(batch, phase.steps_per_execution)
    without_gpus = COMPILER_OPTIONS if strategy.is_described else {}
    compiled = _compiled(lowered, {**strategy.compiler_options(options.deterministic), **without_gpus})
    return PlannedPhase(phase, state, compiled, Program(compiled.as_text()))


def _check_is_synchronous(strategy: Strategy) -> None:
    if strategy.is_asynchronous:
        raise ValueError(f"{strategy!r} has no step over several devices that could be planned: its workers train on "
                         "their own. Plan `OneDeviceStrategy()` on one GPU.")


def _compiled(lowered: jax.stages.Lowered, options: CompilerOptions) -> Any:
    try:
        return compile_lowered(lowered, options)
    except jax.errors.JaxRuntimeError as error:
        if not any(name in str(error) for name in ("libdevice", "ptxas")):
            raise
        raise ImportError("XLA has not found CUDA's assembler (ptxas) or its libdevice, which it compiles with. This "
                          f"brings both, and needs no GPU: pip install 'trainer-jax[{EXTRA}]'") from error


def copy_under(model: Model, strategy: Strategy, changes: Mapping[str, Any]) -> Model:
    """Returns the model under another strategy, with other arguments of `compile`, and without weights."""
    options = {**changes, "policy": precision.get(changes["precision"])} if "precision" in changes else dict(changes)
    options.pop("precision", None)
    configuration = core_of(model).configuration
    return copied(model, strategy, configuration.with_options(
        dataclasses.replace(configuration.options, eager=False, **options)))


def host_batch(sample: PyTree, batch_size: int | None = None) -> Batch:
    """Returns the first batch of the sample data of `plan`, with shapes as arrays that take no memory."""
    return inputs.sample_batch(_host_arrays(sample), batch_size)


def _host_arrays(sample: PyTree) -> Any:
    """Returns a sample with arrays of zeros, which take no memory, in place of shapes."""
    if isinstance(sample, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), sample.dtype), sample.shape)
    if isinstance(sample, Mapping):
        return type(sample)({name: _host_arrays(part) for name, part in sample.items()})  # type: ignore[call-arg]
    if type(sample) in (tuple, list):
        return type(sample)(map(_host_arrays, sample))
    return sample
