"""`python -m trainer explain CODE`: the entry of docs/errors.md that a message names, or an exit code.

Owns the way from the page to a terminal. The page is package data, so that no network is needed.
"""

from __future__ import annotations

import os
import re
import sys

from trainer.core.errors import near_hint, page_url

_PAGE = os.path.join(os.path.dirname(__file__), "errors.md")  # a link to docs/errors.md, which wheels follow
_UNKNOWN = 2
_SIGNALS = 128  # a larger exit code stands for a signal


def run(code: str | None) -> int:
    """Prints an entry, or the codes without `code`, and returns the exit code: 2 for an unknown code."""
    entries = {**_messages(), **_exit_codes()}
    if code is None:
        print("\n".join(["Codes of messages and exit codes:", *(f"  {name}" for name in entries)]))
        return 0
    code = code.lower()
    if code not in entries and code.isdecimal() and int(code) > _SIGNALS:
        code = f"{_SIGNALS} + s"
    if code not in entries:
        print(f"Unknown code {code!r}. {near_hint(code, entries)} `python -m trainer explain` lists all.",
              file=sys.stderr)
        return _UNKNOWN
    print(entries[code])
    return 0


def _messages() -> dict[str, str]:
    """Returns the entries under "Messages", by their headings."""
    _, *parts = re.split(r"^### (.+)\n", _section("Messages"), flags=re.MULTILINE)
    return {code: f"{code}\n\n{_with_addresses(text.strip())}\n\n{page_url('errors', code)}"
            for code, text in zip(parts[::2], parts[1::2], strict=True)}


def _exit_codes() -> dict[str, str]:
    """Returns the rows of the table of exit codes, by the codes; a code may have several rows."""
    found: dict[str, list[str]] = {}
    for code, owner, meaning in re.findall(r"^\| (\d+(?: \+ s)?) \| (.+?) \| (.+) \|$", _section("Exit codes"),
                                           re.MULTILINE):
        found.setdefault(code, []).append(f"exit code {code} of {owner}: {meaning}")
    return {code: "\n".join([*rows, "", page_url("errors", "exit-codes")]) for code, rows in found.items()}


def _section(title: str) -> str:
    with open(_PAGE, encoding="utf-8") as page:
        return page.read().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _with_addresses(text: str) -> str:
    """Returns a text of the page whose links, which are relative to docs/, are addresses.

    >>> _with_addresses("see [Data](data.md#rows)") == f"see Data ({page_url('data', 'rows')})"
    True
    """
    return re.sub(r"\[([^]]+)\]\((\w*)(?:\.md)?(?:#([\w-]+))?\)",
                  lambda link: f"{link[1]} ({page_url(link[2] or 'errors', link[3] or '')})", text)
