"""The placement of a state by a strategy: the report of `strategy.explain(model)`.

Owns the computation and the formatting of sizes. It uses shapes and shardings only, so that nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from trainer.core.ambient.notebook import as_folded_html
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.core.units import columns, readable_bytes, readable_number
from trainer.distribute import Strategy
from trainer.distribute.placement.placement import spec_text

DEFAULT_MEMORY = "device"  # the memory for an accelerator's computations, by any platform's name


class ParameterRow(NamedTuple):
    """A parameter in a report.

    Attributes:
      path: its path, such as "block/up/kernel".
      shape: the shape of the whole array.
      dtype: the name of its dtype.
      spec: the mesh axes that split its dimensions, such as "(None, 'model')", or "replicated".
      device_bytes: the bytes of a device's shard.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class StateReport:
    """A device's share of a training state, in bytes; its text is a table.

    A shard in the host memory of a device, such as "pinned_host", counts for the device.

    Attributes:
      title: the report's first line.
      rows: the parameters.
      parameters: bytes of parameters by kind of memory: "device", or the name of another.
      gradients: the same for gradients.
      optimizer_state: the same for the optimizer's state.
      model_state: the same for the model's state, such as running averages.
      unsharded_bytes: bytes of all of these without sharding.
      peak_bytes: peak memory of a device in an execution of a train step, with its batches, activations and temporary
        buffers; None without a batch.
      temporary_bytes: gradients, activations and temporary buffers in it; likewise.
      step_flops: floating-point operations of a step on a device; likewise.
      partitioned_because: the reason why a step is a single program for the whole batch, divided by XLA; None if each
        replica computes its rows. Both have the same results.
    """

    title: str
    rows: tuple[ParameterRow, ...]
    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    optimizer_state: Mapping[str, int]
    model_state: Mapping[str, int]
    unsharded_bytes: int
    peak_bytes: int | None = None
    temporary_bytes: int | None = None
    step_flops: float | None = None
    partitioned_because: str | None = None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters per device, in all memories."""
        return sum(self.parameters.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients per device, in all memories."""
        return sum(self.gradients.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state per device, in all memories."""
        return sum(self.optimizer_state.values())

    @property
    def model_state_bytes(self) -> int:
        """Bytes of the model's state per device, in all memories."""
        return sum(self.model_state.values())

    @property
    def total(self) -> dict[str, int]:
        """Bytes of everything per device, by kind of memory."""
        parts = (self.parameters, self.gradients, self.optimizer_state, self.model_state)
        total: Counter[str] = Counter()
        for part in parts:
            total.update(part)
        return dict(total) or {DEFAULT_MEMORY: 0}

    @property
    def total_bytes(self) -> int:
        """Bytes of everything per device, in all memories."""
        return sum(self.total.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r}, total_bytes={self.total_bytes})"

    def _repr_html_(self) -> str:
        return as_folded_html(repr(self), str(self))

    def __str__(self) -> str:
        table = columns([("Parameter", "Shape", "Dtype", "Spec", "Per device"),
                          *((row.path, str(row.shape), row.dtype, row.spec, readable_bytes(row.device_bytes))
                            for row in self.rows)], right_aligned=(4,))
        parts = {"Parameters": self.parameters, "Gradients": self.gradients, "Optimizer state": self.optimizer_state,
                 "Model state": self.model_state, "Total": self.total}
        sizes = [(name, readable_bytes(size), "" if memory == DEFAULT_MEMORY else f"in {memory}")
                 for name, by_memory in parts.items() for memory, size in (by_memory or {DEFAULT_MEMORY: 0}).items()]
        summary = columns([("Per device", "", ""), *sizes,
                            ("One device, unsharded", readable_bytes(self.unsharded_bytes), ""),
                            *self._step_rows()], right_aligned=(1,))
        rule = "-" * max(map(len, table + summary))
        return "\n".join([self.title, table[0], rule, *table[1:], rule, *summary, *self._lowering(),
                          "Batches, activations and temporary buffers are not counted" + (
                              "." if self.peak_bytes is None else ", but in the peak.")])

    def _lowering(self) -> list[str]:
        if self.peak_bytes is None:
            return []
        return ["The step is replicated: each replica computes its rows."] if self.partitioned_because is None else [
            f"The step is partitioned: {self.partitioned_because}."]

    def _step_rows(self) -> list[tuple[str, str, str]]:
        if self.peak_bytes is None or self.temporary_bytes is None:
            return []
        rows = [("Gradients, activations, temporary", readable_bytes(self.temporary_bytes), ""),
                ("Peak of a step", readable_bytes(self.peak_bytes), "")]
        return rows if self.step_flops is None else [
            *rows, ("Operations of a step", readable_number(self.step_flops, "FLOP"), "")]


def state_report(title: str, strategy: Strategy, state: TrainState) -> StateReport:
    """Returns the report for a state of arrays or shapes under a strategy."""
    shardings = strategy.state_shardings(state)
    return report(
        title, named_leaves(state.params), named_leaves(shardings.params),
        named_leaves(state.opt_state), named_leaves(shardings.opt_state),
        named_leaves(state.model_state), named_leaves(shardings.model_state),
        named_leaves(strategy.gradient_shardings(state)))


def report(
    title: str,
    params: Mapping[str, Any],
    params_shardings: Mapping[str, Sharding],
    opt_state: Mapping[str, Any],
    opt_shardings: Mapping[str, Sharding],
    model_state: Mapping[str, Any],
    model_state_shardings: Mapping[str, Sharding],
    gradients_shardings: Mapping[str, Sharding],
) -> StateReport:
    """Returns the report of a device's share of a state.

    Args:
      title: the report's first line.
      params: parameters by path, as objects with a `shape` and a `dtype`.
      params_shardings: the sharding of each, by the same paths.
      opt_state: leaves of the optimizer's state by path.
      opt_shardings: the sharding of each.
      model_state: leaves of the model's state by path.
      model_state_shardings: the sharding of each.
      gradients_shardings: the shardings of gradients, by the paths of parameters with gradients.

    Raises:
      ValueError: if a leaf has no sharding, or a sharding has no leaf.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("replica", "model"))
      >>> split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
      >>> kernel = jax.ShapeDtypeStruct((256, 512), "float32")
      >>> moments = {"mu/kernel": kernel, "nu/kernel": kernel}
      >>> size = report("Two by four devices", {"kernel": kernel}, {"kernel": split}, moments,
      ...               dict.fromkeys(moments, split), {}, {}, {"kernel": split})
      >>> size.optimizer_bytes
      262144
      >>> print(size)
      Two by four devices
      Parameter  Shape       Dtype    Spec             Per device
      -----------------------------------------------------------
      kernel     (256, 512)  float32  (None, 'model')   128.0 KiB
      -----------------------------------------------------------
      Per device
      Parameters             128.0 KiB
      Gradients              128.0 KiB
      Optimizer state        256.0 KiB
      Model state                  0 B
      Total                  512.0 KiB
      One device, unsharded    2.0 MiB
      Batches, activations and temporary buffers are not counted.
    """
    gradients = {path: params[path] for path in gradients_shardings if path in params}
    parts = (("params", params, params_shardings), ("gradients", gradients, gradients_shardings),
             ("opt_state", opt_state, opt_shardings), ("model_state", model_state, model_state_shardings))
    for name, leaves, shardings in parts:
        if leaves.keys() != shardings.keys():
            path = min(leaves.keys() ^ shardings.keys())
            has, lacks = ("a shape", "sharding") if path in leaves else ("a sharding", "shape")
            raise ValueError(f"In `{name}`, {path!r} has {has} but no {lacks}. Give both for the same paths.")
    sizes = {name: _bytes_by_memory(leaves, shardings) for name, leaves, shardings in parts}
    rows = tuple(ParameterRow(path, tuple(leaf.shape), str(leaf.dtype), spec_text(params_shardings[path], leaf.shape),
                              _device_bytes(leaf, params_shardings[path])) for path, leaf in params.items())
    unsharded = sum(_bytes(leaf.shape, leaf.dtype) for _, leaves, _ in parts for leaf in leaves.values())
    return StateReport(title, rows, sizes["params"], sizes["gradients"], sizes["opt_state"], sizes["model_state"],
                       unsharded)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def _device_bytes(leaf: Any, sharding: Sharding) -> int:
    return _bytes(sharding.shard_shape(tuple(leaf.shape)), leaf.dtype)


def _bytes_by_memory(leaves: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for path, leaf in leaves.items():
        sizes[_memory_of(shardings[path])] += _device_bytes(leaf, shardings[path])
    return dict(sizes)


def _memory_of(sharding: Sharding) -> str:
    kind = sharding.memory_kind
    if kind is None:
        return DEFAULT_MEMORY
    device: jax.Device = next(iter(sharding.addressable_devices or sharding.device_set))
    return DEFAULT_MEMORY if kind == device.default_memory().kind else kind
