"""Logs whose values stay on the device until a value is read.

Owns `LazyLogs`, a dict and a JAX pytree. Knows nothing of devices: the loop provides the fetch function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey

from trainer.core.errors import near_hint

_PENDING = object()  # stands in the dict for a value that has not been fetched


class LazyLogs(dict):
    """A dict with known keys, which fetches all values when the first value is read.

    Access to keys (`in`, `len`, `keys()`, iteration) and assignment fetch nothing. The fetch keeps values that were
    assigned before it, and does not restore deleted keys. Copies, and the results of `|` and of `jax.tree.map`, are
    plain dicts.

    Args:
      keys: names of the logs.
      fetch: function without arguments that returns the value of each of `keys`; called at most once. It is released
        afterwards, together with the device memory that it references.
      begin: function that starts the work that `fetch` waits for; called at most once, before `fetch`. None if there
        is no such work.

    Raises:
      ValueError: at the first read, if the keys returned by `fetch` differ from `keys`.

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

    # The underlying dict has the keys from the start, so that C code sees the right length and keys. Only the methods
    # that reach a value are overridden.
    __slots__ = ("_announced", "_begin", "_fetch")

    def __init__(
        self, keys: Iterable[str], fetch: Callable[[], Mapping[str, Any]], begin: Callable[[], Any] | None = None
    ):
        self._announced = tuple(keys)
        super().__init__(dict.fromkeys(self._announced, _PENDING))
        self._fetch: Callable[[], Mapping[str, Any]] | None = fetch
        self._begin = begin

    def begin_fetch(self) -> None:
        """Starts the computation and the transfer of the values, so that a later read does not wait for later work."""
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

    def __missing__(self, key):
        known = list(self)
        needs_validation = str(key).startswith("val_") and not any(name.startswith("val_") for name in known)
        hint = ("A validation has it, at the end of an epoch: give `fit(..., validation_data=(x, y))`."
                if needs_validation else near_hint(str(key), known))
        raise KeyError(f"There is no log {key!r}. {hint}")

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
        # The override is needed although it equals dict's: `dict(logs)` and `**logs` copy the storage of a dict with
        # the inherited __iter__, including the pending marks. Otherwise they use keys() and __getitem__.
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
        # Used by copy.copy, copy.deepcopy and queues between processes.
        return dict, (self.copy(),)


def begin_fetch(logs: Mapping[str, Any]) -> None:
    """Starts the fetch of lazy logs (see `LazyLogs.begin_fetch`); does nothing for plain dicts."""
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
    """Returns `other` with lazy values fetched."""
    return other.copy() if isinstance(other, LazyLogs) else other
