"""The interface of every adapter.

It must not know Linen or NNX.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.typing import DTypeLike

from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.remat_policies import Remat
from trainer.core.modules.summary import CallObserver, CallRecorder, LayerRow, ModuleLayer
from trainer.core.types import Layout, PyTree

IsFrozen = Callable[[str], bool]
"""Whether the parameter of a path, such as "encoder/Dense_0/kernel", is frozen."""

LOSSES, INTERMEDIATES = "losses", "intermediates"
"""Collections that begin empty in each call: terms of the loss, as in Keras's `add_loss`, and other values."""


class FunctionalModule(abc.ABC):
    """A module as pure functions of its parameters and its state.

    Parameters and state are nested dicts with string keys and arrays as leaves.

    Attributes:
      name: name of the module in messages and tables.
      names: names of the modules in a dict of modules; empty for a single module.
    """

    name: str
    names: tuple[str, ...] = ()
    _known_layers: tuple[Any, list[ModuleLayer]] | None = None

    @property
    def initial_values(self) -> Any:
        """A tree of the arrays that the user's own objects already hold; empty for modules that hold none.

        Pass it to `init` as an argument of the compiled function, so that the values do not become constants.
        """
        return ()

    @abc.abstractmethod
    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> tuple[dict, dict, Any]:
        """Returns new parameters, new state and the outputs for `inputs`. Pure, and can be compiled.

        Args:
          key: a typed PRNG key of shape `()`.
          inputs: one batch, as `apply` takes it.
          initial_values: value of `self.initial_values`; read at the call by default.

        Returns:
          `(params, model_state, outputs)`. No array aliases an array of `initial_values`.
        """

    @abc.abstractmethod
    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None) -> tuple[Any, dict]:
        """Returns the outputs and the new state.

        Args:
          params: parameters, structured as in the result of `init`.
          model_state: state, structured as in the result of `init`.
          inputs: one batch: an array, a tuple of arguments or a dict of keyword arguments.
          training: whether dropout is active, and batch statistics are used and recorded.
          make_key: returns the key of a random stream. Called only for streams that the module asks for (Linen) or
            holds (NNX).
          batch_norm: "global" for statistics over the whole batch, "per_replica" for statistics over the rows of each
            replica.
          remat: whether gradients in training use less memory and a second forward pass, by a policy; `remat.py` says
            for which layers. Outputs, state and gradients are the same.
          compute_dtype: dtype of layers without their own dtype; None to infer it from the values.
          is_frozen: whether a parameter is frozen. BatchNorm layers with only frozen parameters normalize by their
            running averages in training too, and do not update them. None if all parameters are trained.

        Returns:
          `(outputs, model_state)`. The state is unchanged outside of training. Collections sown in this call ("losses",
          "intermediates" and others) are added to it.
        """

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs of the module's call, which the keys of a dict of inputs may be; empty if unknown."""
        return ()

    def is_batch_statistic(self, path: str) -> bool:
        """Returns whether a path of the state is a running average of BatchNorm, or is kept along with the averages."""
        return False

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layouts of the parameters with sharding annotations, by path; known after initialization."""
        return {}

    @property
    def embeddings(self) -> frozenset[str]:
        """Paths of the tables of Linen's `nn.Embed` layers; known after initialization."""
        return frozenset()

    @property
    def param_variables(self) -> Mapping[tuple[Any, ...], Any]:
        """The `nnx.Param` variables of NNX modules by their paths, with shapes for values; empty for other modules."""
        return {}

    @property
    def trained_only(self) -> tuple[str, ...]:
        """Patterns of the parameters that are trained, while all others are frozen; empty if all are trained."""
        return ()

    def check_params(self, params: PyTree) -> None:
        """Raises ValueError if the parameters, or their shapes, lack a parameter that the user's arguments name."""
        return

    @property
    def sows_losses(self) -> bool:
        """Whether the module has sown into "losses" since its initialization."""
        return False

    def sown_losses(self, model_state: dict) -> list[jax.Array]:
        """Returns the losses that the module has sown, from the state returned by `apply`."""
        return jax.tree.leaves(model_state.get(LOSSES, {}))

    @abc.abstractmethod
    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        """Calls the module without computing or allocating anything, and notifies an observer of each layer's call.

        Args:
          inputs: one batch, or the same structure of `jax.ShapeDtypeStruct`.
          observer: receives the calls.

        Returns:
          The shapes of the parameters and the shapes of the non-trainable values, in dicts of the same structure.
        """

    def summary_rows(self, inputs: PyTree) -> list[LayerRow]:
        """Returns a row per layer, in the order of the calls, without computing or allocating anything.

        Args:
          inputs: as in `observe_calls`.
        """
        recorder = CallRecorder(inputs)
        return recorder.rows(*self.observe_calls(inputs, recorder))

    def layers(self, inputs: PyTree = None) -> list[ModuleLayer]:
        """Returns the module itself and all layers in it in the order of the calls, outer layers before inner layers.

        Args:
          inputs: as in `summary_rows`. None returns the layers that are known without a call; for a Linen module, only
            the layers of a stack.

        Raises:
          RuntimeError: `inputs` is None, and no layers are known.
        """
        leaves, structure = jax.tree.flatten(inputs)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if self._known_layers is None or self._known_layers[0] != key:  # tracing a large module is slow
            self._known_layers = key, self.find_layers(inputs)
        return self._known_layers[1]

    @abc.abstractmethod
    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        """Returns the layers as `layers` does, without its cache."""

    def layer_path(self, path: str) -> str:
        """Returns the path of a leaf of the state within its layer: without a collection, like parameter paths.

        >>> from flax import linen as nn
        >>> from trainer.core.modules import as_functional
        >>> as_functional(nn.BatchNorm()).layer_path("batch_stats/BatchNorm_0/mean")
        'BatchNorm_0/mean'
        """
        return path

    @abc.abstractmethod
    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into the user's own module, if that holds values: NNX does, Linen does not."""

    def variable_identities(self) -> Iterable[int]:
        """Yields the `id` of each variable that the user's own module holds; nothing for modules that hold none."""
        return ()


def key_for(key: jax.Array, name: str) -> jax.Array:
    """Returns a key that depends on `key` and on `name`, but not on the order of names."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
