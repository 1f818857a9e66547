"""Checks of the numbers on GPUs: each check is tried by itself, and a failed check stops no other."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import jax
import numpy as np
from gpu import small_models
from gpu.context import Context

import trainer
from trainer import distribute
from trainer.testing import Kill, assert_resumes_exactly, assert_strategies_equal

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
# Pages, and how many of their Python blocks run, one after another: those that any number of devices will do for.
PAGES = {"README.md": 1, "docs/custom_training.md": 7, "docs/sharding.md": 1, "docs/large_batches.md": 4,
         "docs/saving.md": 3, "docs/speed.md": 1}
PROCESS_SECS = 150.0
MOST_BESIDE = 4  # checks in processes of their own at a time

Check = Callable[[], str | None]  # raises if something is wrong; may return details


class EveryBatch(trainer.callbacks.Callback):
    """Sees every batch, so that each is an execution of its own."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def run(context: Context) -> None:
    """Makes all checks.

    Raises:
      RuntimeError: at the end, if a check failed.
    """
    failed = []
    with concurrent.futures.ThreadPoolExecutor(max(1, min(MOST_BESIDE, (os.cpu_count() or 1) // 2))) as pool:
        beside = {name: pool.submit(_tried, check) for name, check in _checks_in_processes(context.tiny)}
        for name, check in _checks_here(context.tiny):
            failed += _record(context, name, *_tried(check))
        for name, tried in beside.items():
            failed += _record(context, name, *tried.result())
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _tried(check: Check) -> tuple[bool, str]:
    """Returns whether a check passed, and its details."""
    try:
        return True, check() or ""
    except Exception as error:
        text = str(error) or type(error).__name__
        return False, text[:500] + (" ... " + text[-1500:] if len(text) > 2000 else "")


def _record(context: Context, name: str, passed: bool, text: str) -> list[str]:
    context.results.check(name, passed, text)
    return [] if passed else [name]


def _names(tiny: bool) -> tuple[str, ...]:
    return ("mlp",) if tiny else small_models.NAMES


def _checks_here(tiny: bool) -> Iterator[tuple[str, Check]]:
    """Yields the checks that use this process's devices."""
    for page in list(PAGES)[:2] if tiny else PAGES:
        yield page, lambda page=page: _run_blocks(page)
    for name in _names(tiny):
        yield f"{name}: fused and single steps, the same bits", lambda name=name: _fused_and_single(name)
    for precision in ("mixed_bfloat16", "mixed_float16"):
        for name in _names(tiny):
            yield f"{name}: {precision} trains as float32", lambda name=name, precision=precision: _trains(
                name, precision)
    for text, strategy in _strategies():
        yield f"{text}: the numbers of one device", lambda strategy=strategy: _equals_one_device(
            "mlp" if tiny else "convnet", strategy)


def _checks_in_processes(tiny: bool) -> Iterator[tuple[str, Check]]:
    """Yields the checks that only start processes and wait for them."""
    for name in _names(tiny):
        yield f"{name}: resumed and undisturbed, the same bits", lambda name=name: _resumes(name, tiny)
    workers = min(2, jax.local_device_count())
    script = str(FOLDER / "in_processes.py")
    yield f"MultiWorkerMirroredStrategy, {workers} processes: the numbers of one device", lambda: _succeeds(
        "-m", "trainer.launch", "--workers", str(workers), script, "MultiWorkerMirroredStrategy")
    yield "ParameterServerStrategy, one worker: the numbers of one device", lambda: _succeeds(
        script, "ParameterServerStrategy", "num_workers=1", "num_ps=1")


def _run_blocks(page: str) -> None:
    folder, names = os.getcwd(), {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
            for block in blocks[:PAGES[page]]:
                exec(compile(block, page, "exec"), names)
        finally:
            os.chdir(folder)


def _weights(name: str, callbacks=(), **options) -> list[np.ndarray]:
    model = small_models.new_model(name, deterministic=True, **options)
    model.fit(*small_models.data(name, 90), batch_size=16, epochs=3, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def _fused_and_single(name: str) -> str:
    """Groups that are cut for a callback have the same bits. A program of one step may round differently."""
    fused = _weights(name, steps_per_execution=4)
    for one, other in zip(_weights(name, [EveryBatch()], steps_per_execution=4), fused, strict=True):
        np.testing.assert_array_equal(one, other)
    apart = 0.0
    for one, other in zip(_weights(name, steps_per_execution=1), fused, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=1e-3)
        apart = max(apart, float(np.abs(one - other).max()))
    return f"steps_per_execution=1: {'the same bits' if apart == 0 else f'apart by up to {apart:.1g}'}"


def _resumes(name: str, tiny: bool) -> None:
    kills = [Kill(step=5)] if tiny else [Kill(step=5), Kill(save=1)]
    assert_resumes_exactly([sys.executable, str(FOLDER / "training.py"), name], kills, timeout_secs=PROCESS_SECS)


def _trains(name: str, precision: str) -> str:
    losses = []
    for choice in (None, precision):
        model = small_models.new_model(name, precision=choice)
        losses.append(model.fit(*small_models.data(name, 160), batch_size=16, epochs=8, verbose=0).history["loss"])
    expected, received = losses
    text = f"loss from {received[0]:.4f} to {received[-1]:.4f}, in float32 from {expected[0]:.4f} to {expected[-1]:.4f}"
    # float16 skips the first steps, until its loss scale fits.
    assert received[0] - received[-1] > 0.8 * (expected[0] - expected[-1]) > 0, text
    return text


def _strategies() -> Iterator[tuple[str, Callable[[], distribute.Strategy]]]:
    count = jax.local_device_count()
    split = 2 if count % 2 == 0 else 1
    yield "MirroredStrategy", distribute.MirroredStrategy
    yield "FullyShardedStrategy", distribute.FullyShardedStrategy
    yield 'FullyShardedStrategy(level="optimizer")', lambda: distribute.FullyShardedStrategy(level="optimizer")
    yield f"ModelParallelStrategy over {split} devices", lambda: distribute.ModelParallelStrategy(
        {"replica": count // split, "model": split}, layout_map={"hidden/kernel": (None, "model")})
    yield "CentralStorageStrategy", distribute.CentralStorageStrategy


def _equals_one_device(name: str, strategy: Callable[[], distribute.Strategy]) -> str:
    assert_strategies_equal(lambda: small_models.new_model(name), small_models.data(name, 90), [strategy],
                            batch_size=16, epochs=2)
    return f"{jax.local_device_count()} devices"


def _succeeds(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=PROCESS_SECS)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-1500:]}")
