"""What `python -m trainer doctor` finds: one line each, by section."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "note", "warning", "problem"]
MARKS: dict[Status, str] = {"ok": "ok", "note": "--", "warning": "WARNING", "problem": "PROBLEM"}


class Finding(NamedTuple):
    """One fact.

    Attributes:
      section: what it is about, such as "versions".
      name: the thing itself, such as "jax".
      status: "ok"; "note" for what is neither good nor bad; "warning" for what may be meant; "problem" for what keeps a
        training from starting, or from being right.
      text: the fact, and what to do where it is no good one.
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
