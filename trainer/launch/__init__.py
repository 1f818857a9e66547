"""The local launcher: runs a script as the processes of a cluster on one machine. It does not import JAX."""

from trainer.launch.command import main

__all__ = ["main"]
