"""Two modules with the same parameters: one for training, one for evaluation.

Owns the choice between them; their adapters own the computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.typing import DTypeLike

from trainer.core import errors
from trainer.core.modules.base import FunctionalModule, IsFrozen
from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.summary import CallObserver, ModuleLayer
from trainer.core.tree_paths import named_leaves
from trainer.core.types import Layout, PyTree


class TwoPhaseFunctional(FunctionalModule):
    """A module for training, and another module for all other calls, with the parameters and state of the first.

    Args:
      trained: the module for training, which owns the parameters.
      evaluated: the module for all other calls. Values that it holds itself are not used.
    """

    def __init__(self, trained: FunctionalModule, evaluated: FunctionalModule):
        self.name = trained.name
        self._trained, self._evaluated = trained, evaluated

    @property
    def initial_values(self) -> Any:
        return self._trained.initial_values

    def is_batch_statistic(self, path: str) -> bool:
        return self._trained.is_batch_statistic(path)

    @property
    def layouts(self) -> dict[str, Layout]:
        return self._trained.layouts

    @property
    def embeddings(self) -> frozenset[str]:
        return self._trained.embeddings

    @property
    def sows_losses(self) -> bool:
        return self._trained.sows_losses

    def sown_losses(self, model_state: dict) -> list[jax.Array]:
        return self._trained.sown_losses(model_state)

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class.

        Raises:
          ValueError: the modules have different parameters, or the module for evaluation has state that the other
            lacks.
        """
        params, model_state, outputs = self._trained.init(key, inputs, initial_values)
        other_params, other_state, _ = jax.eval_shape(lambda: self._evaluated.init(key, inputs))
        differs = _differing(params, other_params) + _differing(other_params, params)
        differs += _differing(other_state, model_state)
        if differs:
            names = "; ".join(errors.listed("differ", sorted(set(differs))))
            raise ValueError(f"`eval_module` must have the parameters and the state of `module`. {names}. Make both by "
                             "the same class.")
        return params, model_state, outputs

    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: bool = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        module = self._trained if training else self._evaluated
        return module.apply(params, model_state, inputs, training=training, make_key=make_key, batch_norm=batch_norm,
                            remat=remat, compute_dtype=compute_dtype, is_frozen=is_frozen)

    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into both modules."""
        self._trained.absorb(params, model_state)
        self._evaluated.absorb(params, model_state)

    def variable_identities(self) -> Iterable[int]:
        return self._trained.variable_identities()

    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        return self._trained.observe_calls(inputs, observer)

    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        return self._trained.layers(inputs)

    def layer_path(self, path: str) -> str:
        return self._trained.layer_path(path)


def _differing(these: PyTree, others: PyTree) -> list[str]:
    """Returns the names of the leaves that another tree lacks, or has with another shape or dtype."""
    known = named_leaves(others)
    return [name for name, leaf in named_leaves(these).items()
            if name not in known or (known[name].shape, known[name].dtype) != (leaf.shape, leaf.dtype)]
