"""`model.optimizer`: an optimizer together with its state in a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from trainer.core.errors import near_hint
from trainer.core.foreign_names import foreign_hint
from trainer.optimizers import LearningRate, Optimizer, OptimizerState


class AttachedOptimizer:
    """The optimizer of a compiled model. Its learning rate can be read and set at any time.

    Args:
      optimizer: the optimizer.
      read: returns the current state; None before the model is built.
      write: replaces the state.

    Raises:
      AttributeError: if an attribute other than `learning_rate` is set.

    Example:
      >>> model.optimizer.learning_rate = 0.5 * model.optimizer.learning_rate  # doctest: +SKIP
    """

    __slots__ = ("_optimizer", "_read", "_write")

    def __init__(
        self, optimizer: Optimizer, read: Callable[[], OptimizerState | None], write: Callable[[OptimizerState], None]
    ):
        self._optimizer, self._read, self._write = optimizer, read, write

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and name in self.optimizer.constructor_arguments():
                return getattr(self.optimizer, name)
            known = [each for each in [*dir(type(self)), *self.optimizer.constructor_arguments()] if each[0] != "_"]
            hint = "" if name.startswith("_") else f" {foreign_hint(Optimizer, name) or near_hint(name, known)}"
            raise AttributeError(f"{self!r} has no attribute {name!r}.{hint}", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        # A model creates a new object for each read, so other attributes would be lost.
        if not hasattr(type(self), name):
            raise AttributeError(f"The optimizer of a compiled model has no attribute {name!r} to set. Its rate is set "
                                 "by `model.optimizer.learning_rate = value`; for all else, call `compile` again with "
                                 "another optimizer.")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return repr(self._optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self._optimizer

    @property
    def name(self) -> str:
        """The optimizer's name."""
        return self.optimizer.name

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate of the next update. Reading it waits for running steps.

        Raises:
          ValueError: if the rate is unknown, as for an optax transformation with several rates. Setting it also raises
            if the transformation does not support another rate.
        """
        state = self._read()
        if state is None:
            return self.optimizer.learning_rate
        count, rate = jax.device_get((self.optimizer.schedule_count(state), state.learning_rate))
        with jax.transfer_guard("allow"):  # the user requests the transfer
            return LearningRate(self.optimizer.rate_at(count, rate))

    @learning_rate.setter
    def learning_rate(self, value: object) -> None:
        state = self._read()
        if state is None:
            self.optimizer.learning_rate = value
        else:
            with jax.transfer_guard("allow"):
                self._write(self.optimizer.with_learning_rate(state, value))

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Leaves weights out of weight decay; see `Optimizer.exclude_from_weight_decay`."""
        self.optimizer.exclude_from_weight_decay(var_list, var_names)

    def __reduce__(self) -> Any:
        # The optimizer by itself, at its current rate. The state belongs to the model, which `Model.save` writes.
        alone = copy.copy(self.optimizer)
        if alone.schedule is None:
            with contextlib.suppress(ValueError):  # of an optax transformation, whose rate cannot be set
                alone.learning_rate = self.learning_rate
        return alone.__reduce__()

    def get_config(self) -> dict[str, Any]:
        """Returns the optimizer's arguments, as `Optimizer.get_config` does. Tracker callbacks log them."""
        return self.optimizer.get_config()

    @property
    def iterations(self) -> int:
        """Number of updates."""
        state = self._read()
        return 0 if state is None else int(state.count) // self.optimizer.gradient_accumulation_steps

    @property
    def variables(self) -> list[jax.Array]:
        """Copies of the arrays of the optimizer's state. (The next train step reuses the buffers of the originals.)"""
        return [jnp.copy(leaf) for leaf in jax.tree.leaves(self._read())]
