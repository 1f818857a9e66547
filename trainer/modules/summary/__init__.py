"""Summaries of models: the called layers, their numbers and operations, and tables of them.

Knows neither Linen nor NNX: adapters report the calls.
"""

from trainer.modules.summary.calls import CallObserver, ModuleLayer, Path, shapes_text
from trainer.modules.summary.layers import CallRecorder, LayerRow, with_shardings, without_frozen
from trainer.modules.summary.table import print_summary, render_summary, summary_cells, totals

__all__ = ["CallObserver", "CallRecorder", "LayerRow", "ModuleLayer", "Path", "print_summary", "render_summary",
           "shapes_text", "summary_cells", "totals", "with_shardings", "without_frozen"]
