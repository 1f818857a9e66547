"""Converts a batch to the arguments of a module's `__call__`, with the flags and random keys in its signature.

Owns the parameter names of flags and keys: see `FLAGS` and `KEYS`. All other parameters are inputs, or come from
`CallKwargs`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from trainer.core import errors
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.types import PyTree

MakeKey = Callable[[str], jax.Array]
"""Returns the PRNG key of a random stream in this step."""

FLAGS = {"training": True, "train": True, "is_training": True, "is_train": True, "enable_dropout": True,
         "deterministic": False, "use_running_average": False, "inference": False, "eval": False}
"""Names of training flags, with their values in training. A parameter with a default other than True, False or None is
no flag."""

KEYS = ("rngs", "rng", "key", "rng_key", "prng_key", "random_key", "dropout_key")
"""Names of random key parameters; names that end in "_rng" or "_rngs", such as "z_rng", are keys too. A parameter with
a default other than None is no key, nor is "key" next to "query" or "value". Each receives a single key, except `rngs`:
it receives an `nnx.Rngs` unless annotated as an array or a key; in Linen modules, only if annotated as `nnx.Rngs`."""

_LIKE_A_FLAG = re.compile("train|determin|infer|eval", re.IGNORECASE)
_LABELS = ("y", "y_true", "label", "labels", "target", "targets")
_ATTENTION = ("query", "queries", "value", "values")
_EMPTY = inspect.Parameter.empty


class CallKwargs(NamedTuple):
    """Keyword arguments that the user sets for each call of a module; None if unset.

    Attributes:
      train: keyword arguments of calls in training.
      eval: keyword arguments of all other calls.
    """

    train: Mapping[str, Any] | None = None
    eval: Mapping[str, Any] | None = None

    def of(self, training: bool) -> Mapping[str, Any] | None:
        """Returns the keyword arguments of a phase."""
        return self.train if training else self.eval

    def check(self, target: object) -> None:
        """Raises TypeError if a value is not a dict of names, or ValueError if `target` has no such parameter.

        It warns of parameters that are set in no call, and look like training flags.
        """
        for name, parameter in parameters_of(target).items() if callable(target) else ():
            if (isinstance(parameter.default, bool) and _LIKE_A_FLAG.search(name) and not _is_flag(parameter)
                    and name not in {**(self.train or {}), **(self.eval or {})}):
                warnings.warn(f"`{name}` of the call of {type(target).__name__} stays {parameter.default}, also in "
                              f"training: flags are {', '.join(FLAGS)}. Rename it, or give `trainer.Model(module, "
                              f"train_kwargs={{{name!r}: {not parameter.default}}})`.", stacklevel=user_stacklevel())
        for argument, kwargs in (("train_kwargs", self.train), ("eval_kwargs", self.eval)):
            if kwargs is None:
                continue
            if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
                raise errors.wrong_type(argument, kwargs, "a dict of keyword arguments of the module's call")
            parameters = parameters_of(target)
            takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
            for name in kwargs:
                if name not in parameters and not takes_all:
                    raise errors.unknown_name(f"name in `{argument}`", name, parameters)


def call_arguments(target: object, inputs: PyTree, training: bool, make_key: MakeKey | None = None,
                   given: Mapping[str, Any] | None = None) -> tuple[tuple, dict[str, Any]]:
    """Returns the positional and keyword arguments for a call of `target` on a batch.

    A tuple or list is unpacked if `target` takes that many positional arguments, also if it is nested alone in another
    tuple or list. A dict becomes keyword arguments if each of its keys is a parameter. Otherwise `inputs` is the single
    argument, which may be keyword-only.

    Training flags in the signature are passed, unless an attribute of that name is set. Random keys in the signature
    are passed in training, and always if they have no default, unless `inputs` has values for them.

    Args:
      target: a module or a function.
      inputs: one batch.
      training: whether the call is part of training.
      make_key: returns the key of a random stream; None to pass no keys.
      given: keyword arguments set by the user.

    Raises:
      ValueError: a dict of inputs and `given` share a name.
      TypeError: `target` needs more inputs, or has several keyword-only inputs.

    >>> call_arguments(lambda x, y, *, deterministic: x + y, (1, 2), training=True)
    ((1, 2), {'deterministic': False})
    """
    given = given or {}
    owner, parameters = _owner(target), parameters_of(target)
    flag_names = {name for name, parameter in parameters.items() if _is_flag(parameter)}
    key_names = {name for name, parameter in parameters.items()
                 if _is_key(parameter, parameters) or _is_maker(parameter)} - set(given)
    fixed = {name: training if FLAGS[name] else not training for name in parameters
             if name in flag_names and not _decided_by_attribute(owner, parameters[name])} | dict(given)

    def with_keys(filled: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
        if make_key is None:
            return fixed
        asked = [name for name in parameters if name in key_names and name not in filled
                 and (training or parameters[name].default is _EMPTY)]
        return {**fixed, **{name: _random(parameters[name], owner, make_key) for name in asked}}

    if isinstance(inputs, dict) and inputs and set(inputs) <= set(parameters) - flag_names:
        twice = sorted(set(inputs) & set(given))
        if twice:
            raise ValueError(f"`x` and the keyword arguments of the call both give {', '.join(twice)}. Leave it out of "
                             "one of them.")
        return (), {**inputs, **with_keys(inputs)}

    positional = [parameter for parameter in parameters.values()
                  if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters.values()):
        values = tuple(inputs) if type(inputs) in (tuple, list) else (inputs,)
        return values, with_keys([parameter.name for parameter in positional])

    all_names = [parameter.name for parameter in positional if parameter.name not in flag_names | set(given)]
    names = [name for name in all_names if name not in key_names] or all_names

    def required(names: Sequence[str]) -> list[str]:
        return [name for name in names if parameters[name].default is _EMPTY]

    def takes(names: list[str], inputs: PyTree) -> bool:
        # Exact types: a named tuple is one structured input.
        return type(inputs) in (tuple, list) and len(required(names)) <= len(inputs) <= len(names)

    if not takes(names, inputs) and type(inputs) in (tuple, list) and len(inputs) == 1 and takes(names, inputs[0]):
        inputs = inputs[0]  # `(x,)`, as data sources yield it
    if takes(all_names, inputs):  # as Python would bind them
        names = all_names
    values = tuple(inputs) if takes(names, inputs) else (inputs,)
    by_name = required([name for name, parameter in parameters.items() if parameter.kind == parameter.KEYWORD_ONLY
                        and name not in flag_names | key_names | set(given)])
    if not positional and len(by_name) == 1:
        is_alone = type(inputs) in (tuple, list) and len(inputs) == 1
        return (), {by_name[0]: inputs[0] if is_alone else inputs, **with_keys(by_name)}
    missing = [*required(names)[len(values):], *by_name]
    if missing and hasattr(target, "initialize_carry"):
        cell, library = type(target).__name__, "nn" if isinstance(target, nn.Module) else "nnx"
        raise TypeError(f"{cell} is a cell, which makes one step, and not a layer over a sequence. Write "
                        f"`{library}.RNN({library}.{cell}(...))`")
    if missing:
        raise _wrong_inputs(inputs, missing, [*required(names), *by_name], is_by_name=bool(by_name))
    # Parameters after a flag or a key in the signature are passed by name.
    leading = next((index for index, parameter in enumerate(positional) if parameter.name not in names), len(values))
    filled = names[:len(values)]
    return values[:leading], {**dict(zip(filled[leading:], values[leading:], strict=True)), **with_keys(filled)}


def _wrong_inputs(inputs: PyTree, missing: Sequence[str], needed: Sequence[str], is_by_name: bool) -> TypeError:
    """Returns the error for inputs that leave some of the `needed` parameters without values."""
    as_dict = f"{{{', '.join(f'{name!r}: ...' for name in needed)}}}"
    form = as_dict if is_by_name or isinstance(inputs, dict) else f"({', '.join(needed)})"
    lacks = f"none for {', '.join(missing)}"
    if isinstance(inputs, dict):
        lacks = f"the keys {', '.join(map(repr, inputs))}"
    elif type(inputs) in (tuple, list) and len(inputs) > len(needed):
        lacks = f"{len(inputs)}"
    if labels := [name for name in missing if name in _LABELS]:
        return TypeError(f"the call needs {len(needed)} inputs, and `x` has {lacks}. A module returns outputs, and not "
                         f"its loss: leave {', '.join(labels)} out of its call, and give the loss to `compile`")
    return TypeError(f"the call needs {len(needed)} inputs, and `x` has {lacks}. Pass `x` as {form}; where data yield "
                     f"batches, a batch of `x` alone is `({form},)`")


def input_names(target: Any) -> tuple[str, ...]:
    """Returns the names of the inputs of a module's call: of its parameters without training flags and random keys.

    They are empty for a module without a call.

    >>> input_names(lambda tokens, mask=None, *, training=False: tokens)
    ('tokens', 'mask')
    """
    parameters = parameters_of(target) if callable(target) else {}
    return tuple(name for name, parameter in parameters.items() if not (
        _is_flag(parameter) or _is_key(parameter, parameters) or _is_maker(parameter)))


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a module's call; of the wrapped module's call if it wraps another library's module."""
    wrapped = _owner(target)
    try:
        if wrapped is target:
            return dict(inspect.signature(target).parameters)
        if isinstance(wrapped, nn.Module):  # ToNNX, which passes on its own streams or its `rngs` argument
            parameters = dict(inspect.signature(wrapped).parameters)
            rngs = inspect.Parameter("rngs", inspect.Parameter.KEYWORD_ONLY, default=None)
            return parameters if target.to_nnx__rngs is not None else {**parameters, "rngs": rngs}
        return dict(list(inspect.signature(wrapped.__call__).parameters.items())[1:])
    except ValueError:  # some built-in functions have no signature: they take the batch as it is
        return {"inputs": inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_ONLY)}


def _owner(target: object) -> Any:
    """Returns the owner of the signature: the Linen module in an `nnx.bridge.ToNNX`, the NNX class in a `ToLinen`."""
    wrapped = vars(target).get("to_nnx__module") if hasattr(target, "__dict__") else None
    if isinstance(wrapped, nn.Module):
        return wrapped
    nnx_class = getattr(target, "nnx_class", None) if isinstance(target, nn.Module) else None
    return nnx_class if isinstance(nnx_class, type) else target


def _is_flag(parameter: inspect.Parameter) -> bool:
    return parameter.name in FLAGS and any(parameter.default is value for value in (_EMPTY, None, True, False))


def _is_key(parameter: inspect.Parameter, parameters: Mapping[str, Any]) -> bool:
    name = parameter.name
    return ((name in KEYS or name.endswith(("_rng", "_rngs"))) and parameter.default in (_EMPTY, None)
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and not (name == "key" and any(other in parameters for other in _ATTENTION)))


def _is_maker(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (MakeKey, "MakeKey")  # of a stack, whose layers may need keys


def _random(parameter: inspect.Parameter, owner: object, make_key: MakeKey) -> Any:
    if _is_maker(parameter):
        return make_key
    key = make_key(f"argument/{parameter.name}")
    annotation = "" if parameter.annotation is _EMPTY else str(parameter.annotation)
    if "Rngs" not in annotation and (parameter.name != "rngs" or isinstance(owner, nn.Module)
                                     or "Array" in annotation or "Key" in annotation):
        return key
    # Not at the top: `flax.nnx` would take a large part of the trainer's import time.
    from flax import nnx

    return nnx.Rngs(key)


def _decided_by_attribute(owner: object, parameter: inspect.Parameter) -> bool:
    # Flax refuses a flag in both the constructor and the call.
    return parameter.default is None and getattr(owner, parameter.name, None) is not None
