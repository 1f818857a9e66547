"""The pages of the reference: every public name of every public module, from its docstring."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

PACKAGE = "trainer"
_FOLDER = "generated/api"
# Public, and not in `__all__`: what needs an optional package, and modules of a package that are given by their names.
_BESIDES = {"trainer": ["TrainerClassifier", "TrainerRegressor"], "trainer.callbacks": ["loggers"]}
_NOTES = {"trainer": "What most programs need. The modules have pages of their own."}


def public_names() -> dict[str, list[str]]:
    """Returns the public names of each public module, by the module's path as users write it."""
    found: dict[str, list[str]] = {}
    waiting = [PACKAGE]
    while waiting:
        path = waiting.pop(0)
        members = {name: getattr(named(path), name) for name in [*_listed(named(path)), *_BESIDES.get(path, ())]}
        modules = [name for name, value in members.items() if inspect.ismodule(value)]
        found[path] = [name for name in members if name not in modules]
        waiting += [f"{path}.{name}" for name in modules]
    return found


def _listed(module: Any) -> list[str]:
    """Returns the names in a module's `__all__`, or else those that it defines."""
    own = [name for name, value in vars(module).items()
           if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__]
    return list(getattr(module, "__all__", own))


def named(path: str) -> Any:
    """Returns what a dotted path from the package leads to."""
    first, *rest = path.split(".")
    return functools.reduce(getattr, rest, importlib.import_module(first))


def pages() -> dict[str, str]:
    """Returns the pages, one for each module and one that lists these, as reStructuredText by path below docs/."""
    names = public_names()
    homes = _homes(names)
    texts = {f"{_FOLDER}/{module}.rst": _page(module, listed, homes) for module, listed in names.items()}
    rows = "".join(f"   * - :doc:`{module}`\n     - {_summary(module)}\n" for module in names)
    tree = "".join(f"   {module}\n" for module in names)
    texts[f"{_FOLDER}/index.rst"] = (
        f"{_title('Reference')}Every public name, from its docstring.\n\n"
        f".. list-table::\n   :widths: 30 70\n\n{rows}\n.. toctree::\n   :hidden:\n\n{tree}")
    return texts


def _homes(names: dict[str, list[str]]) -> dict[int, str]:
    """Returns under which name each object is documented: of several, its own one, in the first module that has it."""
    homes: dict[int, str] = {}
    for is_own in (True, False):
        for module, listed in names.items():
            for name in listed:
                value = named(f"{module}.{name}")
                if (inspect.isclass(value) or inspect.isroutine(value)) and (value.__name__ == name) is is_own:
                    homes.setdefault(id(value), f"{module}.{name}")
    return homes


def _page(module: str, names: list[str], homes: dict[int, str]) -> str:
    # Classes first, by their names; then what is written in lower case.
    names = sorted(names, key=lambda name: (name.islower(), name.lower()))
    parts = [_title(module), f".. py:module:: {module}\n\n", f"{_NOTES.get(module, _summary(module))}\n\n",
             ".. py:currentmodule:: " + module + "\n\n"]
    own = [name for name in names if _home(module, name, homes) == f"{module}.{name}"]
    if own:
        parts.append(".. autosummary::\n   :nosignatures:\n\n" + "".join(f"   {name}\n" for name in own) + "\n")
    parts += [_entry(module, name, homes) for name in names]
    return "".join(parts)


def _home(module: str, name: str, homes: dict[int, str]) -> str:
    return homes.get(id(named(f"{module}.{name}")), f"{module}.{name}")


def _entry(module: str, name: str, homes: dict[int, str]) -> str:
    value, full = named(f"{module}.{name}"), f"{module}.{name}"
    home = _home(module, name, homes)
    if home != full:
        kind = "class" if inspect.isclass(value) else "function"
        return f".. py:{kind}:: {name}\n\n   The same as :py:obj:`{home}`.\n\n"
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        documented = any(id(base) in homes for base in value.__mro__[1:])  # and with it what this class inherits
        return f".. auto{kind}:: {full}\n   :members:\n" + (
            "   :show-inheritance:\n\n" if documented else f"   :inherited-members: {', '.join(_foreign(value))}\n\n")
    return f".. auto{'function' if inspect.isroutine(value) else 'data'}:: {full}\n\n"


def _foreign(value: type) -> list[str]:
    """Returns the names of the bases that are not the project's."""
    return sorted({base.__name__ for base in value.__mro__ if base.__module__.split(".")[0] != PACKAGE})


def _summary(module: str) -> str:
    docstring: Any = named(module).__doc__
    return " ".join(docstring.split("\n\n")[0].split())


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"
