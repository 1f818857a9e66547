"""Training on several devices."""

from cases import Case, Comparison, Contestant, Workload

BAR = 1.05


def _case(replicas: int) -> Case:
    return Case(
        f"Steps of 784-128-10 on {replicas} replica{'s' * (replicas > 1)}", "`fit` of one epoch under "
        "MirroredStrategy, batch 256 over all replicas, adam, accuracy, against a loop with `jax.shard_map` that "
        "donates its state and averages the gradients as a tree or as one vector, whichever is faster. Where devices "
        "are simulated it queues two steps at most, as more of them can lock each other.",
        Workload("mlp", 256 * 100, 256, replicas),
        {"fit": Contestant("loops_trainer:fit", {"mirrored": True}), "by hand": Contestant("loops_hand:replicated")},
        (Comparison("fit", "by hand", BAR),), unit="ms")


CASES = {f"replicas_{count}": _case(count) for count in (1, 2, 8)}
