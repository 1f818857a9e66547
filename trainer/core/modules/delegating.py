"""A module that leaves to another module all that a subclass does not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from trainer.core.modules.base import FunctionalModule
from trainer.core.modules.summary import CallObserver, ModuleLayer
from trainer.core.types import Layout, PyTree


class DelegatingFunctional(FunctionalModule):
    """A module with the parameters and the state of another module. Subclasses define `apply`.

    Args:
      owner: the other module.
    """

    def __init__(self, owner: FunctionalModule):
        self.name = owner.name
        self._owner = owner

    @property
    def initial_values(self) -> Any:
        return self._owner.initial_values

    def is_batch_statistic(self, path: str) -> bool:
        return self._owner.is_batch_statistic(path)

    @property
    def layouts(self) -> dict[str, Layout]:
        return self._owner.layouts

    @property
    def embeddings(self) -> frozenset[str]:
        return self._owner.embeddings

    @property
    def param_variables(self) -> Mapping[tuple[Any, ...], Any]:
        return self._owner.param_variables

    @property
    def trained_only(self) -> tuple[str, ...]:
        return self._owner.trained_only

    def check_params(self, params: PyTree) -> None:
        self._owner.check_params(params)

    @property
    def sows_losses(self) -> bool:
        return self._owner.sows_losses

    def sown_losses(self, model_state: dict) -> list[jax.Array]:
        return self._owner.sown_losses(model_state)

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        return self._owner.init(key, inputs, initial_values)

    def absorb(self, params: dict, model_state: dict) -> None:
        self._owner.absorb(params, model_state)

    def variable_identities(self) -> Iterable[int]:
        return self._owner.variable_identities()

    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        return self._owner.observe_calls(inputs, observer)

    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        return self._owner.layers(inputs)

    def layer_path(self, path: str) -> str:
        return self._owner.layer_path(path)
