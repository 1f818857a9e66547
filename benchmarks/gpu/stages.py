"""The stages: the measurements and the time limit of each."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Collection

from gpu.cases import GRAPH_OPTIONS
from gpu.context import Context
from gpu.measured import measure_case

_TRACED = ("fit", "by hand")


def _correct(context: Context) -> None:
    from gpu import correct  # which takes the devices

    correct.run(context)


def _cases(*names: str, rounds: int = 5, traced: Collection[str] = (), may_fail: Collection[str] = ()
           ) -> Callable[[Context], None]:
    """Returns a function that measures some cases, each whether or not another fails; see `measure_case`."""

    def run(context: Context) -> None:
        errors = []
        for name in names:
            try:
                measure_case(context, name, rounds, _TRACED if name in traced else (), may_fail)
            except Exception as error:
                traceback.print_exc()
                errors.append(f"{name}: {error}")
        if errors:
            raise RuntimeError("; ".join(errors))

    return run


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the suite that can run alone.

    Attributes:
      run: adds to the results of a context, and raises if something failed.
      limit_secs: after so long it is stopped.
      text: its subject.
    """

    run: Callable[[Context], None]
    limit_secs: float
    text: str


STAGES = {
    "correct": Stage(
        _correct, 420,
        "the guides' blocks, fused and single steps, resume, precision, strategies"),
    "images": Stage(
        _cases("resnet50", traced=["resnet50"]), 300,
        "ResNet-50 in mixed bfloat16: images/s, memory, first step, gaps"),
    "mobilenet": Stage(
        _cases("mobilenet_v2", traced=["mobilenet_v2"]), 300,
        "the same for MobileNetV2"),
    "transformer": Stage(
        _cases("gpt2", rounds=3, traced=["gpt2"]), 460,
        "GPT-2 small's size, beside PyTorch: tokens/s, model FLOP utilisation, memory, gaps"),
    "attention": Stage(
        _cases("gpt2_attention", "gpt2_chunks", rounds=3, traced=["gpt2_attention"]), 460,
        "the same with cuDNN's attention, and with a loss in chunks"),
    "small": Stage(
        _cases("8-8-3", "784-128-10", "cnn", traced=["784-128-10"]), 300,
        "8-8-3, 784-128-10 and a CNN for MNIST: steps that take less than their dispatch"),
    "overheads": Stage(
        _cases("first_step", "callbacks"), 200,
        "the first step, a callback for each batch, the progress bar"),
    "graphs": Stage(
        _cases("graphs", rounds=3, may_fail=GRAPH_OPTIONS), 150,
        "CUDA graphs and unrolled loops, for fused groups of small steps"),
    "input": Stage(
        _cases("grain", "decoding", rounds=3), 200,
        "pipelines of Grain that are slower than the step"),
}
TOTAL_SECS = 1470.0  # of all: the remainder is a stage's limit
