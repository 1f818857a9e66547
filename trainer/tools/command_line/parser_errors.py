"""The errors of jsonargparse, shortened, with the fix.

Owns the knowledge of jsonargparse's texts: a rule is a pattern of them, and a function that returns the text to show.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable

from trainer.core.errors import near_hint

MODEL, DATA = "model", "data"
_HINTS = {
    MODEL: "`model` is a class of Flax or a `trainer.Model`, or a function with such an annotation of its result, such "
           "as `def model(width: int = 64) -> trainer.Model`.",
    DATA: "`data` is a function whose result is annotated as a plain `dict`, such as `def data(rows: int = 100) -> "
          "dict`, which returns `{\"train\": (x, y)}`, or a class with a property `train`.",
}
_RATE = "It is an argument of the optimizer: `--compile.optimizer Adam --compile.optimizer.learning_rate 0.01`."
_OTHER_PLACES = {"fit": "The arguments of `fit` are in the section 'trainer'.", "learning_rate": _RATE, "lr": _RATE}

_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)")
# Not of a module that a found module imports.
_UNKNOWN_MODULE = re.compile(r"class_path '(\w+)\.[\w.]+':\s+No module named '\1'")
_UNKNOWN_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
# At the top, in a group, and of a command line.
_UNKNOWN_KEY = re.compile(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'(?: is not accepted)?$|"
                          r"unrecognized arguments: --([^ =]+)")
# The errors of all types of a union, of which most say only that a value is of another type.
_UNION = re.compile(r"(?P<key>.*)\n  Does not validate against any of the Union subtypes\n  Subtypes: .*\n  Errors:\n"
                    r"(?P<errors>(?:    .*\n)*)  Given value type: .*\n  (?P<value>Given value: .*)(?P<hint>(?:\n.*)*)")
_OF_ANOTHER_TYPE = re.compile(r"- (?:Expected a |Does not validate |Unexpected import path |"
                              r"Not of type \w+: Expected a name without dots)")


def explained(message: str, keys: Collection[str], classes: Collection[str]) -> str:
    """Returns the text for an error of jsonargparse.

    Args:
      message: the error.
      keys: the keys that the parser accepts.
      classes: the names of the classes that stand without a path.
    """
    for pattern, explain in _RULES:
        if found := pattern.search(message):
            message = explain(message, found)
    if "Did you mean" not in message and (near := _near_classes(message, classes)):
        message = f"{message}\n{near}"
    if unknown := _UNKNOWN_KEY.match(message):
        message = f"{message}. {_of_unknown_key('.'.join(filter(None, unknown.groups())), keys)}"
    return _UNION.sub(_shortened, message, count=1)


def _of_class_after_argument(_: str, found: re.Match[str]) -> str:
    section = found[1]
    return (f'Parser key "{section}":\n  An argument `--{section}.KEY` comes before the class that it is of. Give '
            f"`--config FILE`, or `--{section} CLASS` first: options are read in order.")


def _of_another_kind(message: str, found: re.Match[str]) -> str:
    hints = [hint for section, hint in _HINTS.items() if f'key "{section}"' in message]
    return "\n".join([message.replace(found[0], f"{found[1]!r} is {_described(found[1])}"), *hints])


def _of_missing_arguments(message: str, found: re.Match[str]) -> str:
    return "\n".join([message, "`--config FILE` gives them, such as the `config.yaml` of a run's folder.",
                      *(_HINTS[name] for name in found[1].split(", ") if name in _HINTS)])


# In their order: the text of a rule is that of the rules before it.
_RULES: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str]], str]], ...] = (
    # Of an argument of a class that no option before it names: jsonargparse takes the type for the class.
    (re.compile(r'^Parser key "(\w+)":\s+Import path trainer\.tools\.command_line\.\w+\.\w+ does not correspond'),
     _of_class_after_argument),
    (re.compile(r"Import path (\S+) does not correspond to a subclass of (?:Network|DataSets)"), _of_another_kind),
    (re.compile(r"arguments are required: (.*)"), _of_missing_arguments),
    (re.compile(r"^unrecognized arguments: ([^-\s]\S*)"),
     lambda message, found: f"{message}. An argument is `--KEY VALUE`; a file is `--config {found[1]}`."),
    (re.compile(r"- Expected a <class 'list'>(?:.*\n)*  Given value type: <class 'str'>\n  Given value: (.*)"),
     lambda message, found: f"{message}\nWrite a list: `[{found[1]}]`."),
    (re.compile(r"\n  Given value type: <class 'dict'>\n  Given value: \{(?!.*'class_path')"),
     lambda message, _: f"{message}\nAn object is `{{class_path: Adam, init_args: {{learning_rate: 0.01}}}}`; a name "
                        "alone is `adam`."),
)


def _shortened(union: re.Match[str]) -> str:
    """Returns the error of a union without the types, and without the errors that say only that the type is another."""
    errors = re.findall(r"^    - .*\n(?:     .*\n)*", union["errors"], re.MULTILINE)
    telling = [error for error in errors if not _OF_ANOTHER_TYPE.match(error.lstrip())] or errors
    text = re.sub(r"^    (?:- (?:Not of type \w+: )?)?", "  ", "".join(telling), flags=re.MULTILINE)
    inner = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("Subtypes: "))
    return f"{union['key']}\n{inner}\n  {union['value']}{union['hint']}"


def _near_classes(message: str, classes: Collection[str]) -> str:
    """Returns a line with similar names for an error about the name of a class or a function, or an empty string."""
    short = None if "Given value: NestedArg(" in message else _UNKNOWN_CLASS.search(message)  # else of an argument
    if short:
        if section := next((name for name in _HINTS if f'key "{name}"' in message), None):
            return f"{short[1]!r} is {_described(short[1])}\n{_HINTS[section]}"
        near = near_hint(short[1], classes)
        return near if near.startswith("Did you mean") else ""
    if missing := _UNKNOWN_MODULE.search(message):
        return (f"{near_hint(missing[1], _modules_in([os.curdir]))} Modules of your own are found from the folder in "
                "which the command runs.")
    if (path := _UNKNOWN_ATTRIBUTE.search(message)) and path[1] in sys.modules:
        module = sys.modules[path[1]]
        names = {*dir(module), *_modules_in(getattr(module, "__path__", ()))}
        return near_hint(path[2], [name for name in names if not name.startswith("_")])
    return ""


def _modules_in(folders: Iterable[str]) -> list[str]:
    """Returns the names of the Python files and of the folders that can be imported from some folders."""
    entries = [entry for folder in folders for entry in os.scandir(folder)]
    names = [entry.name.removesuffix(".py") for entry in entries if entry.is_dir() or entry.name.endswith(".py")]
    return [name for name in names if name.isidentifier()]


def _described(path: str) -> str:
    """Returns the kind of the object at a class path, and the annotation of a function's result."""
    if "." not in path:
        return f"a name without that of its Python file: `my_file.{path}`"
    found = pkgutil.resolve_name(path)
    if isinstance(found, type) or not callable(found):
        return f"the class {found.__name__}" if isinstance(found, type) else f"a value of type {type(found).__name__}"
    result = inspect.signature(found).return_annotation
    if result is inspect.Signature.empty:
        return "a function without an annotation of its result"
    return f"a function whose result is annotated as {inspect.formatannotation(result)}"


def _of_unknown_key(key: str, known: Collection[str]) -> str:
    sections = {name.partition(".")[0] for name in known}
    section = key.partition(".")[0]
    if section not in sections:
        deeper = {name for name in known if name.endswith(f".{section}")}
        key, known = section, deeper or sections
    place = _OTHER_PLACES.get(key.rpartition(".")[2]) if "compile" in sections else None  # not of a class
    return place or near_hint(key, known)
