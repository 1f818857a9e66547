"""Names of the job's processes in messages, taken from the cluster's description, such as "chief" or "rank 1"."""

from __future__ import annotations

from collections.abc import Sequence

_names: tuple[str, ...] = ()


def set_process_names(names: Sequence[str]) -> None:
    """Sets the names of all processes, in the order of their numbers."""
    global _names
    _names = tuple(names)


def process_name(number: int) -> str:
    """Returns a process's name.

    >>> process_name(1)
    'worker 1'
    """
    return _names[number] if number < len(_names) else f"worker {number}"
