"""Programs and traces of a session, `fit`, `fit` with validation, `evaluate` and `predict`, beside a loop by hand.

Each is counted in a process of its own, by the events that JAX reports. `--before` adds a checkout of another commit.
Writes its section of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import loops_hand
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measuring import Ratio, table, write_section

import models

_ROOT = pathlib.Path(__file__).parent.parent
_EVENTS = {"backend_compile_duration": "programs", "jaxpr_trace_duration": "traces"}
_COUNTS = ("programs", "traces", "calls")
_calls = 0  # of the module


class CountedLinen(nn.Module):
    """A module that counts its calls: each is a trace of the user's code."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x, training=False):
        _count_call()
        return self.inner(x, training=training)


class CountedNNX(models.GuideCNN):
    """The same of the guide's module."""

    def __call__(self, x, rngs=None):
        _count_call()
        return super().__call__(x, rngs)


def _count_call() -> None:
    global _calls
    _calls += 1


def _resnet50() -> nn.Module:
    from trainer.models import ResNet50

    return CountedLinen(ResNet50(num_classes=10, classifier_activation=None))


@dataclasses.dataclass(frozen=True)
class Session:
    """A model and its data: noise.

    Attributes:
      make: returns the module, which counts its calls.
      shape: of a row of inputs; of tokens, if it has one entry only and `classes` are many.
      rows: to train on.
      validation_rows: to validate on and to predict.
      batch_size: over all replicas.
      classes: how many outputs the model has.
      replicas: simulated devices.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    rows: int
    validation_rows: int
    batch_size: int
    classes: int = 10
    replicas: int = 1

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels of all rows."""
        rng, rows = np.random.default_rng(0), self.rows + self.validation_rows
        if self.classes > 10:
            tokens = rng.integers(0, self.classes, (rows, self.shape[0] + 1)).astype(np.int32)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        return (rng.standard_normal((rows, *self.shape), np.float32),
                rng.integers(0, self.classes, rows).astype(np.int32))


_MLP = Session(lambda: CountedLinen(models.MLP(128, 10)), (784,), 1000, 300, 32)
SESSIONS = {
    "784-128-10, last batches of other sizes": _MLP,
    "the same on 2 replicas": dataclasses.replace(_MLP, replicas=2),
    "CNN of Flax's NNX guide, 28 x 28": Session(lambda: CountedNNX(nnx.Rngs(0)), (28, 28, 1), 320, 64, 32),
    "ResNet-50, 32 x 32": Session(_resnet50, (32, 32, 3), 32, 16, 8),
    "transformer of 12 layers, width 64, 32 tokens": Session(
        lambda: CountedLinen(models.LanguageModel(1000, 64, layers=12)), (32,), 32, 16, 8, classes=1000),
}


def _fit(session: Session) -> None:
    import trainer

    strategy = trainer.distribute.MirroredStrategy(list(range(session.replicas)))
    x, y = session.data()
    validation, options = (x[session.rows:], y[session.rows:]), {"batch_size": session.batch_size, "verbose": 0}
    x, y = x[:session.rows], y[:session.rows]
    with strategy.scope():
        model = trainer.Model(session.make())
        model.compile(optax.adamw(5e-3, 0.9), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    model.fit(x, y, **options)
    model.fit(x, y, epochs=3, validation_data=validation, **options)
    model.evaluate(*validation, **options)
    model.predict(validation[0], **options)


def _by_hand(session: Session) -> None:
    x, y = session.data()
    module = session.make()
    steps = _nnx_steps(module) if isinstance(module, nnx.Module) else _linen_steps(module, session.replicas, x)
    train, evaluate, predict = steps

    def train_epoch() -> None:
        for rows in _batches(np.random.default_rng(0).permutation(session.rows), session.batch_size):
            train(x[rows], y[rows])

    def on_validation(function: Callable) -> None:
        for rows in _batches(np.arange(session.rows, len(x)), session.batch_size):
            jax.block_until_ready(function(x[rows], y[rows]))

    train_epoch()
    for _ in range(3):
        train_epoch()
        on_validation(evaluate)
    on_validation(evaluate)
    on_validation(lambda x, y: predict(x))


def _batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(order), size):
        yield order[start:start + size]


def _linen_steps(module: nn.Module, replicas: int, x) -> tuple[Callable, Callable, Callable]:
    tx, mesh = optax.adamw(5e-3, 0.9), Mesh(np.asarray(jax.devices()[:replicas]), ("replica",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))
    state = loops_hand.initial_state(module, tx, x, out_shardings=whole)
    step = jax.jit(loops_hand.train_step(module, tx), donate_argnums=0)
    evaluated = jax.jit(lambda variables, x, y: loops_hand.loss_and_accuracy(module.apply(variables, x), y))
    predicted = jax.jit(module.apply)

    def variables() -> dict:
        return {"params": state[0], **state[1]}

    def train(x, y):
        nonlocal state
        state, _ = step(state, *jax.device_put((x, y), rows))

    return (train, lambda x, y: evaluated(variables(), *jax.device_put((x, y), rows)),
            lambda x: predicted(variables(), jax.device_put(x, rows)))


def _nnx_steps(model: nnx.Module) -> tuple[Callable, Callable, Callable]:
    """Returns the steps of the guide."""
    rngs = nnx.Rngs(0)
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, rngs, x, y):
        logits = model(x, rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, x, y):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs, x, y)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, rngs, x, y):
        loss, logits = loss_fn(model, rngs, x, y)
        metrics.update(loss=loss, logits=logits, labels=y)

    @nnx.jit
    def pred_step(model, x):
        return model(x)

    def train(x, y):
        model.train()
        train_step(model, optimizer, metrics, rngs, x, y)

    def evaluate(x, y):
        model.eval()
        eval_step(model, metrics, rngs, x, y)
        return [float(value) for value in metrics.compute().values()]

    return train, evaluate, lambda x: pred_step(model, x)


def _count(name: str, who: str) -> dict[str, float]:
    """Returns the counts of a session in this process, and its CPU time."""
    if who == "fit":
        import trainer

        _ = trainer.Model, trainer.losses  # each is imported when it is first used
    if SESSIONS[name].make is _resnet50:
        import trainer.models  # by hand, too
    jax.devices()
    counts: collections.Counter[str] = collections.Counter()

    def listen(event: str, seconds: float, **details: Any) -> None:
        counts[_EVENTS.get(event.rpartition("/")[2], "others")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    before = resource.getrusage(resource.RUSAGE_SELF)
    (_fit if who == "fit" else _by_hand)(SESSIONS[name])
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {**{kind: counts[kind] for kind in ("programs", "traces")}, "calls": _calls,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _in_process(name: str, who: str, tree: pathlib.Path) -> dict[str, float]:
    flags = f"--xla_force_host_platform_device_count={SESSIONS[name].replicas}"
    environment = {**os.environ, "PYTHONPATH": str(tree), "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, __file__, "--count", name, who], cwd=tree, env=environment,
                          stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=pathlib.Path, help="a checkout of an earlier commit")
    parser.add_argument("--count", nargs=2, metavar=("SESSION", "WHO"), help="count in this process")
    arguments = parser.parse_args()
    if arguments.count:
        print(json.dumps(_count(*arguments.count)))
        return
    contestants = {"by hand": ("by hand", _ROOT), "trainer": ("fit", _ROOT)}
    if arguments.before:
        contestants["trainer, before"] = "fit", arguments.before.resolve()
    rows = []
    for name in SESSIONS:
        found: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
        for _ in range(arguments.rounds):
            for contestant, (who, tree) in contestants.items():
                found[contestant].append(_in_process(name, who, tree))
        cpu = {contestant: [counts["cpu_seconds"] for counts in each] for contestant, each in found.items()}
        for contestant, each in found.items():
            ratio = "" if contestant == "by hand" else Ratio.of(cpu[contestant], cpu["by hand"])
            rows.append([name, contestant, *(each[0][kind] for kind in _COUNTS),
                         f"{statistics.median(cpu[contestant]):.1f}", ratio])
    write_section("Programs of a session", f"""
`fit` of one epoch, `fit` of three with `validation_data`, `evaluate` and `predict` on the rows of the validation,
adamw, loss and accuracy, each time in a process of its own. Programs that are compiled and functions that are traced,
as JAX reports them, calls of the module, which are traces of the user's code, and seconds of CPU time. Making the
module counts, imports do not. By hand, each step is a `jax.jit`, or the guide's `nnx.jit`. {arguments.rounds} rounds in
turn: `python benchmarks/sessions.py`{_of_before(arguments.before)}.

{table(["session", "contestant", "programs", "traces", "calls of the module", "CPU, s", "to by hand"], rows)}""")


def _of_before(tree: pathlib.Path | None) -> str:
    if tree is None:
        return ""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=tree, text=True).strip()
    return f"; before is commit {commit}, a checkout of which `--before` names"


if __name__ == "__main__":
    main()
