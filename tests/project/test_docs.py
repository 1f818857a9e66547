"""docs/strategies.md is true: its examples run and print what they show, and its tables are those of the code."""

from __future__ import annotations

import contextlib
import io
import re

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import project_files
from tests.support.hlo import collectives, total_bytes
from trainer import distribute
from trainer.core.compile.jit import compiled
from trainer.distribute.replica import custom_loops
from trainer.distribute.replica.tensorflow_names import MISSING
from trainer.engine.model.core.model_core import core_of

PAGE = (project_files.ROOT / "docs" / "strategies.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", PAGE, re.MULTILINE | re.DOTALL)
SETUP, *EXAMPLES = [(code, shown) for language, code, shown in FENCES if language == "python"]

# TensorFlow 2's public names by module or class, with the methods that users call.
TF_NAMES = {
    "": """
        CrossDeviceOps DistributedDataset DistributedIterator DistributedValues HierarchicalCopyAllReduce InputContext
        InputOptions InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy
        ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server Strategy
        StrategyExtended TPUStrategy experimental_set_strategy get_replica_context get_strategy has_strategy
        in_cross_replica_context""",
    "Strategy": """
        cluster_resolver extended num_replicas_in_sync distribute_datasets_from_function
        experimental_distribute_dataset experimental_distribute_values_from_function experimental_local_results gather
        reduce run scope""",
    "ReplicaContext": """
        all_gather all_reduce devices merge_call num_replicas_in_sync replica_id_in_sync_group strategy""",
    "cluster_resolver": """
        ClusterResolver GCEClusterResolver KubernetesClusterResolver SimpleClusterResolver SlurmClusterResolver
        TFConfigClusterResolver TPUClusterResolver UnionResolver""",
    "coordinator": """
        ClusterCoordinator PerWorkerValue RemoteValue experimental_get_current_worker_index""",
    "experimental": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy PreemptionCheckpointHandler
        PreemptionWatcher TPUStrategy TerminationConfig ValueContext coordinator partitioners rpc""",
}


def rows_of_table(first_heading):
    """Returns the cells of the body of the table whose header starts with `first_heading`."""
    table = re.search(rf"^\| {re.escape(first_heading)} \|.*\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE, re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def resolves(name):
    """Returns whether an attribute path exists in `trainer.distribute`."""
    found = distribute
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=[code.splitlines()[0][:60] for code, _ in EXAMPLES])
def test_an_example_runs_and_prints_what_the_page_shows(code, shown):
    names = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(SETUP[0] + code, "docs/strategies.md", "exec"), names)
    assert printed.getvalue() == shown


def test_no_example_is_left_out():
    assert PAGE.count("```python") == 1 + len(EXAMPLES) > 10
    assert PAGE.count("```text") == sum(bool(shown) for _, shown in EXAMPLES)


def test_links_on_the_page_lead_to_its_headings():
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    assert links and links <= anchors


# --- the names of tf.distribute --------------------------------------------------------------------------------------


NAMES = rows_of_table("tf.distribute")


def test_every_name_of_tf_distribute_has_one_row():
    left = [old.strip("`") for old, _, _ in NAMES]
    assert len(left) == len(set(left))
    expected = {f"{owner}.{name}".lstrip(".") for owner, names in TF_NAMES.items() for name in names.split()}
    assert (expected | MISSING.keys()) - set(left) == set()


@pytest.mark.parametrize(("old", "new", "remark"), NAMES, ids=[old.strip("`") for old, _, _ in NAMES])
def test_a_name_is_said_to_be_here_exactly_if_it_is(old, new, remark):
    names = re.findall(r"`([\w.]+)`", new)
    if new == "none":
        assert remark == MISSING[old.strip("`")] and not resolves(old.strip("`"))
    else:
        assert new == f"`{names[0]}`" and resolves(names[0]) and old.strip("`") not in MISSING
    for name in re.findall(r"`((?:\w+Strategy|LayoutMap|row_mask|global_rows)[\w.]*)`", remark):
        assert resolves(name) or hasattr(distribute.ReplicaContext, name)


# --- the table of strategies -----------------------------------------------------------------------------------------

DEVICES = [f"cpu:{index}" for index in range(4)]
LAYOUT = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
STRATEGIES = {
    "OneDeviceStrategy": lambda: distribute.OneDeviceStrategy("cpu:0"),
    "MirroredStrategy": lambda: distribute.MirroredStrategy(DEVICES),
    "TPUStrategy": lambda: distribute.TPUStrategy(devices=DEVICES),
    "FullyShardedStrategy": lambda: distribute.FullyShardedStrategy(DEVICES),
    'FullyShardedStrategy(mesh_shape={"replica": R, "shard": N/R})': lambda: distribute.FullyShardedStrategy(
        DEVICES, mesh_shape={"replica": 2, "shard": 2}),
    'FullyShardedStrategy(level="optimizer")': lambda: distribute.FullyShardedStrategy(DEVICES, level="optimizer"),
    "CentralStorageStrategy": lambda: distribute.CentralStorageStrategy(DEVICES, min_host_bytes=0),
    "ModelParallelStrategy": lambda: distribute.ModelParallelStrategy({"replica": 2, "model": 2}, DEVICES, LAYOUT),
}
TABLE = {name.strip("`"): cells for name, *cells in rows_of_table("Strategy")}
SCALARS_BYTES = 256  # logs and counts


class TwoLayers(nn.Module):
    """Two layers without biases: every parameter is large enough to be split."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, use_bias=False, name="down")(nn.relu(nn.Dense(256, use_bias=False, name="up")(x)))


def built(name, **options):
    with STRATEGIES[name]().scope():
        model = trainer.Model(TwoLayers(), seed=0)
        model.compile("adam", "mse", steps_per_execution=1, **options)
    model.build(np.zeros((8, 64), np.float32))
    return model


def compiled_train_step(model):
    batch = np.zeros((8, 64), np.float32), np.zeros((8, 16), np.float32)
    return core_of(model).prepared_phase("train", batch).lowered(batch).compile()


def test_every_synchronous_strategy_is_in_the_table():
    # Those of several processes have pages of their own: on one process's devices the first is MirroredStrategy.
    others = ("Strategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy")
    existing = {name for name in distribute.__all__ if name.endswith("Strategy") and name not in others}
    assert {name.split("(")[0] for name in TABLE} == existing
    assert set(TABLE) == set(STRATEGIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_places_and_sends_what_the_table_says(name, capsys):
    _, sent, memory = TABLE[name]
    model = built(name)
    strategy, state = model.strategy, model.current_run.state
    parameters, optimizer_state = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
                                   for tree in (state.params, state.opt_state))
    report = strategy.explain(model)
    sizes = {"P": parameters, "S": optimizer_state, "N": strategy.num_replicas_in_sync, "M": 2, "R": 2}
    expected = [eval(term, {}, sizes) for term in re.search(r"`(.+?)`", memory)[1].split(" + ")]
    held = [report.parameter_bytes, report.gradient_bytes, report.optimizer_bytes]
    assert held == [pytest.approx(size, abs=SCALARS_BYTES) for size in expected]
    assert ("pinned_host" in report.total) == ("device memory" in memory)
    assert report.total["device"] == pytest.approx(
        report.gradient_bytes if "pinned_host" in report.total else sum(held), abs=SCALARS_BYTES)

    program = compiled_train_step(model).as_text()
    found = [each for each in collectives(program) if each.bytes > SCALARS_BYTES]
    assert {each.kind for each in found} == set(re.findall(r"all-reduce|all-gather|reduce-scatter", sent))
    if "all-gather" in sent:
        assert total_bytes(found, "all-gather") == parameters
        shards = strategy.mesh.shape.get("shard", strategy.num_replicas_in_sync)
        assert total_bytes(found, "reduce-scatter") == parameters // shards
    # "During a step each device holds all parameters", and where a rule splits a layer, none does.
    assert ("f32[64,256]" in program) == (name != "ModelParallelStrategy")


@pytest.mark.slow
def test_parameters_read_after_an_update_cost_the_gathering_of_gradients_and_optimizer_state(monkeypatch):
    model, programs = built("FullyShardedStrategy"), []

    class Recorded:
        def __init__(self, *args, **options):
            self.execute = compiled(*args, **options)

        def __call__(self, *args):
            programs.append(self.execute.lower(*args).compile().as_text())
            return self.execute(*args)

        def __getattr__(self, name):
            return getattr(self.execute, name)

    def step(state, x, y):
        def loss_of(params):
            return model.compute_loss(x, y, model.apply(params, state, x, training=True)[0], None)

        return state.apply_gradients(jax.grad(loss_of)(state.params)), loss_of

    def reading(state, x, y):
        state, loss_of = step(state, x, y)
        return state, loss_of(state.params)

    monkeypatch.setattr(custom_loops, "compiled", Recorded)
    batch = np.zeros((8, 64), np.float32), np.zeros((8, 16), np.float32)
    for function in (lambda *args: step(*args)[0], reading):
        model.strategy.run(function, args=(model.state, *batch))
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model.current_run.state.params))
    # Adam's two moments, and the gradients.
    assert [total_bytes(collectives(text), "all-gather") for text in programs] == [parameters, 4 * parameters]


@pytest.mark.slow
def test_gradients_are_reduced_once_however_many_microbatches_there_are():
    model = built("MirroredStrategy", microbatches=2)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model.current_run.state.params))
    found = [each for each in collectives(compiled_train_step(model).as_text()) if each.bytes > SCALARS_BYTES]
    assert total_bytes(found, "all-reduce") == parameters


def test_every_reduction_is_in_the_table():
    reductions = {name.strip("`") for name, *_ in rows_of_table("Reduction")}
    assert reductions == {name for name in distribute.__all__ if isinstance(getattr(distribute, name), type)
                          and issubclass(getattr(distribute, name), distribute.CrossDeviceOps)} - {"CrossDeviceOps"}
