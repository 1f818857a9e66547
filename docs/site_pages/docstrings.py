"""Docstrings as Sphinx reads them: the project's are Google's style with Markdown's code."""

from __future__ import annotations

import itertools
import re

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
# The names of several arguments of one description, which go on in the next line.
_UNFINISHED = re.compile(r"\s+(\*{0,2}\w+, )*\*{0,2}\w+,")
_SEVERAL = re.compile(r"(\s+)((?:\*{0,2}\w+, )+\*{0,2}\w+)(:.*)")


def restructured(lines: list[str]) -> list[str]:
    """Returns a docstring in reStructuredText.

    >>> restructured(["Of `Dataset`s with `x: int`, val_ in front; see docs/resume.md."])
    ['Of `Dataset`\\\\ s with ``x: int``, val\\\\_ in front; see :doc:`/resume`.']
    """
    joined: list[str] = []
    for line in lines:
        if joined and _UNFINISHED.fullmatch(joined[-1]):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    parts = _CODE.split("\n".join(_one_by_one(joined)))
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
