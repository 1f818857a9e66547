"""`trainer.report`: a page about a run, from the `run.json` in its folder.

Owns what the page says and how it looks. It writes the page and nothing else, and starts no training.
"""

from trainer.tools.report.run_report import report

__all__ = ["report"]
