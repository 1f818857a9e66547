"""A report as Markdown, with its figures in separate files."""

from __future__ import annotations

import os

from trainer.tools.report.page import Page, Picture, Table


def as_markdown(page: Page, footer: str, folder: str) -> tuple[str, dict[str, bytes]]:
    """Returns a report as Markdown, and its figures, which belong in `folder`, by their file names."""
    lines, files = [f"# {_text(page.title)}", "", f"Status: {page.status}", ""], {}
    lines += _table(Table([list(fact) for fact in page.facts]))
    for section in page.sections:
        lines += ["", f"## {_text(section.title)}", ""]
        for part in section.parts:
            if isinstance(part, Picture):
                files[f"{part.name}.png"] = part.as_png()
                lines += [f"![{_text(part.alt)}]({folder}/{part.name}.png)", ""]
            elif isinstance(part, Table):
                lines += [*([_text(part.caption), ""] if part.caption else []), *_table(part), ""]
            else:
                lines += [_text(part), ""]
    return "\n".join([*lines, "---", "", footer, ""]), files


def folder_of(path: str) -> str:
    """Returns the name of the folder for a report's figures.

    >>> folder_of("runs/report.md")
    'report_files'
    """
    return f"{os.path.splitext(os.path.basename(path))[0]}_files"


def _table(table: Table) -> list[str]:
    if not table.rows:
        return []
    heading = table.heading if table.heading is not None else [""] * len(table.rows[0])
    code = "`" if table.is_code else ""
    body = ["| " + " | ".join(f"{code}{_text(cell, bool(code))}{code}" if cell else "" for cell in row) + " |"
            for row in table.rows]
    return ["| " + " | ".join(map(_text, heading)) + " |", "|" + "---|" * len(heading), *body]


def _text(text: str, is_code: bool = False) -> str:
    """Returns a text with Markdown's special characters escaped."""
    text = " ".join(text.split())
    if is_code:
        return text.replace("`", "'").replace("|", "\\|")
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in text)
