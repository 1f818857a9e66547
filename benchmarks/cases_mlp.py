"""Steps that take less time than their dispatch, with and without callbacks."""

from cases import PYTORCH, Case, Comparison, Contestant, Workload

PEERS = {
    "by hand": "loops_hand:fit", "epoch in one call": "loops_hand:one_call", "Keras on JAX": "loops_keras:fit",
    "Keras, as it comes": "loops_keras:fit_by_default", "TF-Keras": "loops_tf:fit", "NNX loop": "loops_nnx:fit",
    **PYTORCH}


def _contestants(epochs: int, slow: int) -> dict[str, Contestant]:
    """Returns `fit` and its peers; slow peers have fewer epochs in a round."""
    few = PEERS.keys() - {"epoch in one call"}
    return {
        "fit": Contestant("loops_trainer:fit", epochs=epochs),
        "fit, new arrays": Contestant("loops_trainer:fit", {"new_arrays": True}, epochs),
        "fit, bar, new arrays": Contestant("loops_trainer:fit", {"callbacks": ("bar",), "new_arrays": True}, epochs),
        "fit, NNX": Contestant("loops_trainer:fit", {"module": "nnx"}, epochs),
        **{name: Contestant(loop, epochs=slow if name in few else epochs) for name, loop in PEERS.items()}}


def _ratios(bars: dict[str, float]) -> tuple[Comparison, ...]:
    """Returns the comparisons, with a bar for some of the peers; the bar of "fit" is for NNX."""
    limit = "epoch in one call"
    return (*(Comparison("fit", name, bars.get(name)) for name in PEERS),
            *(Comparison(name, limit, bars.get(limit)) for name in ("fit, new arrays", "fit, bar, new arrays")),
            Comparison("fit, bar, new arrays", "fit, new arrays"),
            Comparison("fit, NNX", "NNX loop"), Comparison("fit, NNX", "fit", bars.get("fit")))


_TEXT = ("One `fit` of {epochs} epochs from arrays in host memory in each round, {rows:,} rows of noise, batch 32, "
         "adam, accuracy. What a contestant uploads counts: the epoch in one call uploads the arrays each time, `fit` "
         "only if somebody wrote to them since the round before (new arrays). The loop by hand, Keras, TF-Keras, "
         "the NNX loop and PyTorch run {slow} of the epochs; all times are per step. Keras and TF-Keras have the "
         "better `steps_per_execution` of 1 and 32; Keras as it comes has 1. PyTorch has a loop by hand and the faster "
         "of its Adams, Lightning a `DataLoader`, and no logger, bar or checkpoint.")

CASES = {
    "mlp": Case(
        "Steps of 784-128-10", _TEXT.format(epochs=5, rows=48_000, slow=1) + " A callback is one that is called for "
        "every batch and reads no logs (2 epochs); loggers are the bar, CSVLogger and TensorBoard together; with data "
        "on the host, `data_on_device=False` (2 epochs).",
        Workload("mlp", 48_000, 32),
        _contestants(epochs=5, slow=1) | {
            "fit, callback": Contestant("loops_trainer:fit", {"callbacks": ("batch",)}, 2),
            "fit, loggers": Contestant("loops_trainer:fit", {"callbacks": ("bar", "csv", "tensorboard")}, 5),
            "fit, data on the host": Contestant("loops_trainer:fit", {"data_on_device": False}, 2)},
        (*_ratios({"fit": 1.05, "epoch in one call": 1.1, "by hand": round(1 / 1.4, 2),
                   "Keras, as it comes": round(1 / 1.9, 2)}),
         Comparison("fit, callback", "by hand", 1.1), Comparison("fit, loggers", "fit", 1.03),
         Comparison("fit, data on the host", "by hand")), rounds=6, processes=2),
    "small_mlp": Case(
        "Steps of 8-8-3", _TEXT.format(epochs=5, rows=32_000, slow=1) + " Before each turn there is an epoch that does "
        "not count.", Workload("small_mlp", 32_000, 32), _contestants(epochs=5, slow=1),
        _ratios({"by hand": 1 / 4, "Keras, as it comes": round(1 / 12, 3)}), rounds=6, processes=2, wakes=True),
    "small_mlp_replicas": Case(
        "Steps of 8-8-3 on 2 replicas", "`fit` of one epoch under MirroredStrategy, 32,000 rows of noise, batch 32 "
        "over both replicas, adam, accuracy. Keras has `DataParallel` and the better `steps_per_execution` of 1 and "
        "32; the loop by hand has `jax.shard_map` and averages the gradients as a tree or as one vector, whichever is "
        "faster. Where devices are simulated it queues two steps at most, as more of them can lock each other.",
        Workload("small_mlp", 32_000, 32, replicas=2), {
            "fit": Contestant("loops_trainer:fit"),
            "by hand": Contestant("loops_hand:replicated"),
            "Keras on JAX": Contestant("loops_keras:fit")},
        (Comparison("fit", "by hand"), Comparison("fit", "Keras on JAX", 1 / 4)), rounds=9),
}
