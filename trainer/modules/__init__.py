"""One functional interface for Linen modules, NNX modules, stacks of layers and dicts of named modules.

Code outside of this package does not depend on the kind of a module.
"""

from trainer.modules.base import FunctionalModule
from trainer.modules.calling.call_arguments import CallKwargs, MakeKey
from trainer.modules.conversion import as_functional
from trainer.modules.named import NamedFunctional
from trainer.modules.sequential import EmptyStack
from trainer.modules.summary import (
    CallObserver,
    LayerRow,
    print_summary,
    render_summary,
    shapes_text,
    summary_cells,
    totals,
    with_shardings,
    without_frozen,
)

__all__ = ["CallKwargs", "CallObserver", "EmptyStack", "FunctionalModule", "LayerRow", "MakeKey", "NamedFunctional",
           "as_functional", "print_summary", "render_summary", "shapes_text", "summary_cells", "totals",
           "with_shardings", "without_frozen"]
