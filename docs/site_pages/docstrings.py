"""Docstrings as Sphinx reads them: the project's are Google's style with Markdown's code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
# The names of several arguments of one description, which go on in the next line.
_UNFINISHED = re.compile(r"\s+(\*{0,2}\w+, )*\*{0,2}\w+,")
_SEVERAL = re.compile(r"(\s+)((?:\*{0,2}\w+, )+\*{0,2}\w+)(:.*)")
# Where napoleon splits a line, and what hides these places from it.
_LONE_COLON = re.compile(r"(?<!:):(?!:)")
_COLON = "\ue000"


def restructured(lines: list[str], is_attribute: bool = False) -> list[str]:
    """Returns a docstring in reStructuredText.

    Args:
      lines: those of the docstring.
      is_attribute: whether it is of an attribute or a property, of which the first line would be "type: description".

    >>> restructured(["Of `Dataset`s with `x: int`, val_ in front; see docs/resume.md."])
    ['Of `Dataset`\\\\ s with ``x: int``, val\\\\_ in front; see :doc:`/resume`.']
    >>> restructured(["Doubles:", "", "    y_ = 2 * `x`", "", ">>> y_ = `x`", "`x`"])
    ['Doubles:', '', '::', '', '    y_ = 2 * `x`', '', '>>> y_ = `x`', '`x`']
    """
    joined: list[str] = []
    for line in lines:
        if joined and _UNFINISHED.fullmatch(joined[-1]):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    done: list[str] = []
    for is_code, group in itertools.groupby(_marked(_one_by_one(joined)), key=lambda marked: marked[0]):
        part = [line for _, line in group]
        done += part if is_code else _prose(part)
    for place in range(len(done)):
        if (is_attribute and place == 0) or (place > 0 and done[place - 1].strip() in ("Returns:", "Yields:")):
            done[place] = _LONE_COLON.sub(_COLON, done[place])
    return done


def with_colons(lines: list[str]) -> list[str]:
    """Returns lines of `restructured` that napoleon has read, with the colons that it would have split them at.

    >>> with_colons(restructured(["One of two: `a` or `b`."], is_attribute=True))
    ['One of two: `a` or `b`.']
    """
    return [line.replace(_COLON, ":") for line in lines]


def _marked(lines: list[str]) -> Iterator[tuple[bool, str]]:
    """Yields the lines and whether they are code: doctests, and blocks that are indented more than the text before."""
    text, margin, is_after_blank = "", 0, False  # the line of text before
    is_doctest = is_block = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            is_block = is_block and indent > margin
        else:
            is_doctest = False
        if not is_block and line.lstrip().startswith(">>> "):
            is_doctest = True
        elif not is_block and not is_doctest and is_after_blank and line.strip() and indent > margin:
            is_block = True
            if not text.endswith("::"):
                yield from ((True, f"{' ' * margin}::"), (True, ""))
        yield is_block or is_doctest, line
        is_after_blank = not line.strip()
        if line.strip() and not is_block and not is_doctest:
            text, margin = line, indent


def _prose(lines: list[str]) -> list[str]:
    parts = _CODE.split("\n".join(lines))
    parts[::2] = [_text(part, is_after_code=place > 0) for place, part in enumerate(parts[::2])]
    parts[1::2] = [f"`{code}`" if _NAME.fullmatch(code) else f"``{code}``" for code in parts[1::2]]
    return "".join(parts).split("\n")


def _one_by_one(lines: list[str]) -> list[str]:
    """Returns the lines with an entry for each of several arguments that share one."""
    done: list[str] = []
    for place, line in enumerate(lines):
        several = _SEVERAL.fullmatch(line)
        if several is None:
            done.append(line)
            continue
        indent, names, text = several.groups()
        more = itertools.takewhile(lambda other: other.startswith(f"{indent} "), lines[place + 1:])  # noqa: B023
        description = [text, *more]
        *others, last = names.split(", ")
        for name in others:
            done += [f"{indent}{name}{description[0]}", *description[1:]]
        done.append(f"{indent}{last}{text}")  # whose further lines come next
    return done


def _text(text: str, is_after_code: bool) -> str:
    if is_after_code and re.match(r"\w", text):  # code and text make one word
        text = f"\\ {text}"
    text = re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)
    return re.sub(r"\bdocs/(\w+)\.md", r":doc:`/\1`", text)
