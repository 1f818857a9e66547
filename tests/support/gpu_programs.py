"""Phases of models compiled for absent GPUs, and checks of their programs.

Each check states its meaning for a GPU. XLA's text changes: each check was seen to hold, and to fail for a worse
program, on the versions of `SEEN_ON`.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
from flax import linen as nn

import trainer
from trainer import distribute, models
from trainer.core.compile.hlo_text import Program
from trainer.core.timing import Timing
from trainer.data.sources.groups import Group
from trainer.tools.plan.planned_phase import PlannedPhase, planned_phase, strategy_over
from trainer.tools.plan.program_contents import collectives_of, host_transfers, unknown_loops

SEEN_ON = ("jaxlib 0.10.2", "jaxlib 0.12.0.1")
ROWS = 64
STRATEGIES = {"mirrored": distribute.MirroredStrategy, "fully_sharded": distribute.FullyShardedStrategy}


class ConvNet(nn.Module):
    """A convolution, BatchNorm and a layer on top."""

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not training)(nn.Conv(32, (3, 3))(x)))
        return nn.Dense(10)(x.mean((1, 2)))


def language_model() -> nn.Module:
    """Returns a small GPT-2."""
    return models.TransformerLM(vocab_size=512, num_layers=2, d_model=256, num_heads=4, max_len=64)


class Layer(nn.Module):
    """A layer of a transformer, of 12.6 million parameters."""

    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        added = nn.Dense(1024)(nn.gelu(nn.Dense(4096)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.dropout_rate, deterministic=not training)(added)


class Deep(nn.Module):
    """Many such layers."""

    num_layers: int = 24
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        x = nn.Dense(1024)(x)
        for _ in range(self.num_layers):
            x = Layer(self.dropout_rate)(x, training)
        return nn.Dense(10)(x).mean(1)


_MODULES: dict[str, Any] = {
    "mlp": lambda: models.MLP(num_classes=10), "cnn": ConvNet, "lm": language_model, "deep": Deep}
_BATCHES = {
    "mlp": (np.zeros((ROWS, 784), np.float32), np.zeros(ROWS, np.int32)),
    "cnn": (np.zeros((ROWS, 16, 16, 3), np.float32), np.zeros(ROWS, np.int32)),
    "lm": (np.zeros((ROWS, 64), np.int32), np.zeros((ROWS, 64), np.int32)),
    "deep": (np.zeros((8, 16, 32), np.float32), np.zeros(8, np.int32)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A phase of a model under a strategy on a topology, compiled once for all tests.

    Attributes:
      model: "mlp", "cnn", "lm" or "deep".
      strategy: element of `STRATEGIES`.
      topology: the GPUs.
      kind: the phase.
      options: of `compile`, as pairs.
    """

    model: str = "mlp"
    strategy: str = "mirrored"
    topology: str = "8xh100"
    kind: str = "train"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def num_devices(self) -> int:
        """How many GPUs there are."""
        return int(np.prod([int(size) for size in self.topology.split("x")[:-1]]))

    def compiled(self) -> PlannedPhase:
        """Returns the phase."""
        return _compiled(self)

    def new_model(self) -> trainer.Model:
        """Returns the model, without weights."""
        return _model(self)

    @property
    def batch(self) -> Any:
        """The batch for which it is compiled."""
        return _BATCHES[self.model]


def _model(case: Case) -> trainer.Model:
    model = trainer.Model(_MODULES[case.model]())
    options = {"metrics": ["accuracy"], **dict(case.options)}
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


@functools.cache
def _compiled(case: Case) -> PlannedPhase:
    strategy = strategy_over(STRATEGIES[case.strategy](), case.topology)
    return planned_phase(_model(case), strategy, case.kind, case.batch)


def compiled_as_fit_does(case: Case) -> Any:
    """Returns the executable that `fit` would run on whole groups of batches that are sent from the host."""
    planned = case.compiled()
    phase, steps = planned.phase, planned.phase.steps_per_execution
    stack = jax.tree.map(lambda leaf: np.stack([leaf] * steps), case.batch)
    group = phase.place_group(Group(stack, steps, ROWS, first=0))
    execute = phase.executable(phase.empty_logs, group=group, guard=phase.new_guard(shapes=1), timing=Timing())
    return execute.args[0]


# --- checks of programs -------------------------------------------------------------------------------------------


def assert_known_trip_counts(program: Program) -> None:
    """Fused steps are a loop whose length XLA knows: a GPU asks the host before each iteration of others."""
    assert unknown_loops(program) == []


def assert_no_loops_inside_of_steps(program: Program, steps: int) -> None:
    """The only loop is over fused steps: another loop is many small kernels, such as a search in a metric."""
    loops = [loop.name for loop in program.loops]
    assert len(loops) == (steps > 1), loops


def assert_no_host_transfers(program: Program) -> None:
    """Nothing is sent to the host, nor does the program wait for it: its queue of kernels would run empty."""
    assert host_transfers(program) == []


def assert_state_is_donated(planned: PlannedPhase) -> None:
    """Each array of the state after a step takes the buffer of that before: there is no second state in memory."""
    aliases = planned.program.header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    assert len(re.findall(r"(?:may|must)-alias", aliases)) == len(jax.tree.leaves(planned.state))


def assert_gradients_are_reduced(case: Case, gradient_bytes: int, most: int, slack: float = 0.02) -> None:
    """Few collectives, as each costs its latency; of the gradients' bytes, as more would be waste; and asynchronous.

    An all-reduce has the gradients once, and a few numbers of logs. Where parameters are split, a scatter takes the
    gradients, and gathers bring the parameters; large parameters twice, for the forward and for the backward pass.
    """
    found = collectives_of(case.compiled().program, case.num_devices)
    assert 1 <= len(found) <= most, found
    by_kind: dict[str, int] = {}
    for each in found:
        by_kind[each.kind] = by_kind.get(each.kind, 0) + each.nbytes
    times = {"all-reduce": 1} if case.strategy == "mirrored" else {"reduce-scatter": 1, "all-gather": 2}
    for kind, most_times in times.items():
        nbytes = by_kind.get(kind, 0)
        assert gradient_bytes * (1 - slack) <= nbytes <= most_times * gradient_bytes * (1 + slack) + 4096, by_kind
    large = [each for each in found if each.nbytes > gradient_bytes / 4]
    assert large and all(each.is_asynchronous and each.kernels_between for each in large), large


def product_dtypes(program: Program) -> set[str]:
    """Returns the dtypes of the operands of products and convolutions, fused or not, in which Tensor Cores compute."""
    found = set()
    for computation in program.computations.values():
        for instruction in computation:
            is_library_call = re.search(r'custom_call_target="__(cublas|cudnn)', instruction.text)
            if instruction.operation in ("dot", "convolution") or is_library_call:
                for operand in program.operands_of(instruction, computation)[:2]:
                    found |= {array.dtype for array in operand.arrays}
    return found
