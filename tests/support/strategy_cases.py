"""Every strategy, and the models, optimizers and loops that each of them is tried with.

The full product of strategies, libraries, ways of training, options and uneven batches is too much. The cases are
chosen so that each pair of these occurs.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import classification, logits_loss
from trainer import distribute
from trainer.distribute import get_replica_context

FEATURES, HIDDEN, CLASSES, EPOCHS = 16, 64, 3, 2  # a hidden kernel has 4096 bytes, and so is split

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
LAYOUT = {".*Dense_0/kernel|.*first/kernel": (None, "model"), ".*Dense_1/kernel|.*last/kernel": ("model", None)}


def mirrored(ops, count):
    return lambda: distribute.MirroredStrategy([f"cpu:{index}" for index in range(count)], cross_device_ops=ops)


STRATEGIES = {
    "one_device": lambda: distribute.OneDeviceStrategy("cpu:3"),
    "mirrored": mirrored(None, 3),
    "nccl": mirrored(distribute.NcclAllReduce(), 4),
    "hierarchical": mirrored(distribute.HierarchicalCopyAllReduce(), 4),
    "to_one_device": mirrored(distribute.ReductionToOneDevice(), 3),
    "ring": mirrored(distribute.RingAllReduce(), 3),
    "central_storage": lambda: distribute.CentralStorageStrategy(FOUR, min_host_bytes=4096),
    "fully_sharded": lambda: distribute.FullyShardedStrategy(FOUR, min_shard_bytes=0),
    "sharded_optimizer": lambda: distribute.FullyShardedStrategy(FOUR, level="optimizer", min_shard_bytes=0),
    "model_parallel": lambda: distribute.ModelParallelStrategy({"replica": 4, "model": 2}, layout_map=LAYOUT),
    "tpu": lambda: distribute.TPUStrategy(devices=jax.devices("cpu")[4:6]),
    "hybrid": lambda: distribute.FullyShardedStrategy(
        FOUR, min_shard_bytes=0, mesh_shape={"replica": 2, "shard": 2}),
    "sharded_model": lambda: distribute.ModelParallelStrategy(
        {"replica": 2, "shard": 2, "model": 2}, layout_map=LAYOUT, min_shard_bytes=0),
}

SEVERAL_PROCESSES = {
    "multi_worker": distribute.MultiWorkerMirroredStrategy,
    "multi_worker_ring": lambda: distribute.MultiWorkerMirroredStrategy(
        distribute.CommunicationOptions(implementation="RING")),
    "fully_sharded": lambda: distribute.FullyShardedStrategy(min_shard_bytes=0),
    "sharded_optimizer": lambda: distribute.FullyShardedStrategy(level="optimizer", min_shard_bytes=0),
    "model_parallel": lambda: distribute.ModelParallelStrategy({"replica": 2, "model": 2}, layout_map=LAYOUT),
    "hybrid": lambda: distribute.FullyShardedStrategy(min_shard_bytes=0, mesh_shape={"replica": 2, "shard": 2}),
    "sharded_model": lambda: distribute.ModelParallelStrategy(
        {"shard": 2, "model": 2}, layout_map=LAYOUT, min_shard_bytes=0),
    # The first axis goes over the processes.
    "model_over_processes": lambda: distribute.ModelParallelStrategy({"model": 2, "replica": 2}, layout_map=LAYOUT),
}
"""Strategies over all devices of two processes with two devices each, which have joined a cluster."""

ONE_PROCESS = {
    "OneDeviceStrategy": "it has one device, which is one of its process's own",
    "MirroredStrategy": "it takes the devices of its process; `MultiWorkerMirroredStrategy` is the same over processes",
    "CentralStorageStrategy": "its variables rest in the memory of one host",
    "ParameterServerStrategy": "it has processes of its own",
    "TPUStrategy": "a TPU slice of several hosts cannot be simulated",
}
"""Why other strategies are not among them."""


# --- models -----------------------------------------------------------------------------------------------------------


def waves(key, shape, dtype=jnp.float32):
    """Initial weights without random numbers, whose programs take most of the time to compile."""
    return 0.3 * jnp.sin(1.0 + jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)


class LinenNet(nn.Module):
    features: int = CLASSES
    batch_norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(HIDDEN, kernel_init=waves)(x)
        if self.batch_norm:
            x = nn.BatchNorm(momentum=0.9, epsilon=0.1)(x)
        return nn.Dense(self.features, kernel_init=waves)(nn.tanh(x))


class NNXNet(nnx.Module):
    def __init__(self, features=CLASSES, batch_norm=False, inputs=FEATURES):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(inputs, HIDDEN, kernel_init=waves, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, epsilon=0.1, rngs=rngs) if batch_norm else None
        self.last = nnx.Linear(HIDDEN, features, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.last(nnx.tanh(x if self.norm is None else self.norm(x)))


NETS = {"linen": LinenNet, "nnx": NNXNet}


def supervised_gradients(model, state, batch):
    """Returns the logs, the gradients and the model state of a step written by hand."""
    x, y, w = trainer.unpack_x_y_sample_weight(batch)

    def loss_fn(params):
        y_pred, model_state = model.apply(params, state, x, training=True)
        return model.compute_loss(x, y, y_pred, w), (y_pred, model_state)

    (loss, (y_pred, model_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return {"loss": loss, **model.compute_metrics(x, y, y_pred, w)}, grads, model_state


class CustomStep(trainer.Model):
    def train_step(self, state, batch):
        logs, grads, model_state = supervised_gradients(self, state, batch)
        return logs, state.apply_gradients(grads, model_state=model_state)


def adversarial_step(model, state, batch):
    """Updates a generator; then a discriminator, twice, on the new generator's output; and clips its weights.

    So the step reads updated parameters and optimizer state, and changes parameters without an optimizer.
    """
    real, _, _ = trainer.unpack_x_y_sample_weight(batch)
    context = get_replica_context()
    share = context.row_mask * context.num_replicas_in_sync / context.global_rows

    def mean(values):
        return (values.mean(-1) * share).sum()

    def scores(params, x):
        return model.apply(params, state, x, module="discriminator", training=True)[0]

    def fakes(params):
        return model.apply(params, state, real[:, ::-1], module="generator", training=True)[0]

    def generator_loss(params):
        return mean((scores(state.params["discriminator"], fakes(params)) - 1) ** 2)

    first, grads = jax.value_and_grad(generator_loss)(state.params["generator"])
    state = state.apply_gradients(generator=grads)

    made = fakes(state.params["generator"])
    for _ in range(2):
        second, grads = jax.value_and_grad(
            lambda params: mean((scores(params, real) - 1) ** 2 + scores(params, made) ** 2))(
                state.params["discriminator"])
        state = state.apply_gradients(discriminator=grads)
    clipped = jax.tree.map(lambda leaf: jnp.clip(leaf, -0.25, 0.25), state.params["discriminator"])
    state = state.replace(params={**state.params, "discriminator": clipped})
    return {"generator": first, "discriminator": second}, state


class Adversarial(trainer.Model):
    def sample_inputs(self, batch):
        x, _, _ = trainer.unpack_x_y_sample_weight(batch)
        return {"generator": x, "discriminator": x}

    def train_step(self, state, batch):
        return adversarial_step(self, state, batch)


# --- cases ------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "sample_weights": {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
    "microbatches": {"microbatches": 3},
    "bfloat16": {"precision": "mixed_bfloat16"},
    "batch_norm": {},
    "clip_and_lamb": {"optimizer": optax.chain(optax.clip_by_global_norm(0.3), optax.lamb(0.02))},
    "adafactor": {"optimizer": optax.adafactor(0.02, min_dim_size_to_factor=8)},
    "two_modules": {},
}
WAYS = ("fit", "train_step", "loop")


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, to be repeated under several strategies."""

    option: str
    way: str
    library: str
    is_even: bool

    def __str__(self):
        return f"{self.option}-{self.way}-{self.library}-{'even' if self.is_even else 'uneven'}"

    @property
    def batch_size(self):
        return 8 if self.is_even else 7

    @property
    def data(self):
        # Once with a last batch of fewer rows than there are replicas; each shape of batches takes time to compile.
        has_tail = self.option == "plain" and not self.is_even
        x, y, w = classification(2 * self.batch_size + (3 if has_tail else 0), FEATURES, CLASSES)
        return (x, y, w) if self.option == "sample_weights" else (x, y)

    def build(self):
        net = NETS[self.library]
        if self.option == "two_modules":
            model = Adversarial({"generator": net(FEATURES), "discriminator": net(1)})
            model.compile({"generator": optax.sgd(0.01, momentum=0.9), "discriminator": optax.sgd(0.001, momentum=0.9)})
            return model
        kind = CustomStep if self.way == "train_step" else trainer.Model
        model = kind(net(batch_norm=self.option == "batch_norm"))
        options = {"optimizer": optax.sgd(0.1, momentum=0.9), **OPTIONS[self.option]}
        model.compile(loss=logits_loss(), steps_per_execution=2 if self.way == "fit" else 1, **options)
        return model

    def train_by_hand(self, strategy, model, data):
        model.build(data[0])

        def step(state, batch):
            if self.option == "two_modules":
                logs, state = adversarial_step(model, state, batch)
                return state, logs
            logs, grads, model_state = supervised_gradients(model, state, batch)
            return state.apply_gradients(grads, model_state=model_state), {"loss": logs["loss"]}

        dataset = trainer.data.Dataset.from_arrays(data).batch(self.batch_size)
        batches = strategy.experimental_distribute_dataset(dataset)
        state, history = model.state, []
        for _ in range(EPOCHS):
            for batch in batches:
                state, logs = strategy.run(step, args=(state, batch))
                history.append(strategy.reduce("mean", logs))
        assert int(state.step) == len(history)  # however often gradients were applied in a step
        model.state = state
        return {name: [float(logs[name]) for logs in history] for name in history[0]}


def applies(option, way):
    """Tells whether an option can be used with a way of training."""
    return way in {"microbatches": ("fit",), "two_modules": ("train_step", "loop")}.get(option, WAYS)


def chosen_cases():
    """Returns for each case the names of its strategies."""
    chosen = {}
    for number, option in enumerate(OPTIONS):
        ways = [way for way in WAYS if applies(option, way)]
        # At least two cases for each option, so that it meets both libraries, with and without a tail.
        cases = [Case(option, way, ("linen", "nnx")[(number + index) % 2], (number + index + index // 2) % 2 == 1)
                 for index, way in enumerate((ways * 2)[:max(len(ways), 2)])]
        for place, name in enumerate(STRATEGIES):
            chosen.setdefault(cases[(place + number) % len(cases)], []).append(name)
    return chosen


CASES = chosen_cases()


def cases_over_processes():
    """Returns a case for each option, such that every way, library and kind of last batch occurs too."""
    chosen = []
    for number, option in enumerate(OPTIONS):
        cases = [case for case in CASES if case.option == option]
        chosen.append(cases[number % len(cases)])
    return chosen


def pairs_of(case, strategy):
    """Returns the pairs of factors that occur in a case under a strategy."""
    factors = {**dataclasses.asdict(case), "strategy": strategy}
    return set(itertools.combinations(factors.items(), 2))
