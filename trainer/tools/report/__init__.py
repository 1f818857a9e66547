"""`trainer.report`: a page about a run, from the `run.json` in its folder.

Owns the content and the layout of the page. It writes the page and nothing else, and starts no training.
"""

from trainer.tools.report.run_report import report

__all__ = ["report"]
