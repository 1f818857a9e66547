"""Exits with 0 if JAX sees a GPU, and with 1 otherwise."""

import sys

import jax

if __name__ == "__main__":
    sys.exit(jax.default_backend() != "gpu")
