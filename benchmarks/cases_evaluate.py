"""Evaluation and prediction."""

from cases import Case, Comparison, Contestant, Workload


def _case(what: str, batch_size: int) -> Case:
    return Case(
        f"{what} at batch {batch_size}", f"`{what}` of 784-128-10 over the whole batches of 60,000 rows in host "
        f"memory, batch {batch_size}. Before each turn there is a pass that does not count.",
        Workload("mlp", 60_000 // batch_size * batch_size, batch_size),
        {"trainer": Contestant(f"loops_trainer:{what}"), "by hand": Contestant(f"loops_hand:{what}"),
         "Keras on JAX": Contestant(f"loops_keras:{what}")},
        (Comparison("trainer", "by hand"), Comparison("trainer", "Keras on JAX")), wakes=True)


CASES = {f"{what}_{size}": _case(what, size) for what in ("evaluate", "predict") for size in (32, 256)}
