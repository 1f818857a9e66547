"""`lora`: a model whose adapters are trained, while its other weights are frozen."""

from __future__ import annotations

import functools
import json
import os
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import arguments, errors, tree_paths
from trainer.core.calls.entry_points import entry_point, with_entry_points
from trainer.core.compile.jit import init_placed
from trainer.core.modules import Adapters, BaseValues, adapted, with_adapters, without_adapters
from trainer.core.train_state import TrainState, initial_state
from trainer.engine.model import weights_io
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.model_core import ModelCore
from trainer.engine.model.model import Model
from trainer.engine.model.types import ModuleLike
from trainer.engine.step.compile_options import CompileOptions

Path = str | os.PathLike[str]


@entry_point
def lora(
    model: Model | ModuleLike, rank: int = 8, targets: Sequence[str] | str | None = None, alpha: float | None = None, *,
    dropout: float = 0.0, train: Sequence[str] | str = (),
) -> LoraModel:
    """Returns a model that trains LoRA adapters instead of its weights.

    A layer with the weight W then computes `x W + alpha / rank * (x A) B`, with B initially zero, so that the initial
    outputs equal the outputs of the given model. A is uniform up to `1 / sqrt(inputs)`, as in PEFT; the paper draws it
    from a normal distribution. For an embedding, A is zero and B normal, as in PEFT. The module's code and the given
    model stay unchanged. Frozen weights have no optimizer state and no gradients. Adapters are in float32, or the wider
    dtype of the weight.

    Everything else is as for any model: `compile`, `fit` under any strategy, checkpoints, `export`. A BatchNorm
    normalizes by its running averages, as frozen layers do. `merge` returns a model without adapters.

    Args:
      model: a model, whose weights are copied if it is built, with `ema_decay` their averages, as in its `predict`;
        or a module for `trainer.Model`.
      rank: number of columns of A and rows of B.
      targets: path patterns, as for `freeze` of `compile`, of the weights that get adapters, such as `["query",
        "value"]` or "block_.*/attention". None selects the kernels of all linear layers. Layers that can have adapters
        are Linen's `Dense`, `DenseGeneral` and `Embed`, NNX's `Linear`, `LinearGeneral` and `Embed`, and layers made
        of them, such as attention. Layers of a scan have adapters of their own.
      alpha: numerator of the factor `alpha / rank`; None for `rank`, a factor of 1.
      dropout: rate at which inputs of A are dropped in training, except in embeddings. In Linen it draws from the
        stream "dropout", which a scan over layers must split.
      train: path patterns of further parameters that are trained as they are and saved with the adapters, such as
        "head".

    Returns:
      A `LoraModel`, of a subclass of the model's class, with the model's strategy. It is built if `model` is.

    Raises:
      TypeError: for a dict of modules, a model with adapters, or an argument of another type.
      ValueError: for a number out of range, a pattern that matches nothing, or a pattern that selects a weight of an
        unsupported layer. `build` or `fit` checks the patterns of a Linen module that is not built.

    Example:
      >>> import numpy as np, trainer
      >>> from flax import linen as nn
      >>> model = trainer.Sequential([nn.Dense(64), nn.relu, nn.Dense(1)])
      >>> model.build(np.zeros((1, 16)))
      >>> adapted = lora(model, rank=2, targets=["layers_0"])
      >>> [weight.path for weight in adapted.trainable_weights]
      ['layers_0/lora_a', 'layers_0/lora_b']
      >>> adapted.compile("adam", "mse")
      >>> history = adapted.fit(np.ones((8, 16)), np.ones((8, 1)), verbose=0)
      >>> adapted.save_adapters("adapters.safetensors")
      >>> plain = adapted.merge()

    Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, https://arxiv.org/abs/2106.09685;
    for all linear layers, Dettmers et al., https://arxiv.org/abs/2305.14314.
    """
    adapters = _checked(rank, targets, alpha, dropout, train)
    plain = model if isinstance(model, Model) else Model(model)
    core = plain._core
    core.check_is_outside_of_steps()
    functional = with_adapters(core.module, adapters)
    plain_class: Any = type(plain)
    made: LoraModel = object.__new__(_class_with_adapters(plain_class))
    vars(made).update(vars(plain))
    made.history = None
    configuration = Configuration()
    configuration.options = CompileOptions(trained_only=functional.trained_only)
    made._core = ModelCore(made, core.defaults, functional, plain.strategy, core.state.seed, configuration)
    if plain.built:
        state = plain.strategy.on_devices(core.state.evaluated)
        made._core.state.build(_zeros(core.state.inputs), BaseValues(state.params, state.model_state))
    return made


@with_entry_points
class LoraModel(Model):
    """A model with LoRA's adapters; `trainer.lora` makes it."""

    def save_adapters(self, filepath: Path, overwrite: bool = True) -> None:
        """Writes the adapters, and the other parameters that are trained, to a safetensors file, atomically.

        The names are as in `save_weights`. If several JAX processes train together, all must call this method; the
        first process writes.

        Args:
          filepath: the file, such as "adapters.safetensors", in an existing folder.
          overwrite: whether to replace an existing file.

        Raises:
          RuntimeError, FileExistsError, FileNotFoundError, ValueError, TypeError: as `save_weights` does.
        """
        arguments.require_bool(overwrite=overwrite)
        weights_io.save_weights(
            self._core.state, filepath, overwrite, self._is_trained, {weights_io.ADAPTERS: self._described()})

    def load_adapters(self, filepath: Path) -> None:
        """Replaces the adapters with adapters from a file that `save_adapters` wrote, for a model of the same base.

        Args:
          filepath: the file.

        Raises:
          RuntimeError: if the model is not built.
          ValueError: if the file has other names, shapes, `rank` or `alpha`, or no adapters; nothing changes.
          FileNotFoundError, IsADirectoryError, TypeError: as `load_weights` does.
        """
        weights_io.load_weights(
            self._core.state, filepath, None, None, self._is_trained, {weights_io.ADAPTERS: self._described()})

    def merge(self) -> Model:
        """Returns a model whose `predict` is the same, without adapters, of the class of the model given to `lora`.

        Each weight is `W + alpha / rank * A B`, added in float32 and stored in the weight's dtype. The model has the
        same strategy and is not compiled. With `ema_decay`, it has the averages.

        Raises:
          RuntimeError: if the model is not built.
        """
        core, strategy = self._core, self.strategy
        state, owner = core.state.evaluated, adapted(core.module)
        made = object.__new__(type(self)._plain_class)
        vars(made).update(vars(self))
        made._core = ModelCore(made, core.defaults, without_adapters(core.module), strategy, core.state.seed,
                               Configuration())
        made.history = None

        def merged(state: TrainState) -> TrainState:
            state = strategy.on_devices(state)
            params, model_state = jax.tree.map(jnp.copy, (owner.merged(state.params), state.model_state))
            return initial_state(params, model_state, None, state.seed, owner.plain.layouts)

        made._core.state.inputs = core.state.inputs
        made._core.state.set(init_placed(merged, strategy.state_shardings, state.replace(
            opt_state=None, optimizer=None))[1]())
        return made

    _plain_class: type[Model] = Model

    def _is_trained(self, path: str) -> bool:
        return tree_paths.matches_any(self._core.module.trained_only, path)

    def _described(self) -> str:
        adapters = adapted(self._core.module).adapters
        return json.dumps({"rank": adapters.rank, "alpha": adapters.alpha})


@functools.cache
def _class_with_adapters(plain: Any) -> Any:
    if plain is Model:
        return LoraModel
    return types.new_class(plain.__name__, (LoraModel, plain), exec_body=lambda body: body.update(
        _plain_class=plain, __module__=plain.__module__))


def _checked(rank: Any, targets: Any, alpha: Any, dropout: Any, train: Any) -> Adapters:
    arguments.check_count("rank", rank, 1)
    if alpha is not None:
        arguments.require_positive(alpha=alpha)
    arguments.require_decay_rate(dropout=dropout)
    return Adapters(int(rank), float(rank if alpha is None else alpha),
                    None if targets is None else _patterns("targets", targets), float(dropout),
                    _patterns("train", train))


def _patterns(argument: str, given: Any) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Sequence):
        raise errors.wrong_type(argument, given, "a list of path patterns, such as ['query', 'value']")
    for pattern in patterns:
        tree_paths.check_pattern(argument, pattern)
    if argument == "targets" and not patterns:
        raise ValueError("`targets` is empty, so that there would be no adapters. Pass None for all linear layers.")
    return tuple(patterns)


def _zeros(inputs: Any) -> Any:
    """Returns inputs of the given shapes; their values do not matter."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), inputs)
