"""Several optimizers by the name of the module that each of them updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.optimizers.base import Optimizer


class NamedOptimizers(Mapping[str, Optimizer]):
    """A mapping from module names to optimizers that hashes by identity, so that it can be a pytree's static part.

    Example:
      >>> from trainer import optimizers
      >>> list(NamedOptimizers({"generator": optimizers.get("adam")}))
      ['generator']
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]):
        self._optimizers = dict(optimizers)

    def __getitem__(self, name: str) -> Optimizer:
        return self._optimizers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
