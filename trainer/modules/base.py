"""What every adapter offers.

Owns the functional interface. It must not know Linen or NNX.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax

from trainer.core.types import Layout, PyTree
from trainer.modules.calling.call_arguments import MakeKey
from trainer.modules.summary import CallObserver, CallRecorder, LayerRow, ModuleLayer

IsFrozen = Callable[[str], bool]
"""Tells by its path, such as "encoder/Dense_0/kernel", whether a parameter stays as it is."""

LOSSES, INTERMEDIATES = "losses", "intermediates"
"""Collections that begin empty in each call: terms of the loss, as Keras's `add_loss` has them, and other values."""


class FunctionalModule(abc.ABC):
    """A module as pure functions of its parameters and its state.

    Parameters and state are nested dicts with string keys and arrays as leaves.

    Attributes:
      name: what the module is called in messages and tables.
      names: the names of the modules in a dict of them; empty for a single module.
    """

    name: str
    names: tuple[str, ...] = ()
    _known_layers: tuple[Any, list[ModuleLayer]] | None = None

    @property
    def initial_values(self) -> Any:
        """A tree of the arrays that the user's own objects hold already; empty for modules that hold none.

        Give it to `init` as an argument of the compiled function, so that the values are not compiled in as constants.
        """
        return ()

    @abc.abstractmethod
    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """Returns new parameters, new state and the outputs for `inputs`; pure, and can be compiled.

        Args:
          key: a typed PRNG key of shape `()`.
          inputs: one batch, as `apply` takes it.
          initial_values: what `self.initial_values` gave; by default it is read now.

        Returns:
          `(params, model_state, outputs)`. No array aliases one of `initial_values`.
        """

    @abc.abstractmethod
    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: bool = False, compute_dtype: Any = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        """Returns the outputs and the new state.

        Args:
          params: parameters, structured as `init` returned them.
          model_state: state, structured as `init` returned it.
          inputs: one batch: an array, a tuple of arguments or a dict of keyword arguments.
          training: whether dropout drops and batch statistics are used and recorded.
          make_key: gives the key of a random stream; only called for streams that the module asks for
            (Linen) or holds (NNX).
          batch_norm: "global" for statistics over the whole batch, "per_replica" over the rows of each replica.
          remat: in training, whether gradients are computed with less memory and a second forward pass; see `remat.py`
            for which layers. Outputs, state and gradients are the same.
          compute_dtype: the dtype of layers that have none of their own; None to leave it to the values they meet.
          is_frozen: which parameters stay as they are. BatchNorm layers with no others normalize by their running
            averages in training too, and leave them as they are. None if all parameters are trained.

        Returns:
          `(outputs, model_state)`; when not training, the state is returned as it was given. Beside the state stands
          what the module has sown in this call, by collection: "losses", "intermediates" and others.
        """

    def is_batch_statistic(self, path: str) -> bool:
        """Returns whether the state of a path is BatchNorm's running averages, or what modules keep along with them."""
        return False

    @property
    def layouts(self) -> dict[str, Layout]:
        """How annotations of the module split parameters, by their paths; known once it is initialised."""
        return {}

    @property
    def embeddings(self) -> frozenset[str]:
        """The paths of the tables of Linen's `nn.Embed` layers; known once the module is initialised."""
        return frozenset()

    @property
    def sows_losses(self) -> bool:
        """Whether the module was seen to sow into "losses", since it was initialised."""
        return False

    def sown_losses(self, model_state: dict) -> list[jax.Array]:
        """Returns the losses that the module has sown, from the state that `apply` returned."""
        return jax.tree.leaves(model_state.get(LOSSES, {}))

    @abc.abstractmethod
    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        """Calls the module without computing or allocating anything, and tells an observer of each layer's call.

        Args:
          inputs: one batch, or the same structure of `jax.ShapeDtypeStruct`.
          observer: receives the calls.

        Returns:
          The shapes of the parameters, and those of the values that are not trained, in dicts of the same structure.
        """

    def summary_rows(self, inputs: PyTree) -> list[LayerRow]:
        """Returns a row per layer, in the order of the calls, without computing or allocating anything.

        Args:
          inputs: as in `observe_calls`.
        """
        recorder = CallRecorder(inputs)
        return recorder.rows(*self.observe_calls(inputs, recorder))

    def layers(self, inputs: PyTree = None) -> list[ModuleLayer]:
        """Returns the module itself and all layers in it, outer layers before the layers in them, as they are called.

        Args:
          inputs: as in `summary_rows`. None for what is known without a call: of a Linen module the layers of a stack.

        Raises:
          RuntimeError: without `inputs`, if nothing is known.
        """
        leaves, structure = jax.tree.flatten(inputs)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if self._known_layers is None or self._known_layers[0] != key:  # a call of a large module takes long to trace
            self._known_layers = key, self.find_layers(inputs)
        return self._known_layers[1]

    @abc.abstractmethod
    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        """Returns what `layers` does."""

    def layer_path(self, path: str) -> str:
        """Returns the path of a leaf of the state as its layer has it: without a collection, as parameters are named.

        >>> from flax import linen as nn
        >>> from trainer.modules import as_functional
        >>> as_functional(nn.BatchNorm()).layer_path("batch_stats/BatchNorm_0/mean")
        'BatchNorm_0/mean'
        """
        return path

    @abc.abstractmethod
    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into the user's own module, if that holds values: NNX does, Linen does not."""

    def variable_identities(self) -> Iterable[int]:
        """Yields the `id` of each variable that the user's own module holds; none for modules that hold none."""
        return ()


def key_for(key: jax.Array, name: str) -> jax.Array:
    """Returns a key that depends on `key` and on `name`, but not on the order of any names."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
