"""Pages from elsewhere in the project, which have a copy on the site."""

from __future__ import annotations

import pathlib
import posixpath
import re

_COPIES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "generated/contributing.md",
    "CHANGELOG.md": "generated/changelog.md",
    "benchmarks/RESULTS.md": "generated/results.md",
    "benchmarks/GPU.md": "generated/gpu.md",
}
_TITLES = {"generated/gpu.md": "GPUs"}


def copy_of(path: str) -> str | None:
    """Returns the page of the site, below docs/, that shows a file of the project; None if there is none.

    Args:
      path: the file's path from the project's root, such as "examples/digits.py".
    """
    if re.fullmatch(r"examples/\w+\.py", path):
        return f"generated/{path.removesuffix('.py')}.ipynb"
    return _COPIES.get(path)


def pages(root: pathlib.Path) -> dict[str, str]:
    """Returns the copies, by path below docs/, with links that lead to the same places as those of the originals."""
    return {copy: _moved((root / path).read_text(), path, copy)
            for path, copy in _COPIES.items() if copy.startswith("generated/")}


def _moved(text: str, path: str, copy: str) -> str:
    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        shown = copy_of(target) or posixpath.relpath(target, "docs")
        return f"]({posixpath.relpath(shown, posixpath.dirname(copy))}{match[2] or ''})"

    text = re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)", link, text)
    return re.sub(r"^# .*$", f"# {_TITLES[copy]}", text, count=1, flags=re.MULTILINE) if copy in _TITLES else text
