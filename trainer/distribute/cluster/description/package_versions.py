"""Installed versions that must be the same in all processes of a job."""

from __future__ import annotations

from importlib import metadata

COMPARED_PACKAGES = {  # name in messages -> distribution
    "trainer": "trainer-jax", "jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax"}


def package_versions() -> dict[str, str]:
    """Returns the installed versions that must be the same in all processes."""
    versions = {}
    for name, distribution in COMPARED_PACKAGES.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
