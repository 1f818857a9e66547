"""What only a fresh process can tell: `python -m gpu.fresh CASE CONTESTANT` prints it as JSON."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time


def main(case: str, who: str) -> None:
    """Prints the seconds to the first step, and the most memory that training took."""
    import jax
    from cases import find

    contestant, workload = find(case).contestants[who], find(case).workload
    module, function = contestant.loop.split(":")
    make = getattr(importlib.import_module(module), function)
    jax.devices()
    workload.data()  # whoever comes first would pay for the pages
    start = time.perf_counter()
    run = make(workload, **contestant.options)
    run(2)
    middle = time.perf_counter()
    steps = run(2)["steps"]
    later = time.perf_counter() - middle
    stats = jax.local_devices()[0].memory_stats() or {}
    print(json.dumps({
        # All but the first step take as long as later.
        "first_step_secs": middle - start - later * (steps - 1) / steps,
        "device_megabytes": stats["peak_bytes_in_use"] / 1e6 if "peak_bytes_in_use" in stats else None,
        "host_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
