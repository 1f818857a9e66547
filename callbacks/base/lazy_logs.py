"""Logs whose values stay on the device until a value is read.

Owns `LazyLogs`, a dict and a JAX pytree. It knows nothing of devices: what fetching means is the loop's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey

_PENDING = object()  # stands in the dict for a value that has not been fetched


class LazyLogs(dict):
    """A dict with known keys, whose values are fetched, all at once, when the first value is read.

    Asking for keys (`in`, `len`, `keys()`, iteration) and assigning values fetch nothing. Values assigned before the
    fetch are kept, and keys deleted before it stay away. Copies, and the results of `|` and of `jax.tree.map`, are
    plain dicts.

    Args:
      keys: the names of the logs.
      fetch: called at most once, without arguments; returns the value of each of `keys`. It is let go of afterwards,
        and with it whatever device memory it refers to.
      begin: called at most once, before `fetch`; begins what `fetch` then waits for. None where nothing can be begun.

    Raises:
      ValueError: at the first read, if `fetch` returns other keys than were announced.

    Example:

    >>> logs = LazyLogs(["loss"], lambda: {"loss": print("fetched") or 0.5})
    >>> "loss" in logs, len(logs)
    (True, 1)
    >>> logs["loss"]
    fetched
    0.5
    >>> logs["loss"]
    0.5
    """

    # The keys are in the underlying dict from the start, so that whatever C code asks of it (its length, its keys) is
    # right; only the ways to reach a value are overridden.
    __slots__ = ("_announced", "_begin", "_fetch")

    def __init__(
        self, keys: Iterable[str], fetch: Callable[[], Mapping[str, Any]], begin: Callable[[], Any] | None = None
    ):
        self._announced = tuple(keys)
        super().__init__(dict.fromkeys(self._announced, _PENDING))
        self._fetch: Callable[[], Mapping[str, Any]] | None = fetch
        self._begin = begin

    def begin_fetch(self) -> None:
        """Has the values computed and sent now, so that a later read does not wait for what begins in between."""
        begin, self._begin = self._begin, None
        if begin is not None and self._fetch is not None:
            begin()

    def _fetched(self) -> LazyLogs:
        if self._fetch is not None:
            values = self._fetch()
            if set(values) != set(self._announced):
                raise ValueError(f"`fetch` returned the logs {sorted(values)}. Expected: {sorted(self._announced)}.")
            for key, value in values.items():
                if super().get(key) is _PENDING:
                    super().__setitem__(key, value)
            self._fetch = self._begin = None
        return self

    def __getitem__(self, key):
        return dict.__getitem__(self._fetched(), key)

    def get(self, key, default=None):
        return dict.get(self._fetched(), key, default)

    def items(self):
        return dict.items(self._fetched())

    def values(self):
        return dict.values(self._fetched())

    def pop(self, key, *default):
        return dict.pop(self._fetched(), key, *default)

    def popitem(self):
        return dict.popitem(self._fetched())

    def setdefault(self, key, default=None):
        return dict.setdefault(self._fetched(), key, default)

    def copy(self) -> dict:
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        # Overridden, though it does what dict does: `dict(logs)` and `**logs` copy the storage of a dict with the
        # inherited __iter__ and would find the pending marks there; otherwise they go through keys() and __getitem__.
        return super().__iter__()

    def __eq__(self, other):
        return dict.__eq__(self._fetched(), _plain(other))

    def __ne__(self, other):
        return dict.__ne__(self._fetched(), _plain(other))

    def __or__(self, other):
        return self.copy() | other

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self):
        # What copy.copy, copy.deepcopy and queues between processes use.
        return dict, (self.copy(),)


def begin_fetch(logs: Mapping[str, Any]) -> None:
    """Has lazy logs computed and sent now (see `LazyLogs.begin_fetch`); plain dicts are there already."""
    if isinstance(logs, LazyLogs):
        logs.begin_fetch()


def _flatten(logs: LazyLogs) -> tuple[list[Any], tuple[str, ...]]:
    keys = tuple(sorted(logs))
    return [logs[key] for key in keys], keys


def _flatten_with_keys(logs: LazyLogs) -> tuple[list[tuple[DictKey, Any]], tuple[str, ...]]:
    values, keys = _flatten(logs)
    return list(zip(map(DictKey, keys), values, strict=True)), keys


def _unflatten(keys: tuple[str, ...], values: Iterable[Any]) -> Any:
    return dict(zip(keys, values, strict=True))


jax.tree_util.register_pytree_with_keys(LazyLogs, _flatten_with_keys, _unflatten, _flatten)


def _plain(other: object) -> Any:
    """Returns `other`, with its values fetched where they are lazy."""
    return other.copy() if isinstance(other, LazyLogs) else other
