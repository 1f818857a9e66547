"""Training MobileNetV2 on a folder of JPEGs: `python benchmarks/images.py [--rounds N] [fit] [workers] [kills]`.

`fit` compares it with a bare loop over the same batches and a step of the same model, `workers` one process with two,
each on one core, as `examples/cats_and_dogs.py` trains them, and `kills` an undisturbed run with a run that is killed
twice. Each writes its section of `RESULTS.md`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from measuring import Ratio, alternate, table, write_section
from PIL import Image

import trainer
from trainer import models
from trainer.launch.job import free_ports

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "cats_and_dogs.py"
IMAGES, SIDES = 2000, (240, 320)
BATCH, SIDE, ALPHA = 40, 32, 0.35
BAR = 1.05
SAVE_FREQ = 7  # batches
AHEAD = 4  # batches that the thread of the bare loop reads ahead


def make_photos(folder: pathlib.Path, count: int = IMAGES) -> None:
    """Writes smooth JPEGs of two classes, half each."""
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        path = folder / ("cats", "dogs")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        pixels.resize(SIDES[::-1], Image.Resampling.BICUBIC).save(path, quality=90)


# --- against a bare loop ----------------------------------------------------------------------------------------------


def batches(photos: pathlib.Path) -> trainer.data.RowDataset:
    """Returns the images as they are trained on: flipped at random, with values from -1 to 1."""
    images = trainer.data.image_dataset_from_directory(
        photos, image_size=SIDE, batch_size=None, seed=1, verbose=False)
    images = images.random_map(trainer.data.augmentation.RandomFlip("horizontal"))
    return images.map(lambda images, labels: (images / np.float32(127.5) - 1, labels)).batch(BATCH)


class BareLoop:
    """A careful user's loop in JAX: a thread that reads, and a jitted step that takes the old state's buffers."""

    def __init__(self, dataset: trainer.data.RowDataset):
        self._dataset, self._tx = dataset, optax.adam(1e-3)
        module = models.MobileNetV2(num_classes=2, alpha=ALPHA)

        def step(variables, opt_state, images, labels):
            def loss(params):
                probabilities, changed = module.apply({**variables, "params": params}, images, training=True,
                                                      mutable=["batch_stats"])
                losses = -jax.numpy.log(probabilities[jax.numpy.arange(len(labels)), labels])
                return losses.mean(), ((probabilities.argmax(-1) == labels).mean(), changed)

            (value, (accuracy, changed)), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
            updates, opt_state = self._tx.update(grads, opt_state)
            params = optax.apply_updates(variables["params"], updates)
            return {"params": params, **changed}, opt_state, (value, accuracy)

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._variables = dict(jax.jit(module.init)(jax.random.key(0), np.zeros((1, SIDE, SIDE, 3), np.float32)))
        self._opt_state = self._tx.init(self._variables["params"])

    def train(self, images: np.ndarray, labels: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Takes a step; returns its loss and accuracy."""
        self._variables, self._opt_state, logs = self._step(self._variables, self._opt_state, images, labels)
        return logs

    def epoch(self, number: int) -> None:
        """Trains on all images."""
        read: queue.Queue = queue.Queue(AHEAD)

        def reader() -> None:
            for batch in self._dataset.read_ahead(self._dataset.of_pass(number)):
                read.put(jax.device_put(batch))
            read.put(None)

        threading.Thread(target=reader, daemon=True).start()
        logs = []
        while (batch := read.get()) is not None:
            logs.append(self.train(*batch))
        jax.device_get(logs)


def measure_fit(rounds: int) -> str:
    """Measures the pipeline, the step, the loop over both, and `fit`; returns the section."""
    with tempfile.TemporaryDirectory() as folder:
        make_photos(pathlib.Path(folder))
        dataset = batches(pathlib.Path(folder))
        bare = BareLoop(dataset)
        batch = jax.device_put(next(iter(dataset)))
        with trainer.distribute.OneDeviceStrategy().scope():
            model = trainer.Model(models.MobileNetV2(num_classes=2, alpha=ALPHA))
            model.compile(optax.adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
        timings = alternate({
            "the pipeline alone": lambda number: [None for _ in dataset.read_ahead(dataset.of_pass(number))],
            "the steps alone": lambda number: jax.device_get([bare.train(*batch) for _ in range(len(dataset))]),
            "a bare loop over both": bare.epoch,
            "`fit`": lambda number: model.fit(dataset, initial_epoch=number, epochs=number + 1, verbose=0),
        }, rounds)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    loop = seconds["a bare loop over both"]
    rows = [[name, f"{IMAGES / statistics.median(taken):.0f}", Ratio.of(taken, loop)]
            for name, taken in seconds.items()]
    ratio = Ratio.of(seconds["`fit`"], loop)
    return f"""
An epoch of {IMAGES} JPEGs of {SIDES[0]}x{SIDES[1]} pixels, resized to {SIDE}x{SIDE} and flipped at random; MobileNetV2
with alpha={ALPHA}, Adam, batches of {BATCH}; {rounds} rounds in turn after one that warms up:
`python benchmarks/images.py fit`. Pipeline and steps share the cores, so that neither alone is a bar. The bare loop has
a thread that reads the same batches and a jitted step. `fit` is to take at most {BAR} times as long as that loop; it
took {ratio}.

{table(["", "images/s, median", "time to that of the bare loop"], rows)}"""


# --- workers ----------------------------------------------------------------------------------------------------------


def started(photos: str, core: int, batch: int, cluster: list[str], index: int) -> subprocess.Popen[str]:
    """Starts the example on one core, as a worker of a cluster or alone."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "XLA_FLAGS")}
    if cluster:
        task = {"type": "worker", "index": index}
        environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": task})
    command = [sys.executable, str(EXAMPLE), photos, "--image-size", str(SIDE), "--alpha", str(ALPHA), "--batch-size",
               str(batch), "--epochs", "2"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True,
                            preexec_fn=lambda: os.sched_setaffinity(0, {core}))


def images_per_sec(processes: list[subprocess.Popen[str]]) -> float:
    """Waits for processes; returns the sum of the rates that they print."""
    total = 0.0
    for process in processes:
        printed = process.communicate()[0].splitlines()
        if process.returncode:
            sys.exit(f"The example ended with exit code {process.returncode}.")
        total += ast.literal_eval(printed[-1])["images_per_sec"] if printed and printed[-1].startswith("{") else 0.0
    return total


def measure_workers(rounds: int) -> str:
    """Measures one worker, two independent workers and two workers of a job; returns the section."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("Two workers need two cores, and this process may use one.")
    # name -> batch, and how many processes in a job of their own
    turns = {"one worker": (BATCH, 1, 1), "two independent workers": (BATCH, 1, 2),
             "two workers, same global batch": (BATCH, 2, 2), "two workers, doubled global batch": (2 * BATCH, 2, 2)}
    rates: dict[str, list[float]] = {name: [] for name in turns}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(pathlib.Path(folder))
        for _ in range(rounds):
            for name, (batch, workers, processes) in turns.items():
                cluster = [f"127.0.0.1:{port}" for port in free_ports(2)] if workers == 2 else []
                rates[name].append(images_per_sec([
                    started(folder, core, batch, cluster, index) for index, core in enumerate(cores[:processes])]))
    one, limit, *_ = turns
    rows = [[name, f"{statistics.median(found):.1f}", Ratio.of(found, rates[one]), Ratio.of(found, rates[limit])]
            for name, found in rates.items()]
    return f"""
`examples/cats_and_dogs.py` on {IMAGES} JPEGs of {SIDES[0]}x{SIDES[1]} pixels at {SIDE}x{SIDE}; MobileNetV2 with
alpha={ALPHA}, each process on one core; the second of two epochs, {rounds} rounds in turn:
`python benchmarks/images.py workers`. Two independent workers are what the machine can give at
most. BatchNorm is that of the global batch, and costs a message for each of its 52 layers.

{table(["", "images/s, median", "to one worker", "to two independent workers"], rows)}"""


# --- kills ------------------------------------------------------------------------------------------------------------


def train(photos: str) -> None:
    """Trains for two epochs, from a backup if there is one, or until `KILL_AT` batches; writes weights and history."""
    model = trainer.Model(models.MobileNetV2(num_classes=2, alpha=ALPHA))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    killed_at = os.environ.get("KILL_AT")
    callbacks = [trainer.callbacks.BackupAndRestore("backup", save_freq=SAVE_FREQ),
                 *([trainer.testing.kill_at(int(killed_at))] if killed_at else [])]
    history = model.fit(batches(pathlib.Path(photos)), epochs=2, verbose=0, callbacks=callbacks).history
    np.savez("result.npz", *model.get_weights(), **{name: np.asarray(values) for name, values in history.items()})


def trained(photos: str, folder: str, kills: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Trains in a folder, in a process that is killed after so many of its batches, each time started again."""
    command = [sys.executable, __file__, "--train", photos]
    for kill in kills:
        process = subprocess.run(command, cwd=folder, env={**os.environ, "KILL_AT": str(kill)})
        if process.returncode != -signal.SIGKILL:
            sys.exit(f"The training was not killed, but ended with exit code {process.returncode}.")
    subprocess.run(command, cwd=folder, check=True)
    with np.load(pathlib.Path(folder) / "result.npz") as arrays:
        return dict(arrays)


def measure_kills(rounds: int) -> str:
    """Compares runs that are killed twice, at random, with an undisturbed run; returns the section."""
    steps = 2 * IMAGES // BATCH
    rng = np.random.default_rng()
    lines = []
    with tempfile.TemporaryDirectory() as photos:
        make_photos(pathlib.Path(photos))
        with tempfile.TemporaryDirectory() as folder:
            expected = trained(photos, folder, ())
        for _ in range(rounds):
            # Each process begins at the last backup.
            kills = tuple(int(kill) for kill in rng.integers(1, steps // 2 - SAVE_FREQ, 2))
            with tempfile.TemporaryDirectory() as folder:
                received = trained(photos, folder, kills)
            differ = [name for name in expected if expected[name].tobytes() != received[name].tobytes()]
            if differ or expected.keys() != received.keys():
                sys.exit(f"Killed after {kills} batches, these arrays differ: {differ}.")
            lines.append(f"after {kills[0]} batches of the first process and {kills[1]} of the second")
    return f"""
Two epochs of {IMAGES} JPEGs of {SIDES[0]}x{SIDES[1]} pixels at {SIDE}x{SIDE}, shuffled and flipped at random;
MobileNetV2 with alpha={ALPHA}, {steps} batches of {BATCH}, `BackupAndRestore(save_freq={SAVE_FREQ})`. Killed twice by
SIGKILL: {"; ".join(lines)}: `python benchmarks/images.py --rounds {rounds} kills`.

All {len(expected)} arrays, weights and history, are equal to the bit to those of the undisturbed run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = {"fit": ("fit and a bare loop", measure_fit), "workers": ("one worker and two", measure_workers),
                "kills": ("killed twice", measure_kills)}
    parser.add_argument("parts", nargs="*", choices=[*sections, []], default=[], help="all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", metavar="PHOTOS", help=argparse.SUPPRESS)  # `kills` runs this in processes
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    for part in options.parts or sections:
        title, measure = sections[part]
        write_section(f"A folder of images: {title}", measure(options.rounds))


if __name__ == "__main__":
    main()
