"""Steps that XLA divides, compiled for GPUs without one: they move what replicated ones do, and no rows besides."""

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support import gpu_programs
from trainer import distribute, losses, models
from trainer.core.tree_paths import named_leaves
from trainer.distribute.placement.described import EXTRA, is_plugin_installed
from trainer.tools.plan.planned_phase import planned_phase, strategy_over

pytestmark = [
    pytest.mark.slow, pytest.mark.every_case,
    pytest.mark.skipif(not is_plugin_installed(), reason="JAX's CUDA plugin is not installed: "
                       f"pip install 'trainer-jax[{EXTRA}]'"),
]

ROWS, TOKENS, WIDTH = 64, 16, 32
IMAGES = np.zeros((ROWS, 16, 16, 3), np.float32)
FLAT, LABELS = np.zeros((ROWS, 256), np.float32), np.zeros(ROWS, np.int32)
TEXT = np.zeros((ROWS, TOKENS), np.int32)
LOGS = 64  # bytes of the sums of logs, and of the real rows


class OwnStep(trainer.Model):
    def train_step(self, state, batch):
        return super().train_step(state, batch)


class TokenMean(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        values = optax.softmax_cross_entropy_with_integer_labels(y_pred, y)
        return jnp.where(y != 0, values, 0).sum() / (y != 0).sum()


class Contrastive(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        unit = y_pred / jnp.linalg.norm(y_pred, axis=1, keepdims=True)
        others = jnp.where(jnp.eye(len(unit), dtype=bool), -1e9, unit @ unit.T)
        return -jnp.where(y[:, None] == y, jax.nn.log_softmax(others), 0).sum(1).mean()


class Sorted(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return jnp.diff(jnp.sort(y_pred, axis=0), axis=0).max()


class Tagger(nn.Module):
    """Labels for each token."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(nn.Embed(100, WIDTH)(x))))


class Case(NamedTuple):
    """A partitioned step.

    Attributes:
      make: makes the model, with a method of its own.
      module: makes the module.
      batch: the batch.
      more: what is reduced beside the gradients, at most, from the state's shapes.
      gathered: the bytes of rows that the loss needs whole; their gradients are scattered.
    """

    make: Callable[..., trainer.Model]
    module: Callable[[], nn.Module]
    batch: Any
    more: Callable[[Any], int] = lambda state: 0
    gathered: int = 0


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def language_model():
    return models.TransformerLM(vocab_size=128, num_layers=1, d_model=64, num_heads=2, max_len=TOKENS, dropout_rate=0.1)


CASES = {
    "mlp": Case(OwnStep, lambda: models.MLP(num_classes=10), (FLAT, LABELS)),
    # BatchNorm's statistics are averages kept in the state; those of its backward pass are as many again.
    "cnn": Case(OwnStep, gpu_programs.ConvNet, (IMAGES, LABELS), lambda state: 2 * nbytes(state.model_state)),
    # XLA reduces a table that is also the output layer once for each use: it does not add partial sums up before.
    "language model": Case(
        OwnStep, language_model, (TEXT, TEXT), lambda state: nbytes(state.params["token_embedding"])),
    "token mean": Case(TokenMean, Tagger, (TEXT, TEXT)),
    "contrastive": Case(Contrastive, lambda: models.MLP(num_classes=WIDTH), (FLAT, LABELS),
                        gathered=ROWS * (WIDTH * 4 + 4)),  # embeddings and labels
}
TOPOLOGIES = ("1xh100", "8xh100", "2x8xh100")
every_program = pytest.mark.parametrize(("name", "topology"), [
    (name, topology) for name in CASES for topology in TOPOLOGIES])


@functools.cache
def compiled(name, topology):
    return compiled_case(CASES[name], topology)


def compiled_case(case, topology, strategy=distribute.MirroredStrategy):
    model = case.make(case.module())
    model.compile("adam", losses.SparseCategoricalCrossentropy(from_logits=True))
    return planned_phase(model, strategy_over(strategy(), topology), "train", case.batch)


def collectives_by_kind(planned, topology):
    """Returns the bytes of a step's collectives by their kind."""
    devices = int(np.prod([int(size) for size in topology.split("x")[:-1]]))
    found = collections.Counter()
    for each in gpu_programs.collectives_of(planned.program, devices):
        assert each.times == planned.phase.steps_per_execution and len(each.group) == devices
        found[each.kind] += each.nbytes
    return found


@every_program
def test_gradients_are_reduced_and_no_rows_are_gathered(name, topology):
    planned, case = compiled(name, topology), CASES[name]
    found = collectives_by_kind(planned, topology)
    if topology == "1xh100":
        assert not found
        return
    assert "do anything with the batch" in planned.phase.partitioned_because
    gradients = nbytes(planned.state.params)
    assert gradients <= found.pop("all-reduce") <= gradients + case.more(planned.state) + LOGS
    assert found.pop("all-gather", 0) == case.gathered
    assert found.pop("reduce-scatter", 0) <= case.gathered
    assert not found


@every_program
def test_the_state_keeps_its_buffers(name, topology):
    gpu_programs.assert_state_is_donated(compiled(name, topology))


@every_program
def test_fused_steps_are_the_only_loop_and_its_length_is_known(name, topology):
    planned = compiled(name, topology)
    assert planned.phase.steps_per_execution > 1
    gpu_programs.assert_no_loops_inside_of_steps(planned.program, planned.phase.steps_per_execution)
    gpu_programs.assert_known_trip_counts(planned.program)


# Of 24 such layers, 1209 MB of parameters, these take 267 and 609 MB; without dropout or a step of one's own 262 MB.
@pytest.mark.parametrize(("make", "dropout_rate", "is_replicated", "most"), [
    (trainer.Model, 0.1, True, 0.4), (OwnStep, 0.0, False, 0.59)], ids=["dropout", "own step"])
def test_fully_sharded_steps_hold_a_part_of_the_parameters_whole(make, dropout_rate, is_replicated, most):
    case = Case(make, lambda: gpu_programs.Deep(6, dropout_rate), (np.zeros((ROWS, TOKENS, 32), np.float32), LABELS))
    planned = compiled_case(case, "8xh100", distribute.FullyShardedStrategy)
    assert (planned.phase.partitioned_because is None) == is_replicated
    parameters = nbytes(planned.state.params)
    assert planned.compiled.memory_analysis().temp_size_in_bytes <= most * parameters
    gpu_programs.assert_state_is_donated(planned)
    found = collectives_by_kind(planned, "8xh100")
    assert found["all-gather"] <= 2.01 * parameters and found["reduce-scatter"] <= 1.01 * parameters
    # In a partitioned step XLA moves what layers compute where that is less than their parameters, as here.
    assert found["all-to-all"] <= (0 if is_replicated else 0.05 * parameters)


# Of the MLP of two layers in each of these, by the layout, a device of a replica has one half.
HALVES = {".*Dense_0/kernel": (None, "model"), ".*Dense_1/kernel": ("model", None)}
OVER_HOSTS = {
    "hybrid": (lambda devices: distribute.FullyShardedStrategy(devices, mesh_shape={"replica": 2, "shard": 8}), 8, 1),
    "with layouts": (lambda devices: distribute.ModelParallelStrategy(
        {"replica": 2, "shard": 4, "model": 2}, devices, HALVES), 4, 2),
}


@pytest.mark.parametrize("kind", OVER_HOSTS)
def test_a_mesh_over_two_hosts_gathers_inside_of_a_host_and_reduces_shards_between_hosts(kind):
    make, shards, halves = OVER_HOSTS[kind]
    strategy = make(distribute.described_devices("2x8xh100"))
    case = Case(trainer.Model, lambda: gpu_programs.Deep(1), (np.zeros((ROWS, TOKENS, 32), np.float32), LABELS))
    model = case.make(case.module())
    model.compile("adam", losses.SparseCategoricalCrossentropy(from_logits=True))
    planned = planned_phase(model, strategy, "train", case.batch)
    assert planned.phase.partitioned_because is None
    found = collections.Counter()
    for each in gpu_programs.collectives_of(planned.program, 16):
        found[each.kind, len({device // 8 for device in each.group}), len(each.group)] += each.nbytes
    sizes = named_leaves(jax.tree.map(lambda leaf: leaf.size * leaf.dtype.itemsize, planned.state.params))
    split = sum(size for path, size in sizes.items() if strategy.layouts(planned.state).get(path))
    held = sum(sizes.values()) - split + split / halves  # by the devices of a replica, each
    small = 4096 * len(sizes)  # arrays that stay whole
    assert found.pop(("all-reduce", 2, 2)) == pytest.approx(held / shards, abs=small)
    assert found.pop(("all-reduce", 2, 2 * shards), 0) <= small
    assert found.pop(("reduce-scatter", 1, shards)) == pytest.approx(held, abs=small)
    assert found.pop(("all-gather", 1, shards)) <= 2.01 * held
    assert all(hosts == 1 for _, hosts, _ in found), found
    # A part of the parameters is whole at a time.
    assert planned.compiled.memory_analysis().temp_size_in_bytes <= (1.1 if kind == "hybrid" else 0.8) * sum(
        sizes.values())


def test_a_partitioned_step_on_a_hybrid_mesh_sends_shards_of_gradients_alone_between_hosts():
    strategy = OVER_HOSTS["hybrid"][0](distribute.described_devices("2x8xh100"))
    model = OwnStep(gpu_programs.Deep(1))
    model.compile("adam", losses.SparseCategoricalCrossentropy(from_logits=True))
    planned = planned_phase(model, strategy, "train", (np.zeros((ROWS, TOKENS, 32), np.float32), LABELS))
    assert planned.phase.partitioned_because is not None
    between = [each for each in gpu_programs.collectives_of(planned.program, 16)
               if len({device // 8 for device in each.group}) > 1]
    small = 4096 * len(jax.tree.leaves(planned.state.params))
    assert {each.kind for each in between} == {"all-reduce"}
    assert sum(each.nbytes for each in between) == pytest.approx(nbytes(planned.state.params) / 8, abs=small)


def test_rows_that_are_moved_are_seen():
    case = Case(Sorted, lambda: models.MLP(num_classes=WIDTH), (FLAT, LABELS))
    found = collectives_by_kind(compiled_case(case, "8xh100"), "8xh100")
    del found["all-reduce"]
    assert found.total() >= ROWS * WIDTH * 4
