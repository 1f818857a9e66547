"""Prints the host memory that a load of Hugging Face's weights takes beside the weights themselves, in MB.

Run with the folder, on Linux; `python -m tests.support.load_of_hf_weights FOLDER --make MB FILE_MB` makes a Llama of
about that many megabytes in it first, in files of that size.
"""

import pathlib
import resource
import sys
import threading

import jax
import numpy as np

import trainer
from trainer import models


def make(folder: str, size_mb: int, file_mb: int) -> None:
    """Writes a random Llama of at most 2 GB per 7 layers."""
    width = 2048 if size_mb >= 1000 else 512
    layer_bytes = 4 * width * (2 * width + 2 * width + 3 * 4 * width)
    module = models.Llama(vocab_size=1024, d_model=width, num_heads=8, mlp_dim=4 * width,
                          num_layers=max(1, int(size_mb * 1e6 / layer_bytes)))
    model = trainer.Model(module)
    model.build(np.zeros((1, 8), np.int32))
    models.save_hf_weights(model, folder, max_file_bytes=file_mb * 10**6)


def resident_mb() -> float:
    """Returns the resident memory of this process now."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def extra_mb(folder: str) -> float:
    """Returns the peak of the memory during a load, beyond the memory before it and the arrays that are loaded."""
    model = trainer.Model(models.from_hf(folder))
    model.build(np.zeros((1, 8), np.int32))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state.params)) / 1e6
    before, peak = resident_mb(), 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, resident_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    models.load_hf_weights(model, folder)
    ended.set()
    watcher.join()
    # All of the process's life: its largest moment may have been the building.
    peak = max(peak, resident_mb())
    print(f"before {before:.0f}, peak {peak:.0f}, weights {size:.0f}, files "
          f"{max(path.stat().st_size for path in pathlib.Path(folder).glob('*.safetensors')) / 1e6:.0f}, getrusage "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f}", file=sys.stderr)
    return peak - before - size


if __name__ == "__main__":
    if "--make" in sys.argv:
        make(sys.argv[1], *map(int, sys.argv[3:]))
    else:
        print(f"{extra_mb(sys.argv[1]):.0f}")
