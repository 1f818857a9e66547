"""Steps that take much longer than their dispatch."""

from cases import PYTORCH, Case, Comparison, Contestant, Workload

_CONTESTANTS = {
    "fit": Contestant("loops_trainer:fit"),
    "by hand": Contestant("loops_hand:fit"),
    "Keras on JAX": Contestant("loops_keras:fit")}
_PYTORCH = {name: Contestant(loop) for name, loop in PYTORCH.items()}
_RATIOS = Comparison("fit", "by hand", 1.03), Comparison("fit", "Keras on JAX", 1.0)


def _case(model: str, name: str, rows: int, batch_size: int, **options) -> Case:
    workload, others = Workload(model, rows, batch_size), {} if model == "mobilenet" else _PYTORCH
    return Case(f"Steps of {name}", f"`fit` of one epoch of {workload.steps} steps from arrays in host memory, batch "
                f"{batch_size}, adam, accuracy.", workload,
                _CONTESTANTS | others, (*_RATIOS, *(Comparison("fit", name) for name in others)), unit="ms", scale=10,
                **options)


CASES = {
    "small_cnn": _case("small_cnn", "a small CNN for digits of 8x8", 32 * 400, 32, rounds=6, processes=2),
    "cnn": _case("cnn", "a CNN for MNIST", 64 * 20, 64, rounds=9, processes=3),
    "mobilenet": _case("mobilenet", "MobileNetV2 at 96x96", 16 * 2, 16, rounds=8, processes=2),
    "lm": _case("lm", "a transformer of 2 layers, width 128, 64 tokens", 16 * 10, 16, rounds=8, processes=2),
}
