"""Converts a user's module to its functional form.

Owns the choice of the adapter, and the stack for a list of layers. Code for NNX is imported only for NNX modules:
`flax.nnx` would take a large part of the trainer's import time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen as nn

from trainer.core.errors import page_url, unknown_name, wrong_type
from trainer.core.modules.base import FunctionalModule
from trainer.core.modules.calling.call_arguments import CallKwargs
from trainer.core.modules.calling.nnx_types import is_nnx_module
from trainer.core.modules.calling.plain_callables import check_holds_no_weights
from trainer.core.modules.eval_module import TwoPhaseFunctional
from trainer.core.modules.linen import LinenFunctional
from trainer.core.modules.lora import AdaptedFunctional, Adapters
from trainer.core.modules.named import NamedFunctional
from trainer.core.modules.sequential import linen_stack
from trainer.core.types import keras_class

_NO_KWARGS = CallKwargs()


def as_functional(module: Any, call_kwargs: CallKwargs = _NO_KWARGS, eval_module: Any = None) -> FunctionalModule:
    """Returns the functional form of a module.

    Args:
      module: a Linen module, an NNX module, a list of layers to apply in sequence, a plain function of the inputs, or a
        dict of names to any of these.
      call_kwargs: keyword arguments of its calls; for a dict of modules, dicts of these by name.
      eval_module: another module with the same parameters, for all calls outside of training; for a dict of modules, a
        dict of such modules by name, which may omit names.

    Returns:
      A `NamedFunctional` for a dict, with parameters by name; otherwise a module without names.

    Raises:
      TypeError: `module`, or an item of a list or dict, is of another kind, such as a callable object that holds
        arrays.
      ValueError: a list or dict is empty, or `call_kwargs` has names other than parameters of the module's call.

    >>> import jax, jax.numpy as jnp
    >>> functional = as_functional(nn.Dense(2))
    >>> params, model_state, outputs = functional.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> params["kernel"].shape, outputs.shape
    ((3, 2), (4, 2))
    """
    if isinstance(module, dict):
        train_kwargs, eval_kwargs, eval_modules = (
            _by_name(argument, value, module) for argument, value in zip(
                ("train_kwargs", "eval_kwargs", "eval_module"), (*call_kwargs, eval_module), strict=True))
        return NamedFunctional({
            name: as_functional(part, CallKwargs(train_kwargs.get(name), eval_kwargs.get(name)), eval_modules.get(name))
            for name, part in module.items()})
    if eval_module is not None:
        return TwoPhaseFunctional(as_functional(module, CallKwargs(train=call_kwargs.train)),
                                  as_functional(eval_module, CallKwargs(eval=call_kwargs.eval)))
    if isinstance(module, FunctionalModule):
        return module
    if isinstance(module, nn.Module):
        if module.scope is not None:
            raise ValueError("`module` is bound to variables, by `bind` or in the call of another module, and a model "
                             f"would not use them. Received: a bound {type(module).__name__}. Give it unbound. After "
                             "`build(x)`, `model.state = model.state.replace(params=params)` sets your parameters.")
        return LinenFunctional(module, call_kwargs)
    if is_nnx_module(module):
        # Not at the top: it imports `flax.nnx`.
        from trainer.core.modules.nnx import NNXFunctional

        return NNXFunctional(module, call_kwargs)
    if isinstance(module, (list, tuple)):
        return as_functional(_stack(module), call_kwargs)
    if callable(module) and not isinstance(module, type):
        check_holds_no_weights(module, "`module`")
        return as_functional(_stack([module]), call_kwargs)
    if isinstance(module, type):
        raise TypeError(f"`module` must be an instance of a Flax module, not a class. Received: the class "
                        f"{module.__name__}. Call it: {module.__name__}(...).")
    raise wrong_type("module", module, "an instance of a Flax module (Linen or NNX), a list of layers, a function, "
                                       "or a dict of names to these")


def with_adapters(functional: FunctionalModule, adapters: Adapters) -> FunctionalModule:
    """Returns the functional form of a module with LoRA's adapters.

    Raises:
      TypeError: for a dict of modules, or a module with adapters.
      ValueError: for an NNX module, if a pattern matches nothing; a Linen module raises it when it is initialized.
    """
    if isinstance(functional, TwoPhaseFunctional):
        return TwoPhaseFunctional(with_adapters(functional.trained, adapters),
                                  with_adapters(functional.evaluated, adapters))
    if isinstance(functional, AdaptedFunctional):
        raise TypeError("The model has adapters of LoRA already. Merge them first: `trainer.lora(model.merge(), ...)`.")
    if isinstance(functional, LinenFunctional):
        from trainer.core.modules.linen_lora import AdaptedLinen

        return AdaptedLinen(functional, adapters)
    if isinstance(functional, NamedFunctional):
        raise TypeError("`trainer.lora` adapts a single module. Received: a dict of modules. Adapt a model of one of "
                        "them, and merge it before it becomes part of others.")
    # Not at the top: it imports `flax.nnx`.
    from trainer.core.modules.nnx import NNXFunctional
    from trainer.core.modules.nnx_lora import AdaptedNNX

    if isinstance(functional, NNXFunctional):
        return AdaptedNNX(functional, adapters)
    raise TypeError("`trainer.lora` adapts Flax modules with layers, and this model has none yet.")


def adapted(functional: FunctionalModule) -> AdaptedFunctional:
    """Returns the module with adapters that owns the parameters of a result of `with_adapters`."""
    owner = functional.trained if isinstance(functional, TwoPhaseFunctional) else functional
    assert isinstance(owner, AdaptedFunctional)
    return owner


def without_adapters(functional: FunctionalModule) -> FunctionalModule:
    """Returns the argument of `with_adapters` from its result."""
    if isinstance(functional, TwoPhaseFunctional):
        return TwoPhaseFunctional(without_adapters(functional.trained), without_adapters(functional.evaluated))
    return adapted(functional).plain


def _by_name(argument: str, value: object, modules: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of an argument by module name, or raises."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong_type(argument, value, "a dict by the names of the modules, as `module` is one")
    for name in value:
        if name not in modules:
            raise unknown_name(f"module in `{argument}`", str(name), modules)
    return value


def _stack(layers: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Returns an NNX module for NNX layers, else a Linen module."""
    if not layers:
        raise ValueError("A stack needs at least one layer. Received: an empty list.")
    for index, layer in enumerate(layers):
        if isinstance(layer, type):
            raise TypeError(f"Layer {index} must be an instance. Received: the class {layer.__name__}. "
                            f"Call it: {layer.__name__}(...).")
        if isinstance(layer, str):
            is_function = callable(getattr(nn, layer, None))
            hint = f"Use the function: `nn.{layer}`." if is_function else "Names do not stand for layers."
            raise TypeError(f"Layer {index} must be a Flax layer or a function. Received: {layer!r}. {hint}")
        if keras_class(layer, "KerasTensor") or keras_class(layer, "InputLayer"):
            raise TypeError(f"Layer {index} must be a Flax layer or a function. Received: an input of Keras. Leave it "
                            "out: the first batch gives the shapes of inputs, or `model.build(sample)`.")
        if keras_class(layer, "Layer"):
            raise TypeError(f"Layer {index} must be a Flax layer or a function. Received: a layer of Keras, "
                            f"{type(layer).__name__}. Use a layer of Flax: `from flax import linen as nn`. "
                            f"See {page_url('migration/from_keras3_jax', 'layers')}")
        if not callable(layer):
            raise TypeError(f"Layer {index} must be a Flax layer or a function. Received: a value of type "
                            f"{type(layer).__name__}.")
        if not isinstance(layer, nn.Module) and not is_nnx_module(layer):
            check_holds_no_weights(layer, f"Layer {index}")
    has_nnx = any(map(is_nnx_module, layers))
    if has_nnx and any(isinstance(layer, nn.Module) for layer in layers):
        raise TypeError("A stack must have either Linen or NNX layers. Received: both. Use layers of one kind.")
    if not has_nnx:
        return linen_stack(layers)
    # Not at the top: it imports `flax.nnx`.
    from trainer.core.modules.nnx_sequential import nnx_stack

    return nnx_stack(layers)
