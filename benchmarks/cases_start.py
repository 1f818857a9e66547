"""Costs that are paid once: the import, the first step, memory."""

from cases import Case, Comparison, Contestant, Workload

_WORKLOAD = Workload("mlp", 60_000, 32)
_WHO = {"by hand": "by_hand", "import jax, flax, optax": "by_hand", "fit, data on the host": "streamed"}
_DATA_MB = _WORKLOAD.rows * (784 + 1) * 4 / 1e6


def _case(title: str, text: str, figure: str, *comparisons: Comparison, **options) -> Case:
    names = [*(comparison.ours for comparison in comparisons), comparisons[0].theirs]
    return Case(title, text, _WORKLOAD, {
        name: Contestant("loops_start:fresh", {"figure": figure, "who": _WHO.get(name, "trainer")})
        for name in names}, comparisons, **options)


CASES = {
    "import": _case(
        "Time to import", "`import trainer` and the use of all its names but `testing`, which imports all of it, "
        "against `import jax, flax, optax`, each in a process of its own.",
        "import_time", Comparison("import trainer", "import jax, flax, optax", 1.1), unit="s", rounds=11),
    "first_step": _case(
        "Time to the first step", "From the making of the model (784-128-10) to the end of its first train step, "
        "against a jitted init and step by hand, each in a process of its own. Imports are done before.",
        "first_step", Comparison("fit", "by hand", 1.15), unit="s"),
    "memory": _case(
        "Host memory", "The largest resident set of a process that trains 784-128-10 for two epochs on 60,000 rows in "
        f"host memory, which all contestants hold. `fit` has a copy of these {_DATA_MB:.0f} MB on the device, which is "
        "host memory too, and is less them in the ratio; with data on the host (`data_on_device=False`) it has none.",
        "host_memory", Comparison("fit", "by hand", 1.05, less=_DATA_MB),
        Comparison("fit, data on the host", "by hand", 1.05), unit="MB", rounds=3),
    "device_memory": _case(
        "Device memory", "The most that was allocated on the device while 784-128-10 trained for two epochs on 60,000 "
        f"rows. In the ratio, ours is less the {_DATA_MB:.0f} MB of the data. Simulated devices do not tell.",
        "device_memory", Comparison("fit", "by hand", 1.05, less=_DATA_MB), unit="MB"),
}
