"""Detects layers in the wrong phase: the module does not know whether it is being trained.

Owns the rules and their exceptions. It must not know Linen or NNX: adapters report the layer calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.core.errors import see
from trainer.core.modules.calling.call_arguments import FLAGS, parameters_of

_DROPS = "drop"  # prefix of the names of dropout's random streams


class ModeCheck:
    """Checks the layers of one call of a module.

    In training, BatchNorm must not normalize by running averages that no step updates. Exceptions are frozen layers,
    and layers inside a layer that the module itself calls, or has made, with a flag for inference, such as a fixed
    backbone. Outside of training, dropout must be inactive, and BatchNorm must not use the batch's statistics.

    Args:
      training: whether the call is part of training.
    """

    def __init__(self, training: bool):
        self._training = training
        self._chosen = 0  # number of running calls with a flag for inference
        self._found: dict[str, None] = {}

    @contextlib.contextmanager
    def within(self, layer: object, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Records that a layer is being called.

        Args:
          layer: the layer.
          arguments: arguments of the call, by parameter name.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(layer)} if (
            dataclasses.is_dataclass(layer)) else {}
        chosen = any(arguments.get(name) is not_trained or (
            name in defaults and defaults[name] is not not_trained and getattr(layer, name, None) is not_trained)
                     for name, not_trained in ((name, not trained) for name, trained in FLAGS.items()))
        self._chosen += chosen
        try:
            yield
        finally:
            self._chosen -= chosen

    def batch_norm(self, path: str, uses_running_average: bool, is_frozen: bool) -> None:
        """Records how a BatchNorm layer normalizes."""
        refused = not is_frozen and not self._chosen if self._training else True
        if refused and uses_running_average is self._training:
            self._found[f"BatchNorm {path!r}"] = None

    def dropout(self, path: str) -> None:
        """Records that a layer drops units."""
        if not self._training:
            self._found[f"dropout {path!r}"] = None

    def raise_found(self, module: object, streams: Iterable[str] = ()) -> None:
        """Raises ValueError if a layer has broken the rules.

        Args:
          module: the user's module.
          streams: the random streams that the call has used.
        """
        found = [*self._found] or [f"the random stream {name!r}" for name in streams
                                   if not self._training and name.startswith(_DROPS)]
        if not found:
            return
        what, name = ", ".join(found[:4]) + (", ..." if len(found) > 4 else ""), type(module).__name__
        others = [parameter for parameter in list(parameters_of(module))[1:] if parameter not in FLAGS]
        does = (f"In training, {what} of {name} uses running averages that no step moves"
                if self._training else f"Outside of training, {what} of {name} works as in training")
        argument, example = ("train_kwargs", "'train'") if self._training else ("eval_kwargs", "'eval'")
        given = f"`{argument}={{{others[0]!r}: ...}}`" if others else f"`{argument}={{'mode': {example}}}`"
        meant = "`freeze` the layer, or give `train_kwargs={}`" if self._training else "give `eval_kwargs={}`"
        raise ValueError(
            f"{does}: nothing tells the module whether it is being trained. Expected: a flag among the parameters of "
            f"its call ({', '.join(FLAGS)}). If another argument says so, make the model by `trainer.Model(module, "
            f"train_kwargs=..., eval_kwargs=...)`, with {given}; if an attribute of the module does, by "
            f"`trainer.Model(module, eval_module=...)`. If it is meant, {meant}. {see('phase')}")
