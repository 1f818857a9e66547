"""One contestant of a case, in a process of its own: `python benchmarks/worker.py CASE CONTESTANT EPOCHS`.

It prepares, compiles for rounds of so many epochs, and then obeys lines: "choose" takes the fastest of several ways to
do the work, "run" runs a round, and "trace" runs a round under JAX's profiler. The answer to each is a line of JSON in
standard output, to which nothing else can write.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import cases


def timed(run: Callable[[int], Any], epochs: int) -> dict[str, Any]:
    """Runs some epochs; returns the figures of the round."""
    cpu_start, start = time.process_time(), time.perf_counter()
    result = run(epochs)
    figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    return figures | (result if isinstance(result, dict) else {"steps": result})


def fastest(candidates: dict[str, Callable[[int], Any]]) -> str:
    """Returns the name of the candidate with the shortest trial."""
    if len(candidates) == 1:
        return next(iter(candidates))
    return min(candidates, key=lambda name: timed(candidates[name], 1)["seconds"])


def answers(case: cases.Case, name: str, epochs: int, orders: TextIO) -> Iterator[dict[str, Any]]:
    """Yields the seconds until all was compiled, then the answer to each line."""
    contestant, start = case.contestants[name], time.perf_counter()
    module, function = contestant.loop.split(":")
    made = getattr(importlib.import_module(module), function)(case.workload, **contestant.options)
    candidates = made if isinstance(made, dict) else {"": made}
    if module != "loops_start":  # nothing stays compiled from one fresh process to the next
        for run in candidates.values():
            run(min(epochs, 2))  # data may be kept on the device from the second epoch on
    yield {"ready": True, "seconds": time.perf_counter() - start}
    chosen = next(iter(candidates))
    for line in orders:
        if line.strip() == "choose":
            chosen = fastest(candidates)
            yield {"chosen": chosen}
        elif line.strip() == "trace":
            from gpu.trace import trace

            try:
                yield trace(candidates[chosen], epochs)._asdict()
            except Exception as error:  # the profiler's, which spoils no figures
                yield {"untraced": f"{type(error).__name__}: {error}"[:300]}
        else:
            if case.wakes:
                candidates[chosen](1)
            yield timed(candidates[chosen], epochs)


def main() -> None:
    """Answers until standard input ends."""
    case, name, epochs = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # libraries' output is not an answer
        warnings.simplefilter("ignore")
        try:
            for answer in answers(cases.find(case), name, int(epochs), sys.stdin):
                print(json.dumps(answer), file=replies, flush=True)
        except cases.Unavailable as reason:
            print(json.dumps({"unavailable": str(reason)}), file=replies, flush=True)
        except ModuleNotFoundError as error:
            print(json.dumps({"unavailable": f"{error.name} is not installed"}), file=replies, flush=True)
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(json.dumps({"failed": message}), file=replies, flush=True)


if __name__ == "__main__":
    main()
