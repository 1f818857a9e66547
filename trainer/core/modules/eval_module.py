"""Two modules with the same parameters: one for training, one for evaluation.

Owns the choice between them; their adapters own the computation.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from trainer.core import errors
from trainer.core.modules.base import FunctionalModule, IsFrozen
from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.delegating import DelegatingFunctional
from trainer.core.modules.remat_policies import Remat
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree


class TwoPhaseFunctional(DelegatingFunctional):
    """A module for training, and another module for all other calls, with the parameters and state of the first.

    Args:
      trained: the module for training, which owns the parameters.
      evaluated: the module for all other calls. Values that it holds itself are not used.

    Attributes:
      trained, evaluated: the arguments.
    """

    def __init__(self, trained: FunctionalModule, evaluated: FunctionalModule):
        super().__init__(trained)
        self.trained, self.evaluated = trained, evaluated

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """See the base class.

        Raises:
          ValueError: the modules have different parameters, or the module for evaluation has state that the other
            lacks.
        """
        params, model_state, outputs = self.trained.init(key, inputs, initial_values)
        other_params, other_state, _ = jax.eval_shape(lambda: self.evaluated.init(key, inputs))
        differs = _differing(params, other_params) + _differing(other_params, params)
        differs += _differing(other_state, model_state)
        if differs:
            names = "; ".join(errors.listed("differ", sorted(set(differs))))
            raise ValueError(f"`eval_module` must have the parameters and the state of `module`. {names}. Make both by "
                             "the same class.")
        return params, model_state, outputs

    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        module = self.trained if training else self.evaluated
        return module.apply(params, model_state, inputs, training=training, make_key=make_key, batch_norm=batch_norm,
                            remat=remat, compute_dtype=compute_dtype, is_frozen=is_frozen)

    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into both modules."""
        self.trained.absorb(params, model_state)
        self.evaluated.absorb(params, model_state)


def _differing(these: PyTree, others: PyTree) -> list[str]:
    """Returns the names of the leaves that another tree lacks, or has with another shape or dtype."""
    known = named_leaves(others)
    return [name for name, leaf in named_leaves(these).items()
            if name not in known or (known[name].shape, known[name].dtype) != (leaf.shape, leaf.dtype)]
