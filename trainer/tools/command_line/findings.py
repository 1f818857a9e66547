"""The findings of `python -m trainer doctor`: a line each, by section."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "note", "warning", "problem"]
MARKS: dict[Status, str] = {"ok": "ok", "note": "--", "warning": "WARNING", "problem": "PROBLEM"}


class Finding(NamedTuple):
    """A finding.

    Attributes:
      section: the subject, such as "versions".
      name: the name of the item, such as "jax".
      status: "ok"; "note" if neutral; "warning" if it may be intended; "problem" if it prevents a training from
        starting, or from being correct.
      text: the fact, with advice if needed.
    """

    section: str
    name: str
    status: Status
    text: str


def as_text(findings: Iterable[Finding]) -> str:
    """Returns findings as lines below the headings of their sections.

    >>> print(as_text([Finding("versions", "jax", "ok", "0.10.2"), Finding("devices", "cpu:0", "note", "cpu")]))
    versions
      ok       jax: 0.10.2
    devices
      --       cpu:0: cpu
    """
    lines, section = [], ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines.append(f"  {MARKS[finding.status]:<8} {finding.name}: {finding.text}")
    return "\n".join(lines)
