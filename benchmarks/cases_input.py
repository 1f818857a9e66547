"""Training from pipelines: slower than the step, and faster."""

from cases import Case, Comparison, Contestant, Workload

_TEXT = "`fit` over {what}, against {peers}."


def _case(title: str, what: str, source: str, workload: Workload, slow: bool, epochs: int = 1, **options) -> Case:
    peers = {"by hand": "by_hand", "step": "step"}
    if slow:
        peers = {"pipeline": "drain", "pipeline beside steps": "drain_beside", "by hand": "by_hand"}
    texts = {"pipeline": "the pipeline drained alone", "by hand": "a loop by hand over it",
             "pipeline beside steps": "the pipeline drained by a thread, each batch copied, while as many steps run on "
                                      "a group of batches that is on the device",
             "step": "the step alone, on a batch that is on the device"}
    return Case(
        title, _TEXT.format(what=what, peers=", and ".join(texts[name] for name in peers)), workload,
        {"fit": Contestant("loops_input:fit", {"source": source}, epochs),
         **{name: Contestant(f"loops_input:{loop}", {"source": source}, 1 if name == "by hand" else epochs)
            for name, loop in peers.items()}},
        # A pipeline that computes shares the cores with the steps: neither it nor it beside steps is a limit to a few
        # percent, and both vary by more.
        tuple(Comparison("fit", name, 1.03 if source == "waiting" and name != "by hand" else None) for name in peers),
        **options)


CASES = {
    "input_slow_generator": _case(
        "A generator slower than the step", "a generator that waits 2 ms for each batch of 32 rows, for 784-128-10",
        "waiting", Workload("mlp", 32 * 400, 32), slow=True, epochs=2),
    "input_slow_grain": _case(
        "A Grain pipeline slower than the step", "a Grain pipeline, shuffled, mapped and batched in the process (for "
        "784-128-10, batch 32)", "grain", Workload("mlp", 32 * 1200, 32), slow=True, epochs=4),
    "input_decoding_grain": _case(
        "A Grain pipeline that decodes images", "a Grain pipeline in the process that shuffles, decodes a PNG for each "
        "row, shifts, mirrors and scales it at random, and batches (for 784-128-10, batch 32)", "decoding",
        Workload("mlp", 32 * 200, 32), slow=True, epochs=2),
    "input_fast_generator": _case(
        "A generator faster than the step", "a generator that indexes arrays, for 784-128-10, batch 32", "indexing",
        Workload("mlp", 32 * 1000, 32), slow=False),
    "input_fast_grain": _case(
        "A Grain pipeline faster than the step", "a Grain pipeline, shuffled, mapped and batched in the process (for a "
        "CNN, batch 64)", "grain", Workload("cnn", 64 * 20, 64), slow=False, unit="ms", scale=10),
}
