"""The pages of the documentation: their code, their tables and their links."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from tests.support import project_files


def read(name: str) -> str:
    """Returns the text of a page, such as "docs/estimator.md"."""
    return (project_files.ROOT / name).read_text()


def blocks(name: str, language: str = "python") -> list[str]:
    """Returns the code of a page in one language. Blocks fenced as "python" run as they stand; "py" is other code."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)


def run(name: str) -> dict[str, Any]:
    """Runs the blocks of a page one after another, and returns the names that they leave."""
    names, code = {"__name__": "__main__"}, blocks(name)
    assert code, f"{name} has no code to run"
    for block in code:
        exec(compile(block, name, "exec"), names)
    return names


def rows_of_tables(name: str) -> list[list[str]]:
    """Returns the cells of each row of all tables of a page, without their headings."""
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", read(name), re.MULTILINE)
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")]
            for table in tables for line in table.splitlines()]


def linked_files(name: str) -> list[pathlib.Path]:
    """Returns the files of the project that a page links to, whether they exist or not."""
    folder = (project_files.ROOT / name).parent
    return [folder / target for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", read(name))]
