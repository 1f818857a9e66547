from trainer.core.modules.summary.calls import (
    CallObserver as CallObserver,
    ModuleLayer as ModuleLayer,
    Path as Path,
    shapes_text as shapes_text,
)
from trainer.core.modules.summary.layers import (
    CallRecorder as CallRecorder,
    LayerRow as LayerRow,
    with_shardings as with_shardings,
    without_frozen as without_frozen,
)
from trainer.core.modules.summary.table import (
    print_summary as print_summary,
    render_summary as render_summary,
    summary_cells as summary_cells,
    totals as totals,
)
