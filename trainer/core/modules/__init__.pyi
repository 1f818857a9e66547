from trainer.core.modules.base import FunctionalModule as FunctionalModule
from trainer.core.modules.calling.call_arguments import CallKwargs as CallKwargs, MakeKey as MakeKey
from trainer.core.modules.conversion import as_functional as as_functional
from trainer.core.modules.named import NamedFunctional as NamedFunctional
from trainer.core.modules.sequential import EmptyStack as EmptyStack
from trainer.core.modules.summary import (
    CallObserver as CallObserver,
    LayerRow as LayerRow,
    print_summary as print_summary,
    render_summary as render_summary,
    shapes_text as shapes_text,
    summary_cells as summary_cells,
    totals as totals,
    with_shardings as with_shardings,
    without_frozen as without_frozen,
)
