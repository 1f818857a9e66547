"""Entry points: the functions of the trainer that a script calls.

All entry points have these properties:

- A mesh that the script has set for its own code (`jax.set_mesh`) is hidden, because JAX puts each new array on that
  mesh and refuses other meshes, and the trainer's arrays and programs use the mesh of their strategy. The script's mesh
  is back after the call.
- Errors show the script's lines (`tracebacks.py`), and say what to write for unknown and missing arguments
  (`misfits.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.core.calls.misfits import is_misfit, misfit
from trainer.core.calls.tracebacks import shorten

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

_NO_MESH = Mesh(np.empty((), object), ())
_RATE = "Give it to the optimizer: `optimizer=trainer.optimizers.Adam(learning_rate=...)`."
_CLIP = "Clipping belongs to the optimizer: `trainer.optimizers.Adam(global_clipnorm=1.0)`, `clipnorm` or `clipvalue`."
_LOADER = "Give the loader as `x`: `fit(loader, epochs=3)`."
# Arguments of `fit`, `evaluate` and `predict` in earlier Keras versions.
_OF_DATA = {name: f"Give it to the data: `super().__init__({name}=...)` in a `trainer.utils.PyDataset`."
            for name in ("workers", "use_multiprocessing", "max_queue_size")}
# Arguments of Keras and of other trainers, and arguments that are easily left out, by function.
_HINTS: dict[str, dict[str, str]] = {
    "compile": {
        "lr": _RATE, "learning_rate": _RATE,
        **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clipnorm", "clipvalue", "global_clipnorm"), _CLIP),
        **dict.fromkeys(("criterion", "objective", "loss_function"), "Give `loss`."),
        "strategy": "Make, compile and fit the model in `with strategy.scope():`.",
    },
    "build": {
        "input_shape": "Give some rows, of which shape and dtype are taken: `build(np.zeros((1, 28, 28)))`.",
    },
    "__init__": {
        "inputs": "There is no functional API: write the graph in the call of a Flax module, and give that: "
                  "`trainer.Model(MyModule())`.",
        "module": "A model holds a Flax module, which has the layers: `super().__init__(module)`, or "
                  "`trainer.Model(MyModule())` for a module alone.",
    },
    "StatefulModel.__init__": {
        "*": "A model takes one module, and makes its variables itself, at the first batch or in `build(x)`; then "
             "`model.state = model.state.replace(params=params)` sets yours. All other arguments are given by name.",
    },
    "fit": {
        **{name: f"Give it to `compile({name}=...)`." for name in ("metrics", "loss", "optimizer")},
        "lr": _RATE, "learning_rate": _RATE,
        "ckpt_path": "The callback `trainer.callbacks.BackupAndRestore(folder)` saves a run, and resumes it.",
        "max_epochs": "Give `epochs`.",
        "train_dataloaders": _LOADER, "train_dataloader": _LOADER, "dataloader": _LOADER,
        "val_dataloaders": "Give the loader as `validation_data`.",
        **_OF_DATA,
    },
    "evaluate": _OF_DATA,
    "predict": _OF_DATA,
    "Strategy.run": {"*": "Give the arguments of the function as one tuple: `strategy.run(fn, args=(x, y))`."},
    "Strategy.reduce": {"value": "It takes the operation first: `strategy.reduce(\"mean\", value)`."},
}


def entry_point(function: Function) -> Function:
    """Returns a function that a script may call."""
    if inspect.isgeneratorfunction(function):
        return _generating(function)  # type: ignore[return-value]
    hints = {**_HINTS.get(function.__name__, {}), **_HINTS.get(function.__qualname__, {})}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with _script_mesh_hidden():
                return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, TypeError) and is_misfit(function, args, kwargs, error):
                raise misfit(function, args, kwargs, hints, error) from None
            shorten(error)
            raise

    return call  # type: ignore[return-value]


def foreign_arguments(hints: Mapping[str, str] | None = None) -> Callable[[Function], Function]:
    """Returns a decorator of a function or class whose error for arguments that it does not take says what to do.

    Args:
      hints: names of arguments that the function, or the constructor of the class, lacks or needs, and the sentences
        that end the errors. The sentence of "*" is for too many arguments by position. Without a sentence, a missing
        argument is explained by its docstring, and an unknown one by similar names.

    Raises:
      TypeError: from the decorated function or constructor.

    >>> @foreign_arguments({"buffer_size": "Leave it out."})
    ... def shuffle(seed=0): ...
    >>> shuffle(buffer_size=10)
    Traceback (most recent call last):
    TypeError: `shuffle` has no argument 'buffer_size'. Leave it out.
    """
    def decorate(function: Function) -> Function:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if is_misfit(function, args, kwargs, error):
                    raise misfit(function, args, kwargs, hints or {}, error) from None
                raise

        return call  # type: ignore[return-value]

    return decorate


def explains_arguments(function: Function) -> Function:
    """Decorates a public function or class whose errors for missing and unknown arguments say what to write.

    >>> @explains_arguments
    ... def load(filepath):
    ...     \"\"\"Loads a file.
    ...
    ...     Args:
    ...       filepath: path of a file that `save` has written.
    ...     \"\"\"
    >>> load()
    Traceback (most recent call last):
    TypeError: `load` missing 1 required positional argument: 'filepath'. `filepath`: path of a file that `save` has \
written.
    """
    return foreign_arguments()(function)


def with_entry_points(decorated: Class) -> Class:
    """Returns the class with its constructor, `__call__`, public methods and properties as entry points."""
    for name, member in list(vars(decorated).items()):
        if name in ("__init__", "__call__") or not name.startswith("_"):
            setattr(decorated, name, _entry_point(member))
    return decorated


def _entry_point(member: object) -> Any:
    if isinstance(member, property):
        for part in ("getter", "setter", "deleter"):
            function = getattr(member, f"f{part[:3]}")
            member = member if function is None else getattr(member, part)(entry_point(function))
        return member
    return entry_point(member) if inspect.isfunction(member) else member


def _generating(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with contextlib.closing(function(*args, **kwargs)) as values:  # type: ignore[type-var]
            while True:
                with _script_mesh_hidden():  # not while the script has a value
                    try:
                        value = next(values)
                    except StopIteration:
                        return
                    except Exception as error:
                        shorten(error)
                        raise
                yield value

    return iterate


@contextlib.contextmanager
def _script_mesh_hidden() -> Iterator[None]:
    try:
        is_set = not jax.sharding.get_mesh().empty
    except ValueError:  # inside a trace, where the mesh is already hidden
        is_set = False
    with jax.set_mesh(_NO_MESH) if is_set else contextlib.nullcontext():
        yield
