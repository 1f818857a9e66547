"""The public names of a package, which the stub beside its `__init__.py` lists once.

Type checkers read the stub, in which `from home import name as name` makes a name public. A running program reads the
same lines: they say where a name lives, and it is imported from there when it is first used.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping


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
            hint = missing[name] if missing and name in missing else _place_of(name, tuple(names))
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(f"{text}. {hint}" if hint else text, name=name, obj=module)
        value: object = (importlib.import_module(f"{package}.{name}") if home == package
                         else getattr(__import__(home, fromlist=[name]), name))
        setattr(module, name, value)
        return value

    def listed() -> list[str]:
        return sorted([*names, *(name for name in vars(module) if name.startswith("__") and name.endswith("__"))])

    return load, listed, names


@functools.cache  # libraries ask modules for names that they lack, such as `hasattr` in a loop over all classes
def _place_of(name: str, names: tuple[str, ...]) -> str:
    """Returns a sentence with the place of a name in another public package, or with similar names; or no text."""
    from trainer.core.errors import near_hint  # not at the top, for the launcher, which imports little

    if name.startswith("_"):
        return ""
    root = os.path.dirname(sys.modules["trainer"].__file__ or "")
    for folder in ["", *sorted(os.listdir(root))]:
        stub = os.path.join(root, folder, "__init__.pyi")
        if os.path.exists(stub):
            with open(stub, encoding="utf-8") as file:
                if re.search(rf"\bas {re.escape(name)}\b", file.read()):
                    return f"It is `{'.'.join(filter(None, ('trainer', folder, name)))}`."
    near = near_hint(name, names)
    return near if near.startswith("Did you mean") else ""


def own_names(name: str) -> tuple[Callable[[], list[str]], list[str]]:
    """Returns `__dir__` and `__all__` for a public module that defines its names itself; called at its end.

    Args:
      name: the `__name__` of the module.

    >>> __dir__, __all__ = own_names("trainer.core.public_names")
    >>> __all__
    ['attach_stub', 'own_names']
    """
    names = sorted(public for public, value in vars(sys.modules[name]).items()
                   if not public.startswith("_") and getattr(value, "__module__", None) == name)
    return lambda: names, names
