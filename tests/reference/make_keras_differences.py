"""Writes docs/keras_differences.md from the table in tests/support/keras_differences.py.

`python -m tests.reference.make_keras_differences`
"""

import pathlib

from tests.support.keras_differences import DIFFERENCES

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "keras_differences.md"
TITLES = {"losses": "Losses", "metrics": "Metrics", "optimizers": "Optimizers and schedules",
          "regularizers": "Penalties of weights", "precision": "Mixed precision", "utils": "Images",
          "callbacks": "Callbacks", "data": "Data", "preprocessing": "Preprocessing"}
INTRODUCTION = """\
# Differences from Keras 3

Losses, metrics, optimizers, schedules, penalties of weights, preprocessing layers and image functions are written to
replace Keras 3's: they have the same names, arguments, defaults, numbers and configurations. Tests compare every public
class and function with Keras itself, on generated data. This page lists all intended differences, with the reason for
each; tests check that each difference still exists.

This page is written by `python -m tests.reference.make_keras_differences`.
"""


def text() -> str:
    """Returns the page."""
    parts = [INTRODUCTION]
    for room, title in TITLES.items():
        rows = [f"| {each.names} | {each.keras} | {each.ours} | {each.why} |"
                for each in DIFFERENCES if each.room == room]
        parts.append("\n".join([f"## {title}", "", "| Names | Keras 3 | Here | Reason |", "|---|---|---|---|", *rows,
                                ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text())
