"""Versions of packages that are known to fail together, although their own requirements allow them.

Each row was seen: the two packages were installed in these versions, and the work failed.
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.tools.command_line.findings import Status


class KnownFailure(NamedTuple):
    """Versions of two packages that fail together.

    Attributes:
      package, versions: a package, and a specifier of its versions; "" for all.
      beside, other_versions: the other package, likewise.
      status: "problem" if nothing can be trained, else "warning".
      consequence: the failure.
      fix: requirements to install.
    """

    package: str
    versions: str
    beside: str
    other_versions: str
    status: Status
    consequence: str
    fix: tuple[str, ...]


KNOWN_FAILURES = (
    KnownFailure("flax", "<0.12.1", "jax", ">=0.10", "problem", "`import flax` raises ImportError", ("flax>=0.12.1",)),
    KnownFailure("flax", ">=0.12.1,<0.12.10", "jax", ">=0.11", "problem", "`import flax` raises AttributeError",
                 ("flax>=0.12.10",)),
    KnownFailure("jax2onnx", "<0.17", "jax", ">=0.11,<0.12", "warning", '`export(format="onnx")` raises ValueError',
                 ("jax2onnx>=0.17",)),
    # Seen with 0.12.5 to 0.17.1, the newest.
    KnownFailure("jax2onnx", "<=0.17.1", "jax", ">=0.12", "warning", '`export(format="onnx")` raises ValueError',
                 ("jax2onnx>=0.17", "jax<0.12")),
    # Seen with 2.21.0, the newest, and JAX 0.11.2 and 0.12.0.1; JAX 0.10.2, 0.11.0 and 0.11.1 work.
    KnownFailure("tensorflow", "<=2.21.0", "jax", ">=0.11.2", "warning",
                 'what `export(format="saved_model")` writes cannot be run', ("jax<0.11.2",)),
)
