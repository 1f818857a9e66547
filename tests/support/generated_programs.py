"""Training programs that are generated from a seed, and the results of their training under a strategy.

A program is plain data, so that a test which fails can show all of it. Its parts have names, and those are in
`generated_modules.py` and `generated_steps.py`. Parts are dealt like cards: each of them comes once before any comes
again, so that a few seeds in a row have all.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import optax

import trainer
from tests.support.generated_modules import (
    FEATURES,
    FUNCTIONS,
    LINEN,
    MIXING,
    NETS,
    ROWWISE,
    STEPS_OF_TIME,
    VOCABULARY,
    WHOLE,
)
from tests.support.generated_steps import (
    BY_ROW,
    LOSS_OVERRIDES,
    METRICS,
    METRICS_OF,
    OF_BATCH,
    OUTPUTS,
    STEPS,
    VALUES,
    model_class,
)
from trainer import distribute
from trainer.core.tree_paths import named_leaves
from trainer.distribute.placement.placement import to_host

EPOCHS = 2
LAYOUT = {"last/kernel": ("model", None)}


def devices(count):
    return [f"cpu:{index}" for index in range(count)]


STRATEGIES = {
    "mirrored_2": lambda: distribute.MirroredStrategy(devices(2)),
    "mirrored_3": lambda: distribute.MirroredStrategy(devices(3)),
    "mirrored_8": lambda: distribute.MirroredStrategy(devices(8)),
    "fully_sharded_2": lambda: distribute.FullyShardedStrategy(devices(2), min_shard_bytes=0),
    "fully_sharded_8": lambda: distribute.FullyShardedStrategy(devices(8), min_shard_bytes=0),
    "sharded_optimizer_3": lambda: distribute.FullyShardedStrategy(devices(3), level="optimizer", min_shard_bytes=0),
    "model_parallel_3": lambda: distribute.ModelParallelStrategy(
        {"replica": 3, "model": 2}, devices(6), layout_map=LAYOUT),
    "hybrid_4": lambda: distribute.FullyShardedStrategy(
        devices(4), min_shard_bytes=0, mesh_shape={"replica": 2, "shard": 2}),
    "hybrid_8": lambda: distribute.FullyShardedStrategy(
        devices(8), min_shard_bytes=0, mesh_shape={"replica": 2, "shard": 4}),
    "sharded_model_4": lambda: distribute.ModelParallelStrategy(
        {"shard": 2, "model": 2}, devices(4), LAYOUT, min_shard_bytes=0),
    "sharded_model_8": lambda: distribute.ModelParallelStrategy(
        {"replica": 2, "shard": 2, "model": 2}, devices(8), LAYOUT, min_shard_bytes=0),
}
MIRRORED, SHARDED, MESHES = list(STRATEGIES)[:3], list(STRATEGIES)[3:7], list(STRATEGIES)[7:]

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.05, momentum=0.9)),
    "clipped_by_layer": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.05, momentum=0.9)),
    "noisy": lambda: optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.05)),
    # Epsilons are large: gradients that are zero but for rounding become updates else.
    "adam": lambda: optax.adam(0.01, eps=1e-2),
    "lamb": lambda: optax.lamb(0.01, eps=1e-2),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
}
OPTIONS = {
    "ema": {"ema_decay": 0.8}, "penalty": {"regularizers": {"**/kernel": trainer.regularizers.L2(0.01)}},
    "frozen_biases": {"freeze": "**/bias"}, "skip_non_finite": {"skip_non_finite": True}, "remat": {"remat": True},
    "microbatches": {"microbatches": 2},
}
# Rows of the batches of an epoch: some divide by 2, 3 or 8 devices, some do not, and some are fewer than the devices.
SIZES = ((8, 8, 8), (6, 6, 6), (12, 12), (24, 24, 24), (8, 8, 3), (12, 12, 5), (7, 7, 2), (4, 4, 1), (5, 5, 5),
         (6, 6, 1), (9, 9, 6), (10, 10, 4))
FORMS = ("arrays", "list", "generator", "dataset", "batch_by_batch")
# Of ordinary programs no row's loss depends on another row, but for BatchNorm.
ORDINARY_BLOCKS = (*ROWWISE, "layer", "layer_norm", "batch_norm", "scanned_layers", "dropout")
GOALS = [(task, loss) for task in OUTPUTS for loss in (*BY_ROW[task], *OF_BATCH[task], *LOSS_OVERRIDES)]
ORDINARY_GOALS = [(task, loss) for task in OUTPUTS for loss in BY_ROW[task]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training: its network, loss, step, options and data."""

    seed: int
    library: str
    inputs: str
    blocks: tuple
    task: str
    loss: str
    step: str
    optimizer: str
    options: tuple
    metrics: tuple
    weights: str
    form: str
    is_validated: bool
    sizes: tuple
    steps_per_execution: object
    strategies: tuple

    def build(self):
        """Returns the model, compiled, in the scope of the strategy that is current.

        Steps of one device are not fused, so that fused steps are compared with steps that are not.
        """
        net = NETS[self.library](self.inputs, self.blocks, OUTPUTS[self.task])
        model = model_class(self.loss, self.step)(net, seed=self.seed)
        losses = BY_ROW[self.task] | OF_BATCH[self.task]
        default = next(iter(BY_ROW[self.task])) if self.loss == "adds_spread" else None
        name = self.loss if self.loss in losses else default
        options = {}
        for option in self.options:
            options |= OPTIONS[option]
        fused = self.steps_per_execution if model.strategy.mesh.devices.size > 1 else 1
        model.compile(
            OPTIMIZERS[self.optimizer](), losses[name]() if name else None,
            metrics=[METRICS[metric]() for metric in self.metrics],
            weighted_metrics=[] if self.weights == "none" else [METRICS[METRICS_OF[self.task][0]]()],
            steps_per_execution=fused, **options)
        return model

    def rows(self, count, seed):
        """Returns inputs, targets and, if there are any, weights of so many rows."""
        rng = np.random.default_rng([self.seed, seed])
        if self.task == "tokens":
            x = rng.integers(1, VOCABULARY, (count, STEPS_OF_TIME))
            is_token = np.arange(STEPS_OF_TIME) < rng.integers(1, STEPS_OF_TIME + 1, (count, 1))
            y = np.where(is_token, (x * 5 + 1) % (VOCABULARY - 1) + 1, 0)
        else:
            shape = (FEATURES["rows"],) if self.inputs == "rows" else (STEPS_OF_TIME, FEATURES["series"])
            x = rng.normal(size=(count, *shape)).astype(np.float32)
            scores = x.reshape(count, -1) @ np.random.default_rng(0).normal(size=(x[0].size, OUTPUTS[self.task]))
            y = scores.argmax(-1) if self.task == "labels" else np.tanh(scores[:, :VALUES]).astype(np.float32)
        return x, y, *([rng.uniform(0.2, 2.0, count).astype(np.float32)] if self.weights == "sample_weight" else [])

    def train(self, strategy, model, data=None, noise=0.0):
        """Trains, evaluates and predicts; returns the logs and the other values to compare.

        `noise` is by how much the weights that it starts from are moved, as rounding would.
        """
        training, validation = self.rows(sum(self.sizes), 1), self.rows(self.sizes[0] + self.sizes[-1], 2)
        if "skip_non_finite" in self.options:
            training[0][self.sizes[0] + 1] = np.nan
        model.build(training[0][:1])
        if noise:
            signs = np.random.default_rng(self.seed)
            model.state = model.state.replace(params=jax.tree.map(
                lambda leaf: leaf * (1 + noise * signs.choice([-1.0, 1.0], leaf.shape).astype(np.float32)),
                model.state.params))
        found = (self._train_by_batches if self.form == "batch_by_batch" else self._fit)(model, training, validation)
        if model.state.opt_state is not None:
            found |= {f"optimizer {path}": to_host(leaf) for path, leaf in named_leaves(model.state.opt_state).items()
                      if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)}
        return found

    def _fit(self, model, training, validation):
        edges = [0, *itertools.accumulate(self.sizes)]
        batches = [tuple(array[start:end] for array in training) for start, end in itertools.pairwise(edges)]
        options = {}
        if self.form == "arrays":
            data, options["batch_size"] = training[:2], self.sizes[0]
            options["sample_weight"] = training[2] if self.weights == "sample_weight" else None
            options["class_weight"] = {0: 0.5, 1: 2.0, 2: 1.0} if self.weights == "class_weight" else None
        elif self.form == "dataset":
            data = [trainer.data.Dataset.from_arrays(training).shuffle(seed=self.seed).batch(self.sizes[0])]
        else:
            data = [batches if self.form == "list" else itertools.cycle(batches)]
            options["steps_per_epoch"] = len(batches) if self.form == "generator" else None
        if self.is_validated:
            options |= {"validation_data": validation, "validation_batch_size": self.sizes[0]}
        found = model.fit(*data, epochs=EPOCHS, verbose=0, **options).history
        if not self.is_validated:
            weights = validation[2] if self.weights == "sample_weight" else None
            found |= model.evaluate(*validation[:2], sample_weight=weights, batch_size=self.sizes[0], verbose=0)
        return found | _named(model.predict(validation[0][:self.sizes[-1]], verbose=0))

    def _train_by_batches(self, model, training, validation):
        found, start = {}, 0
        for _ in range(EPOCHS):
            for size in self.sizes:
                logs = model.train_on_batch(*[array[start:start + size] for array in training], return_dict=True)
                found |= {f"{name} after {start} rows": float(value) for name, value in logs.items()}
                start = (start + size) % sum(self.sizes)
        for size in sorted(set(self.sizes)):
            batch = [array[:size] for array in validation]
            found |= {f"tested {name} of {size} rows": float(value)
                      for name, value in model.test_on_batch(*batch, return_dict=True).items()}
        return found | _named(model.predict_on_batch(batch[0]))


def _named(outputs):
    return {f"prediction {path}": np.asarray(leaf) for path, leaf in named_leaves(outputs).items()}


def dealt(cards, seed, deck):
    """Returns the card for a seed: of as many seeds in a row as there are cards, each gets another."""
    cards = list(cards)
    number, place = divmod(seed, len(cards))
    return cards[np.random.default_rng([deck, number]).permutation(len(cards))[place]]


def generate(seed):
    """Returns the program of a seed. One program of four is ordinary."""
    rng = np.random.default_rng([seed, 99])
    is_ordinary = seed % 4 == 0
    place = seed // 4 if is_ordinary else seed - seed // 4 - 1  # among those of its kind
    task, loss = dealt(ORDINARY_GOALS if is_ordinary else GOALS, place, 1)
    inputs = "tokens" if task == "tokens" else dealt(("rows", "rows", "rnn", "nn_scan", "lax_scan"), seed, 2)
    blocks = [dealt(ORDINARY_BLOCKS, place, 3)] if is_ordinary else [
        dealt(MIXING, place, 4), dealt([*LINEN, *WHOLE], place, 5)]
    blocks += list(rng.choice(ORDINARY_BLOCKS if is_ordinary else [*FUNCTIONS, *LINEN], int(rng.integers(0, 3))))
    step = "default" if is_ordinary else dealt([*STEPS, "default", "default"], place, 6)
    form, options, metrics = dealt(FORMS, seed, 7), _options(rng, task, loss, step), _metrics(rng, task, step)
    weights = dealt(("sample_weight", "none", "class_weight"), place, 14) if loss in BY_ROW[task] else "none"
    if weights == "class_weight" and (task != "labels" or form != "arrays"):
        weights = "sample_weight"
    strategies = dealt(MIRRORED, seed, 12), dealt(SHARDED if rng.random() < 0.7 else MIRRORED, seed, 13)
    if any(block in ("sorted", "median", "sorted_features") for block in blocks):
        # XLA ends the process for the gradient of a sort of which it splits an axis that does not divide.
        strategies = tuple("mirrored_3" if name in ("sharded_optimizer_3", "model_parallel_3") else name
                           for name in strategies)
    strategies = strategies if seed % 2 else strategies[::-1]
    mesh = dealt(MESHES, seed // 5 + seed, 15)
    strategies = (mesh, *strategies) if seed % 5 == 0 else (*strategies, mesh)
    return Program(
        seed=seed, library=dealt(NETS, seed, 8), inputs=inputs, blocks=tuple(map(str, rng.permutation(blocks))),
        task=task, loss=loss, step=step, optimizer=dealt(OPTIMIZERS, seed, 9), options=options, metrics=metrics,
        weights=weights, form=form, is_validated=bool(rng.random() < 0.5), sizes=dealt(SIZES, seed, 10),
        steps_per_execution=dealt(("auto", 2, 1), seed, 11),
        strategies=tuple(dict.fromkeys(strategies)))


def _options(rng, task, loss, step):
    def fits(option):
        if option == "microbatches":  # a step of one's own divides batches itself; a loss of the batch needs all rows
            return step == "default" and loss in BY_ROW[task]
        return option != "skip_non_finite" or (task != "tokens" and step not in ("logs", "measures"))

    return tuple(option for option in OPTIONS if rng.random() < 0.25 and fits(option))


def _metrics(rng, task, step):
    """Returns the names of metrics; none for steps that do not compute those of `compile`."""
    return () if step in ("skips", "perturbs", "twice", "logs", "measures") else tuple(
        metric for metric in METRICS_OF[task] if rng.random() < 0.4)
