"""The public names of a package, which the stub beside its `__init__.py` lists once.

Type checkers read the stub, in which `from home import name as name` makes a name public. A running program reads the
same lines: they say where a name lives, and it is imported from there when it is first used.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import NoReturn

from trainer.core.calls.callers import imports_the_name, is_import_of_a_module

# Public modules in public packages.
_NESTED = ("data/preprocessing/__init__.pyi", "data/augmentation.py", "optimizers/schedules.py")


def attach_stub(
    package: str, hidden: Collection[str] = (), missing: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package with the names of its stub.

    Args:
      package: the `__name__` of the package, or of a module, that calls this.
      hidden: names that are left out of `__all__`, because they need an optional library.
      missing: for names of another library that the package lacks, the sentence that ends the error.

    >>> import trainer.regularizers
    >>> __getattr__, __dir__, __all__ = attach_stub("trainer.regularizers")
    >>> __getattr__("L2").__name__, "OrthogonalRegularizer" in __all__
    ('L2', True)
    """
    module = sys.modules[package]
    with open(f"{module.__file__}i", encoding="utf-8") as file:
        stub = ast.parse(file.read())
    homes = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names = sorted(homes.keys() - set(hidden))

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise _no_attribute(module, name, names, missing)
        value: object = (importlib.import_module(f"{package}.{name}") if home == package
                         else getattr(__import__(home, fromlist=[name]), name))
        _explain_arguments(value)
        setattr(module, name, value)
        return value

    def listed() -> list[str]:
        return sorted([*names, *(name for name in vars(module) if name.startswith("__") and name.endswith("__"))])

    return load, listed, names


def own_names(
    name: str, missing: Mapping[str, str] | None = None
) -> tuple[Callable[[str], NoReturn], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a public module that defines its names itself.

    Called at the end of the module.

    Args:
      name: the `__name__` of the module.
      missing: as for `attach_stub`.

    >>> __getattr__, __dir__, __all__ = own_names("trainer.core.calls.public_names")
    >>> __all__
    ['attach_stub', 'own_names']
    """
    module = sys.modules[name]
    names = sorted(public for public, value in vars(module).items()
                   if not public.startswith("_") and getattr(value, "__module__", None) == name)

    for public in names:
        _explain_arguments(getattr(module, public))

    def refuse(attribute: str) -> NoReturn:
        raise _no_attribute(module, attribute, names, missing)

    return refuse, lambda: names, names


def _explain_arguments(value: object) -> None:
    """Lets the errors of a public class for missing and unknown arguments say what to write."""
    if (not isinstance(value, type) or issubclass(value, (enum.Enum, tuple, BaseException))
            or value.__init__ is object.__init__):
        return
    _, *parameters = inspect.signature(value.__init__).parameters.values()
    if any(parameter.name.startswith("_") for parameter in parameters):  # made by functions, not by a script
        return
    takes_all_names = not parameters or parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    if not takes_all_names or any(parameter.default is parameter.empty for parameter in parameters[:-1]):
        from trainer.core.calls.entry_points import explains_arguments  # not at the top: it imports JAX

        explains_arguments(value)


def _no_attribute(
    module: ModuleType, name: str, names: list[str], missing: Mapping[str, str] | None
) -> AttributeError | ImportError:
    if is_import_of_a_module():
        return AttributeError(name)  # Python drops it; a hint would take longer than many an import
    hint = missing[name] if missing and name in missing else _place_of(name, tuple(names))
    end = f". {hint}" if hint else ""
    if imports_the_name():
        return ImportError(f"cannot import name {name!r} from {module.__name__!r}{end}",
                           name=module.__name__, path=module.__file__)
    return AttributeError(f"module {module.__name__!r} has no attribute {name!r}{end}", name=name, obj=module)


@functools.cache  # libraries ask modules for names that they lack, such as `hasattr` in a loop over all classes
def _place_of(name: str, names: tuple[str, ...]) -> str:
    """Returns a sentence with the place of a name in another public package, or with similar names."""
    from trainer.core.errors import name_hint  # not at the top, for the launcher, which imports little

    if name.startswith("_"):
        return ""
    root = pathlib.Path(sys.modules["trainer"].__file__ or "").parent
    for file in (root / "__init__.pyi", *sorted(root.glob("*/__init__.pyi")), *(root / file for file in _NESTED)):
        if re.search(rf"\bas {re.escape(name)}\b|^(class|def) {re.escape(name)}\b", file.read_text("utf-8"), re.M):
            package = file.parent if file.stem == "__init__" else file.with_suffix("")
            return f"It is `{'.'.join(('trainer', *package.relative_to(root).parts, name))}`."
    return name_hint(name, names)
