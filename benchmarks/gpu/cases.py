"""The cases that take turns. Those that begin with "tiny " are as short as they can be, for a dry run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import cases_input
import cases_mlp
import cases_start
from cases import Case, Comparison, Contestant
from cases import Workload as SmallWorkload
from gpu.workloads import Workload

HAND_BAR = 1.02  # of the large models, to the hand-written loop
SMALL_BARS = {"by hand": round(1 / 5, 3), "Keras on JAX": round(1 / 20, 3)}  # of 8-8-3
_PEERS = {name: cases_mlp.PEERS[name] for name in ("by hand", "Keras on JAX")}
# Of one GPU's programs: CUDA graphs are XLA's command buffers.
_GRAPH_FLAGS = {
    "as it comes": "",
    "no CUDA graphs": "--xla_gpu_enable_command_buffer=",
    "CUDA graphs of loops": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1",
    "loops unrolled twice": "--xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
}
GRAPH_OPTIONS = tuple(name for name, flags in _GRAPH_FLAGS.items() if flags)


def _small(title: str, workload: SmallWorkload, epochs: int, bars: dict[str, float]) -> Case:
    """Returns a case of `fit` against loops that read arrays in host memory."""
    return Case(title, f"`fit` from arrays in host memory, {workload.rows:,} rows of noise, batch "
                f"{workload.batch_size}, adam, accuracy, float32, one GPU. Keras has the better `steps_per_execution` "
                "of 1 and 32.", workload,
                {"fit": Contestant("loops_trainer:fit", epochs=epochs),
                 **{name: Contestant(loop) for name, loop in _PEERS.items()}},
                tuple(Comparison("fit", name, bars.get(name)) for name in _PEERS))


def _large_text(workload: Workload) -> str:
    return (f"Mixed bfloat16, {workload.rows_per_device} rows a GPU (a quarter of that on GPUs with little memory), "
            "all GPUs, synthetic data that stay on them. The loop by hand is a jitted step that donates its state; "
            "Keras's batches are on the GPU, too.")


def _large(title: str, workload: Workload, epochs: int) -> Case:
    return Case(title, _large_text(workload), workload,
                {"fit": Contestant("gpu.loops:fit", epochs=epochs),
                 "by hand": Contestant("gpu.loops:by_hand", epochs=epochs),
                 "Keras on JAX": Contestant("gpu.loops_keras:fit", epochs=epochs)},
                (Comparison("fit", "by hand", None if workload.model == "mobilenet_v2" else HAND_BAR),
                 Comparison("fit", "Keras on JAX")), unit="ms")


def _transformers(workload: Workload, epochs: int) -> dict[str, Case]:
    """Returns the cases of the transformer: as the zoo has it, with cuDNN's attention, and with a loss in chunks."""
    title, attention = "A transformer of GPT-2 small's size", "xla" if workload.tiny else "cudnn"
    pytorch_text = "PyTorch is compiled, has bfloat16 by autocast and attention that stores no scores, and one GPU."

    def contestants(**options: Any) -> dict[str, Contestant]:
        return {"fit": Contestant("gpu.loops:fit", options, epochs),
                "by hand": Contestant("gpu.loops:by_hand", options, epochs),
                # Beside PyTorch, JAX counts the rows of a batch, and no more.
                "PyTorch, compiled": Contestant("gpu.loops_torch:compiled", {}, epochs, {"JAX_PLATFORMS": "cpu"})}

    comparisons = Comparison("fit", "by hand", HAND_BAR), Comparison("fit", "PyTorch, compiled")
    by_hand = contestants(attention=attention)["by hand"]
    in_chunks = dataclasses.replace(by_hand, options=by_hand.options | {"loss_chunks": 2 if workload.tiny else 4})
    return {
        "gpt2": Case(
            title, f"{_large_text(workload)} {pytorch_text}", workload,
            contestants() | {"Keras on JAX": Contestant("gpu.loops_keras:fit", epochs=epochs)},
            (*comparisons, Comparison("fit", "Keras on JAX")), unit="ms"),
        "gpt2_attention": Case(
            f"{title}, cuDNN's attention", f"The same with attention that stores no scores. {pytorch_text}", workload,
            contestants(attention=attention), comparisons, unit="ms"),
        "gpt2_chunks": Case(
            f"{title}, a loss in chunks", "Loops by hand with cuDNN's attention. One computes the logits of a quarter "
            "of the rows at a time, twice.", workload, {"by hand": by_hand, "by hand, loss in chunks": in_chunks},
            (Comparison("by hand, loss in chunks", "by hand"),), unit="ms")}


def _graphs(workload: SmallWorkload, epochs: int) -> Case:
    names = list(_GRAPH_FLAGS)
    return Case("CUDA graphs and unrolled loops", "`fit` of 784-128-10 in fused groups, with options of XLA for CUDA "
                "graphs and for loops: " + "; ".join(f"{name}: `{flags}`" for name, flags in _GRAPH_FLAGS.items()
                                                     if flags) + ".", workload,
                {name: Contestant("loops_trainer:fit", epochs=epochs,
                                  environment={"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()})
                 for name, flags in _GRAPH_FLAGS.items()},
                tuple(Comparison(name, names[0]) for name in names[1:]))


def _callbacks(workload: SmallWorkload, epochs: int) -> Case:
    def contestant(*callbacks):
        return Contestant("loops_trainer:fit", {"callbacks": callbacks}, epochs)

    return Case("A callback for each batch, and the progress bar", "`fit` of 784-128-10 from arrays in host memory, "
                "batch 32: with a callback that is called for every batch and reads no logs, and with the progress "
                "bar.", workload,
                {"fit": contestant(), "fit, callback": contestant("batch"), "fit, bar": contestant("bar")},
                (Comparison("fit, callback", "fit"), Comparison("fit, bar", "fit")))


def _input(name: str, tiny: bool) -> Case:
    case = cases_input.CASES[name]
    if not tiny:
        return case
    workload = dataclasses.replace(case.workload, rows=32 * 128)  # a group of `loops_input`
    return dataclasses.replace(case, workload=workload, contestants={
        name: dataclasses.replace(contestant, epochs=1) for name, contestant in case.contestants.items()})


def _cases(tiny: bool) -> dict[str, Case]:
    def small(model: str, steps: int, batch_size: int = 32) -> SmallWorkload:
        return SmallWorkload(model, batch_size * (8 if tiny else steps), batch_size)

    def epochs(full: int) -> int:
        return 2 if tiny else full  # data stay on the device from the second epoch on

    def large(model: str, rows: int, steps: int) -> Workload:
        return Workload(model, 2, 2, tiny=True) if tiny else Workload(model, rows, steps)

    return {
        "8-8-3": _small("Steps of 8-8-3", small("small_mlp", 1000), epochs(10), SMALL_BARS),
        "784-128-10": _small("Steps of 784-128-10", small("mlp", 1000), epochs(10), {}),
        "cnn": _small("Steps of a CNN for MNIST", small("small_cnn" if tiny else "cnn", 400, 64), epochs(5), {}),
        "mobilenet_v2": _large("MobileNetV2 at 224x224", large("mobilenet_v2", 128, 8), epochs(8)),
        "resnet50": _large("ResNet-50 at 224x224", large("resnet50", 128, 8), epochs(8)),
        **_transformers(large("gpt2", 8, 16), epochs(6)),
        "grain": _input("input_slow_grain", tiny),
        "decoding": _input("input_decoding_grain", tiny),
        "callbacks": _callbacks(small("mlp", 1000), epochs(10)),
        "first_step": cases_start.CASES["first_step"],
        "graphs": _graphs(small("mlp", 1000), epochs(10)),
    }


def _dry(name: str, case: Case) -> Case:
    """Returns a case for a dry run: without bars, and with Keras, which takes long to start, once for each loop."""
    has_keras = name in ("8-8-3", "resnet50", "gpt2")
    return dataclasses.replace(
        case, title=f"{case.title} (tiny)", processes=1,
        contestants={who: contestant for who, contestant in case.contestants.items()
                     if has_keras or who != "Keras on JAX"},
        comparisons=tuple(dataclasses.replace(comparison, bar=None) for comparison in case.comparisons))


def all_cases() -> dict[str, Case]:
    """Returns the cases by name."""
    return _cases(tiny=False) | {f"tiny {name}": _dry(name, case) for name, case in _cases(tiny=True).items()}
