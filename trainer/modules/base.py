"""What every adapter offers, and how a batch becomes the arguments of a module's `__call__`.

Owns the functional interface and the calling convention. It must not know Linen or NNX.
"""

from __future__ import annotations

import abc
import inspect
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax

from trainer.core.types import PyTree
from trainer.modules.summary import LayerRow

MakeKey = Callable[[str], jax.Array]
"""Gives the PRNG key of a random stream in this step on this replica."""

IsFrozen = Callable[[str], bool]
"""Tells by its path, such as "encoder/Dense_0/kernel", whether a parameter stays as it is."""

LOSSES, INTERMEDIATES = "losses", "intermediates"
"""Collections that begin empty in each call: terms of the loss, as Keras's `add_loss` has them, and other values."""

FLAGS = {"training": True, "train": True, "is_training": True, "deterministic": False, "use_running_average": False}
"""The parameter names that tell a module whether it is being trained, with the value that each has in training."""


class FunctionalModule(abc.ABC):
    """A module as pure functions of its parameters and its state.

    Parameters and state are nested dicts with string keys and arrays as leaves.

    Attributes:
      name: what the module is called in messages and tables.
      names: the names of the modules in a dict of them; empty for a single module.
    """

    name: str
    names: tuple[str, ...] = ()

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
          batch_norm: "global" for statistics over the batch of all replicas, "per_replica" over this replica's rows.
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
    def sows_losses(self) -> bool:
        """Whether the module was seen to sow into "losses", since it was initialised."""
        return False

    def sown_losses(self, model_state: dict) -> list[jax.Array]:
        """Returns the losses that the module has sown, from the state that `apply` returned."""
        return jax.tree.leaves(model_state.get(LOSSES, {}))

    @abc.abstractmethod
    def summary_rows(self, inputs: PyTree) -> list[LayerRow]:
        """Returns a row per layer, in the order of the calls, without computing or allocating anything.

        Args:
          inputs: one batch, or the same structure of `jax.ShapeDtypeStruct`.
        """

    @abc.abstractmethod
    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into the user's own module, if that holds values: NNX does, Linen does not."""

    def variable_identities(self) -> Iterable[int]:
        """Yields the `id` of each variable that the user's own module holds; none for modules that hold none."""
        return ()


def key_for(key: jax.Array, name: str) -> jax.Array:
    """Returns a key that depends on `key` and on `name`, but not on the order of any names."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def call_arguments(target: Any, inputs: PyTree, training: bool) -> tuple[tuple, dict[str, Any]]:
    """Returns the positional and the keyword arguments with which to call `target` on a batch.

    A tuple or list is unpacked if `target` takes that many positional arguments, and a dict becomes keyword arguments
    if each of its keys is a parameter; otherwise `inputs` is the one argument. The flag that tells `target` whether it
    is being trained is passed if its signature has a flag, unless an attribute of that name has decided it already.

    Args:
      target: a module or a function.
      inputs: one batch.
      training: whether the call is part of training.

    >>> call_arguments(lambda x, y, *, deterministic: x + y, (1, 2), training=True)
    ((1, 2), {'deterministic': False})
    """
    parameters = _parameters(target)
    flags = {name: training if in_training else not training for name, in_training in FLAGS.items()
             if name in parameters and not _decided_by_attribute(target, parameters[name])}
    positional = [parameter for parameter in parameters.values()
                  if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    if isinstance(inputs, dict) and inputs and set(inputs) <= set(parameters) - set(FLAGS):
        return (), {**inputs, **flags}

    takes_any_number = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters.values())
    names = [parameter.name for parameter in positional if parameter.name not in FLAGS]
    required = sum(parameters[name].default is inspect.Parameter.empty for name in names)
    # Exact types: a named tuple is one structured input.
    unpacks = type(inputs) in (tuple, list) and (takes_any_number or required <= len(inputs) <= len(names))
    values = tuple(inputs) if unpacks else (inputs,)
    if takes_any_number:
        return values, flags
    # What follows a flag in the signature can only be reached by its name.
    leading = next((index for index, parameter in enumerate(positional) if parameter.name in FLAGS), len(values))
    return values[:leading], {**dict(zip(names[leading:], values[leading:], strict=False)), **flags}


def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except ValueError:  # Some built-in functions have no signature: they take the batch as it is.
        return {"inputs": inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_ONLY)}


def _decided_by_attribute(target: Any, parameter: inspect.Parameter) -> bool:
    # Flax refuses a flag that is given both to the constructor and to the call.
    return parameter.default is None and getattr(target, parameter.name, None) is not None
