"""Prints the host memory that a load of Hugging Face's weights takes beside the weights of before and after, in MB.

Run with a folder, on Linux and on a CPU, whose devices have their arrays in host memory, too. `python -m
tests.support.load_of_hf_weights FOLDER --make MB FILE_MB` only writes a Llama of about so many megabytes there, in
files of that size. With 2000 and 500, the load took 85 MB.
"""

import ctypes
import pathlib
import resource
import sys
import threading

import jax
import numpy as np

import trainer
from trainer import models


def make(folder: str, size_mb: int, file_mb: int) -> None:
    """Writes a random Llama of few and large layers, which compiles fast."""
    width = 2048 if size_mb >= 1000 else 1024
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
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(model.state.params))) / 1e6
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns what building the model took
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
    return peak - before - size


if __name__ == "__main__":
    if "--make" in sys.argv:
        make(sys.argv[1], *map(int, sys.argv[3:]))
    else:
        print(f"{extra_mb(sys.argv[1]):.0f}")
