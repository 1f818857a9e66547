"""The results of a stage: figures with units, ratios, checks and notes, as JSON that is written after each addition.

So a stage that fails, or is stopped by its time limit, leaves its results so far.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from measuring import Ratio


class Results:
    """The results of a stage.

    Args:
      path: the JSON file.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.content: dict[str, list[dict[str, Any]]] = {"figures": [], "ratios": [], "checks": [], "notes": []}
        self._write()

    def figure(self, case: str, who: str, what: str, values: Sequence[float], unit: str) -> None:
        """Adds the figures of some rounds: their median, the least and the most.

        Args:
          case: name of the case.
          who: by whom.
          what: measured quantity, such as "step".
          values: the value of each round.
          unit: of the values.

        Raises:
          ValueError: if there are no values, or a value is not finite.
        """
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"{case}, {who}, {what}: {values} are no figures.")
        self._add("figures", case=case, who=who, what=what, value=statistics.median(values), least=min(values),
                  most=max(values), rounds=len(values), unit=unit)

    def ratio(self, case: str, entry: dict[str, Any]) -> None:
        """Adds an entry of `report.compared`: a ratio of times, with its bar."""
        self._add("ratios", case=case, **entry)

    def compare(self, case: str, ours: str, theirs: str, values: Sequence[float], others: Sequence[float]) -> None:
        """Adds the ratios of the values of the same rounds, which have no bar."""
        ratio = Ratio.of(values, others)
        self.ratio(case, {"ours": ours, "theirs": theirs, "median": ratio.median, "least": ratio.of_rounds[0],
                          "most": ratio.of_rounds[-1], "rounds": len(values), "bar": None, "met": None})

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Adds whether a check passed, and its details."""
        print(f"{'passed' if passed else 'FAILED'}: {name}{f' ({detail})' if detail else ''}", flush=True)
        self._add("checks", name=name, passed=bool(passed), detail=detail)

    def note(self, text: str) -> None:
        """Adds a remark, such as who did not take part."""
        print(text, flush=True)
        self._add("notes", text=text)

    def _add(self, kind: str, **entry: Any) -> None:
        self.content[kind].append(entry)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1))
