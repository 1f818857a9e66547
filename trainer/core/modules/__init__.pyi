from trainer.core.modules.base import FunctionalModule as FunctionalModule
from trainer.core.modules.calling.call_arguments import CallKwargs as CallKwargs, MakeKey as MakeKey
from trainer.core.modules.conversion import (
    adapted as adapted,
    as_functional as as_functional,
    with_adapters as with_adapters,
    without_adapters as without_adapters,
)
from trainer.core.modules.lora import A as A, B as B, Adapters as Adapters, BaseValues as BaseValues
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
