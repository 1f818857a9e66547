"""Measures of the code: `python -m tests.project.measures [FOLDER]` prints a table, of this or of another checkout.

Lines by room, private names of other files, parameters typed `Any`, words of docstrings and comments, long functions.
`test_measures.py` holds some of them to limits.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("trainer", "callbacks", "models")
TEXT_FOLDERS = ("tests/support", "benchmarks")  # their docstrings and comments are measured too
_PRIVATE = re.compile(r"_[a-z]\w*")
# Of NamedTuples, `os` and `sys`: documented, in spite of their underscores.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames"}
_WORD = re.compile(r"[A-Za-z']+")
# "what" as a noun, and "one" as a pronoun: not before a noun, and not as a number.
_WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
_ONE = re.compile(r"\bones\b|\bone(?=[.,;:)]|$|\s+(?:is|are|was|that|which|who|of|has|may|can|for|in|with|and|or|by|to)"
                  r"\b)", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`|^\s*(?:>>>|\.\.\.).*$", re.MULTILINE)


@dataclasses.dataclass
class Words:
    """Counts of words in docstrings or comments.

    Attributes:
      count: number of all words.
      whats, ones: numbers of "what", and of "one" as a pronoun.
    """

    count: int = 0
    whats: int = 0
    ones: int = 0

    def add(self, texts: Iterable[str]) -> None:
        """Counts the words of more texts, without their code."""
        for text in texts:
            text = _CODE.sub(" ", text)
            self.count += len(_WORD.findall(text))
            self.whats += len(_WHAT.findall(text))
            self.ones += len(_ONE.findall(text))

    def per_thousand(self) -> tuple[float, float]:
        """Returns the numbers of "what" and of the pronoun "one" per 1,000 words."""
        return 1000 * self.whats / max(self.count, 1), 1000 * self.ones / max(self.count, 1)


@dataclasses.dataclass
class Measures:
    """Counts of the sources.

    Attributes:
      lines: the lines of each room.
      code_lines: the lines without docstrings, comments and blank lines.
      reaches: `file: name`, for each private name that a file uses of another file.
      parameters: number of parameters of functions, by whether the function is public.
      bare: number of the parameters typed `Any`.
      long_bodies: `file: function`, for bodies of more than 50 lines.
      docstrings, comments: their words.
    """

    lines: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    code_lines: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    reaches: set[str] = dataclasses.field(default_factory=set)
    parameters: collections.Counter[bool] = dataclasses.field(default_factory=collections.Counter)
    bare: collections.Counter[bool] = dataclasses.field(default_factory=collections.Counter)
    long_bodies: list[str] = dataclasses.field(default_factory=list)
    docstrings: Words = dataclasses.field(default_factory=Words)
    comments: Words = dataclasses.field(default_factory=Words)


def sources(root: pathlib.Path = ROOT, folders: Iterable[str] = FOLDERS) -> dict[str, str]:
    """Returns sources by path, relative to the root; by default the package's."""
    return {str(path.relative_to(root)): path.read_text() for folder in folders
            for path in sorted((root / folder).rglob("*.py")) if not (root / folder).is_symlink()}


def measured(files: dict[str, str]) -> Measures:
    """Returns the measures of sources."""
    found = Measures()
    for path, source in files.items():
        tree = ast.parse(source)
        room = "/".join(path.split("/")[:-1][:3])
        found.lines[room] += source.count("\n")
        found.code_lines[room] += len(_lines_of_code(tree))
        found.reaches |= {f"{path}: {name}" for name in private_names(tree) - PUBLIC}
        found.docstrings.add(docstrings(tree))
        found.comments.add(comments(source))
        for name, function in _functions(tree):
            is_public = not re.search(r"(^|\.)_(?!_)", name)
            arguments = function.args
            for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if each.arg not in ("self", "cls"):
                    found.parameters[is_public] += 1
                    found.bare[is_public] += isinstance(each.annotation, ast.Name) and each.annotation.id == "Any"
            body = function.body[1:] if ast.get_docstring(function) else function.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 > 50:
                found.long_bodies.append(f"{path}: {name}")
    return found


def private_names(tree: ast.Module) -> set[str]:
    """Returns the private names that a source uses and does not define itself."""
    own: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if is_own and isinstance(node.ctx, ast.Store) else set() if is_own else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer"):
            used |= {alias.name for alias in node.names if _PRIVATE.fullmatch(alias.name)}
    return used - own


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yields the docstrings of a source."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
                text := ast.get_docstring(node)):
            yield text


def comments(source: str) -> Iterator[str]:
    """Yields the comments of a source; consecutive lines of comments are a single text."""
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number, text = token.start[0], token.string.lstrip("#")
        is_alone = token.line.lstrip().startswith("#")
        if lines and not (is_alone and number == last + 1):
            yield "\n".join(lines)
            lines = []
        lines.append(text)
        last = number if is_alone else 0
    if lines:
        yield "\n".join(lines)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _lines_of_code(tree: ast.Module) -> set[int]:
    skipped = {id(node.body[0]) for node in ast.walk(tree)
               if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
               and ast.get_docstring(node)}
    found: set[int] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if id(node) in skipped:
            continue
        if isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno is not None:
            found |= set(range(node.lineno, node.lineno + 1)) | {node.end_lineno}
            if isinstance(node, ast.expr):
                found |= set(range(node.lineno, node.end_lineno + 1))
        waiting += ast.iter_child_nodes(node)
    return found


def main(root: pathlib.Path) -> None:
    files = sources(root)
    found = measured(files)
    print(f"{'room':<24}{'lines':>8}{'code':>8}")
    for room in sorted(found.lines):
        print(f"{room:<24}{found.lines[room]:>8,}{found.code_lines[room]:>8,}")
    print(f"{'all':<24}{found.lines.total():>8,}{found.code_lines.total():>8,}")
    share = {name: 100 * found.bare[name] / max(found.parameters[name], 1) for name in (True, False)}
    of_all = 100 * found.bare.total() / max(found.parameters.total(), 1)
    entries = sum(path.name != "__pycache__" for path in (root / "trainer").iterdir())
    print(f"files {len(files)}, the longest {max(text.count(chr(10)) for text in files.values())} lines; entries of "
          f"trainer/ {entries}")
    print(f"private names used across files {len(found.reaches)}")
    print(f"parameters typed bare Any: public {share[True]:.1f} %, all {of_all:.1f} %")
    print(f"bodies of more than 50 lines {len(found.long_bodies)}")
    others = measured(sources(root, TEXT_FOLDERS))
    for name, words in {"docstrings": found.docstrings, "comments": found.comments,
                        "docstrings of tests/support and benchmarks": others.docstrings,
                        "comments of tests/support and benchmarks": others.comments}.items():
        whats, ones = words.per_thousand()
        print(f"words of {name} {words.count:,}; per 1,000: what {whats:.1f}, pronoun one {ones:.1f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
