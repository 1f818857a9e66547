"""Installed versions that must be the same in all processes of a job."""

from __future__ import annotations

import functools
from importlib import metadata

COMPARED_PACKAGES = {  # name in messages -> distribution
    "trainer": "trainer-jax", "jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax"}


def package_versions() -> dict[str, str]:
    """Returns the installed versions that must be the same in all processes."""
    return {name: _version(distribution) for name, distribution in COMPARED_PACKAGES.items()}


@functools.cache  # each checkpoint has the versions, and the imported packages stay the same
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
