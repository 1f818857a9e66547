"""A report as a single HTML file, which needs no other file and no network."""

from __future__ import annotations

import base64
import itertools
import re
from html import escape

from trainer.tools.report.page import UNKNOWN, Page, Picture, Section, Table

_NUMBER = re.compile(r"-?[\d.,]+(e[-+]?\d+)?( ?%| [a-zA-Z]+( \d+ [a-z]+)?)?")
_STYLE = """
:root { --text: #1c2430; --quiet: #5d6b7c; --line: #e1e6ec; --back: #f5f7f9; --accent: #1f6fb4; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 60px; }
header { display: flex; align-items: baseline; gap: 14px; flex-wrap: wrap; margin-bottom: 18px; }
h1 { font-size: 27px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 14px; }
.status { font-size: 13px; padding: 2px 11px; border-radius: 11px; background: #e8edf2; color: var(--quiet); }
.finished { background: #dff3e4; color: #1d6b37; }
.failed { background: #fbe3e1; color: #a2271c; }
.running, .interrupted { background: #fdf0d5; color: #84570b; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 18px; }
.fact, section { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.fact { padding: 11px 15px; }
.fact b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums;
          overflow-wrap: anywhere; }
.fact span { color: var(--quiet); font-size: 13px; }
section { padding: 18px 22px 20px; margin-bottom: 18px; }
img { max-width: 100%; height: auto; display: block; margin: 4px auto 12px; }
.tables { display: flex; flex-wrap: wrap; gap: 10px 56px; align-items: flex-start; }
.scroll { overflow-x: auto; margin: 4px 0 8px; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: left; padding: 5px 22px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
thead th { color: var(--quiet); font-weight: 500; border-bottom: 1px solid #c5ced8; white-space: nowrap; }
tbody th { color: var(--quiet); font-weight: 400; white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
thead th.number { text-align: right; }
.code td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
caption { caption-side: top; text-align: left; color: var(--quiet); font-size: 13px; padding-bottom: 4px; }
p { margin: 4px 0 12px; max-width: 78ch; overflow-wrap: anywhere; }
footer { color: var(--quiet); font-size: 13px; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


def as_html(page: Page, footer: str) -> str:
    """Returns a report as the text of an HTML file."""
    facts = "".join(f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
                    for name, value in page.facts)
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
            f'<header><h1>{escape(page.title)}</h1><span class="status {escape(page.status)}">{escape(page.status)}'
            f'</span></header>\n<div class="facts">{facts}</div>\n{"".join(map(_section, page.sections))}'
            f"<footer>{escape(footer)}</footer>\n</main>\n</body>\n</html>\n")


def _section(section: Section) -> str:
    parts: list[str] = []
    for is_table, group in itertools.groupby(section.parts, lambda part: isinstance(part, Table)):
        inner = "".join(map(_part, group))
        parts.append(f'<div class="tables">{inner}</div>\n' if is_table else inner)
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{''.join(parts)}</section>\n"


def _part(part: Table | Picture | str) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>\n"
    if isinstance(part, Picture):
        data = base64.b64encode(part.as_svg()).decode()
        return f'<img alt="{escape(part.alt)}" src="data:image/svg+xml;base64,{data}">\n'
    return _table(part)


def _table(table: Table) -> str:
    columns = [[row[index] for row in table.rows] for index in range(len(table.rows[0]))] if table.rows else []
    # The first column names the rows.
    numeric = [index > 0 and all(map(_is_number, column)) and any(column) for index, column in enumerate(columns)]
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head, body = "", []
    if table.heading is not None:
        cells = "".join(f"<th{_class(is_number)}>{escape(cell)}</th>"
                        for cell, is_number in zip(table.heading, numeric, strict=True))
        head = f"<thead><tr>{cells}</tr></thead>"
    for row in table.rows:
        tag = "th" if table.heading is None else "td"
        first = f"<{tag}>{escape(row[0])}</{tag}>"
        rest = "".join(f"<td{_class(is_number)}>{escape(cell)}</td>"
                       for cell, is_number in zip(row[1:], numeric[1:], strict=True))
        body.append(f"<tr>{first}{rest}</tr>")
    kind = ' class="code"' if table.is_code else ""
    return f'<div class="scroll"><table{kind}>{caption}{head}<tbody>{"".join(body)}</tbody></table></div>\n'


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _is_number(cell: str) -> bool:
    """Returns whether a cell is empty, or a number, possibly with a unit, such as "1.5 KiB", "12.0%" or "1 min 5 s"."""
    return cell in ("", UNKNOWN) or _NUMBER.fullmatch(cell) is not None
