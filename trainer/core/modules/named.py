"""Several named modules as a single module: generator and discriminator, teacher and student.

Owns the dicts by name around parameters and state; each module's adapter owns the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.typing import DTypeLike

from trainer.core.errors import describe, unknown_name, wrong_type
from trainer.core.modules.base import FunctionalModule, IsFrozen, key_for
from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.remat_policies import Remat
from trainer.core.modules.summary import CallObserver, LayerRow, ModuleLayer, Path
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import Layout, PyTree


class UnnamedModuleError(ValueError):
    """`apply` needs the name of a module."""


class NamedFunctional(FunctionalModule):
    """The functional form of a dict of modules.

    Parameters and state are dicts with the names of the modules at the top level.

    Args:
      parts: the modules by name.

    Attributes:
      parts: the modules by name.

    Raises:
      ValueError: there are no parts, or two NNX modules share a variable, of which each would train a copy.
      TypeError: a name is not a string.
    """

    def __init__(self, parts: Mapping[str, FunctionalModule]):
        if not parts:
            raise ValueError("A dict of modules must name at least one. Received: an empty dict.")
        for name in parts:
            if not isinstance(name, str):
                raise wrong_type("module", name, "a dict whose keys are strings")
        _check_shares_nothing(parts)
        self.name = "_".join(parts)
        self.names = tuple(parts)
        self.parts = dict(parts)

    @property
    def initial_values(self) -> dict[str, Any]:
        """The arrays that the user's own objects already hold, by name."""
        return {name: part.initial_values for name, part in self.parts.items()}

    def init(self, key: jax.Array, inputs: Mapping[str, Any],
             initial_values: PyTree = None) -> tuple[dict, dict, dict[str, Any]]:
        """Returns parameters, state and outputs, each by name.

        Args:
          key: a typed PRNG key of shape `()`.
          inputs: one batch for each module, by name.
          initial_values: value of `self.initial_values`; read at the call by default.

        Raises:
          ValueError: the names of `inputs` differ from the names of the modules.
        """
        self._check_names(inputs)
        values = self.initial_values if initial_values is None else initial_values
        results = {name: part.init(key_for(key, name), inputs[name], values[name])
                   for name, part in self.parts.items()}
        params, model_state, outputs = ({name: result[index] for name, result in results.items()} for index in range(3))
        return params, model_state, outputs

    def apply(self, params: dict, model_state: dict, inputs: PyTree, *, training: bool, make_key: MakeKey,
              batch_norm: str = "global", remat: Remat = False, compute_dtype: DTypeLike | None = None,
              is_frozen: IsFrozen | None = None, module: str | None = None) -> tuple[Any, dict]:
        """Returns the outputs of a single module, and the state of all modules.

        Args:
          params: parameters of that module only.
          model_state: state of all modules, by name.
          inputs: one batch for that module.
          training: as in the base class.
          make_key: as in the base class. Names of streams begin with the module's name.
          batch_norm: as in the base class.
          remat: as in the base class.
          compute_dtype: as in the base class.
          is_frozen: as in the base class. Paths begin with the module's name.
          module: name of the module to apply.

        Raises:
          UnnamedModuleError: `module` is missing.
          ValueError: `module` is unknown.
        """
        if module is None:
            names = sorted(self.parts)
            raise UnnamedModuleError(
                f"`module` must say which module to apply. Known names: {', '.join(names)}. In a step of your own: "
                f'`self.apply(params["{names[0]}"], state, x, module="{names[0]}")`. The inherited `train_step`, '
                "`test_step` (for `evaluate`) and `predict_step` (for `predict` and calls of the model) do not know "
                "which: override those in use.")
        if module not in self.parts:
            raise unknown_name("module", module, self.parts)
        outputs, new_state = self.parts[module].apply(
            params, model_state[module], inputs, training=training, batch_norm=batch_norm, remat=remat,
            compute_dtype=compute_dtype, make_key=lambda stream: make_key(f"{module}/{stream}"),
            is_frozen=is_frozen and (lambda path: is_frozen(SEPARATOR.join(filter(None, (module, path))))))
        return outputs, model_state if new_state is model_state[module] else {**model_state, module: new_state}

    def is_batch_statistic(self, path: str) -> bool:
        name, _, rest = path.partition(SEPARATOR)
        return self.parts[name].is_batch_statistic(rest)

    @property
    def layouts(self) -> dict[str, Layout]:
        return {f"{name}{SEPARATOR}{path}": layout for name, part in self.parts.items()
                for path, layout in part.layouts.items()}

    @property
    def embeddings(self) -> frozenset[str]:
        return frozenset(f"{name}{SEPARATOR}{path}" for name, part in self.parts.items() for path in part.embeddings)

    @property
    def param_variables(self) -> dict[tuple[Any, ...], Any]:
        return {(name, *path): variable for name, part in self.parts.items()
                for path, variable in part.param_variables.items()}

    @property
    def sows_losses(self) -> bool:
        return any(part.sows_losses for part in self.parts.values())

    def sown_losses(self, model_state: dict) -> list[jax.Array]:
        return [loss for name, part in self.parts.items() for loss in part.sown_losses(model_state[name])]

    def absorb(self, params: dict, model_state: dict) -> None:
        """Writes copies of the values into the user's modules that hold values."""
        for name, part in self.parts.items():
            part.absorb(params[name], model_state[name])

    def variable_identities(self) -> Iterable[int]:
        for part in self.parts.values():
            yield from part.variable_identities()

    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        """See the base class. Paths of layers begin with the module's name."""
        self._check_names(inputs)
        params, states = {}, []
        for name, part in self.parts.items():
            params[name], values = part.observe_calls(inputs[name], _PartObserver(observer, name))
            states += [{name: state} for state in values]
        return params, states

    def summary_rows(self, inputs: Mapping[str, Any]) -> list[LayerRow]:
        """Returns the rows of each module in turn. `inputs` has one batch for each module, by name."""
        self._check_names(inputs)
        return [row._replace(path="/".join(filter(None, (name, row.path))))
                for name, part in self.parts.items() for row in part.summary_rows(inputs[name])]

    def find_layers(self, inputs: Mapping[str, Any] | None) -> list[ModuleLayer]:
        """Returns each module and its layers. No module encloses them."""
        return [layer._replace(path=SEPARATOR.join(filter(None, (name, layer.path))))
                for name, part in self.parts.items() for layer in part.layers(None if inputs is None else inputs[name])]

    def layer_path(self, path: str) -> str:
        name, _, rest = path.partition(SEPARATOR)
        return f"{name}{SEPARATOR}{self.parts[name].layer_path(rest)}"

    def _check_names(self, inputs: PyTree) -> None:
        if not isinstance(inputs, Mapping):
            raise TypeError(f"`inputs` must be a dict with a batch for each of: {', '.join(sorted(self.parts))}. "
                            f"Received: {describe(inputs)}. Override `sample_inputs` to make it from a batch, such as "
                            f"`return {{{', '.join(f'{name!r}: x' for name in self.parts)}}}`.")
        for name in inputs:
            if name not in self.parts:
                raise unknown_name("module", name, self.parts)
        missing = sorted(set(self.parts) - set(inputs))
        if missing:
            raise ValueError(f"`inputs` must have a batch for each module. Missing: {', '.join(missing)}.")


class _PartObserver:
    """Notifies an observer of the calls of a named module, with its name in front of the paths."""

    def __init__(self, observer: CallObserver, name: str):
        self._observer, self._name = observer, name

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._observer.trace(function, *args)

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        return self._observer.begin((self._name, *path), type_name, arguments)

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        return self._observer.end((self._name, *path), outputs)


def _check_shares_nothing(parts: Mapping[str, FunctionalModule]) -> None:
    owners: dict[int, str] = {}
    for name, part in parts.items():
        for identity in part.variable_identities():
            if owners.setdefault(identity, name) != name:
                raise ValueError(f"Modules {owners[identity]!r} and {name!r} share a variable. Expected: modules "
                                 "without common parts. Make them attributes of one module.")
