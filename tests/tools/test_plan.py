"""Plans of models: what is refused before anything compiles, what is tried, and the data of a script's `fit`."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute
from trainer.core.tree_paths import named_leaves
from trainer.distribute.placement.described import Topology
from trainer.engine.model.core.model_core import core_of
from trainer.tools.command_line import commands
from trainer.tools.command_line import plan as command
from trainer.tools.plan import changes as other_ways
from trainer.tools.plan import model_plan, planned_phase

BATCH = np.ones((16, 4), np.float32), np.ones((16, 3), np.float32)


def new_model(**options):
    model = trainer.Model(nn.Dense(3), seed=3)
    model.compile("adam", "mse", **options)
    return model


@pytest.mark.parametrize(("arguments", "message"), [
    ({"topology": None}, "`plan` needs `topology`, such as '8xh100'"),
    ({"topology": "8xh1"}, "Did you mean 'h100'"),
    ({"memory_fraction": 0.0}, r"`memory_fraction` must be above 0 and at most 1\. Received: 0\.0"),
    ({"alternatives": "always"}, "`alternatives` must be True, False or 'auto'"),
])
def test_arguments_are_checked_before_anything_compiles(arguments, message):
    with pytest.raises(ValueError, match=message):
        distribute.MirroredStrategy().plan(new_model(), BATCH, **{"topology": "8xh100", **arguments})


def test_a_model_is_planned_under_its_own_strategy_unless_another_is_given(devices):
    with distribute.MirroredStrategy(devices[:2]).scope():
        model = new_model()
    with pytest.raises(ValueError, match=r"the devices of MirroredStrategy\(cpu:0, cpu:1\) are there"):
        trainer.plan(model, BATCH)
    for plan in (distribute.OneDeviceStrategy("cpu:3").plan, functools.partial(
            trainer.plan, strategy=distribute.OneDeviceStrategy("cpu:3"))):
        with pytest.raises(ValueError, match=r"the devices of OneDeviceStrategy\(cpu:3\) are there"):
            plan(model, BATCH)


def test_a_model_must_be_compiled():
    with pytest.raises(RuntimeError, match="Call `compile"):
        distribute.MirroredStrategy().plan(trainer.Model(nn.Dense(3)), BATCH, "8xh100")


def test_workers_that_train_on_their_own_have_no_common_step(monkeypatch):
    strategy = distribute.OneDeviceStrategy("cpu:0")
    monkeypatch.setattr(type(strategy), "is_asynchronous", True)
    with pytest.raises(ValueError, match=r"no step over several devices that could be planned.*OneDeviceStrategy\(\)"):
        planned_phase.strategy_over(strategy, "8xh100")


@pytest.mark.slow
def test_a_copy_is_under_the_other_strategy_and_leaves_the_model_alone(devices):
    model = new_model(ema_decay=0.9)
    model.build(np.ones((1, 4)))
    strategy = distribute.FullyShardedStrategy(devices[:2])
    made = planned_phase.copy_under(model, strategy, {"microbatches": 2})
    assert (made.strategy, core_of(made).configuration.options.microbatches) == (strategy, 2)
    assert core_of(made).configuration.options.ema_decay == 0.9 and not made.built and core_of(made).state.seed == 3
    assert model.built and core_of(model).configuration.options.microbatches == 1 and model.strategy is not strategy
    shapes, own = made.state_shapes(np.ones((1, 4))), model.state
    assert {path: leaf.shape for path, leaf in named_leaves(shapes).items()} == {
        path: leaf.shape for path, leaf in named_leaves(own).items()}


def changes(model, strategy, batch=BATCH):
    return [change.text for change in other_ways.changes_to_try(model, strategy, batch, Topology.of("4xh100"))]


def test_what_saves_memory_is_tried(devices):
    both = 'remat=True, precision="mixed_bfloat16"'
    assert changes(new_model(), distribute.MirroredStrategy(devices[:4])) == [
        "microbatches=2", "microbatches=4", "remat=True", 'precision="mixed_bfloat16"', both,
        "FullyShardedStrategy()", f"FullyShardedStrategy(), {both}", "batches of 8 rows"]


def test_what_is_in_use_already_or_cannot_be_used_is_not_tried(devices):
    class OwnStep(trainer.Model):
        def train_step(self, state, batch):
            return super().train_step(state, batch)

    model = OwnStep(nn.Dense(3))
    model.compile("adam", "mse", remat=True, precision="mixed_bfloat16")
    odd = jax.tree.map(lambda leaf: leaf[:9], BATCH)
    assert changes(model, distribute.FullyShardedStrategy(devices[:4]), odd) == []
    assert changes(model, distribute.MirroredStrategy(devices[:1]), odd) == []


def test_annotated_models_are_split_by_their_annotations(devices):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = trainer.Model(nn.Dense(4, kernel_init=kernel))
    model.compile("sgd", "mse")
    found = changes(model, distribute.MirroredStrategy(devices[:4]))
    assert "ModelParallelStrategy({'replica': 1, 'model': 4})" in found


def test_a_change_that_cannot_be_compiled_is_a_row_of_its_own(devices, monkeypatch):
    def fails(*arguments, **changes):
        raise RuntimeError("Out of luck.\nAnd more.")

    monkeypatch.setattr(model_plan, "_plan", fails)

    class Planned:
        memory_fraction = 0.95

    rows = list(model_plan._alternatives(
        new_model(), distribute.MirroredStrategy(devices[:4]), BATCH, Topology.of("4xh100"), Planned()))
    assert {(row.peak_bytes, row.fits, row.problem) for row in rows} == {(None, False, "RuntimeError: Out of luck.")}


def test_a_model_is_copied_in_the_scope_of_its_own_strategy(devices):
    with distribute.MirroredStrategy(devices[:2]).scope():
        model = new_model(run_eagerly=True)
        made = planned_phase.copy_under(
            model, distribute.MirroredStrategy(devices[:4]), {"precision": "mixed_bfloat16"})
    options = core_of(made).configuration.options
    assert options.policy.name == "mixed_bfloat16" and not options.eager and core_of(made).configuration.is_compiled


def test_without_an_assembler_the_error_says_what_to_install():
    class Lowered:
        def __init__(self, message):
            self.message = message

        def compile(self, compiler_options):
            assert compiler_options == {"an_option": True}
            raise jax.errors.JaxRuntimeError(self.message)

    with pytest.raises(ImportError, match=r"ptxas.*pip install 'trainer-jax\[gpu-programs\]'"):
        planned_phase._compiled(Lowered("INTERNAL: libdevice not found at ./libdevice.10.bc"), {"an_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        planned_phase._compiled(Lowered("something else"), {"an_option": True})


def test_shapes_stand_for_arrays_that_take_no_memory():
    large = jax.ShapeDtypeStruct((2**20, 2**20), np.float32)
    (x, named), y = planned_phase._host_arrays(((large, {"rows": large}), [1, 2]))
    assert x.shape == named["rows"].shape == large.shape and x.strides == (0, 0) and y == [1, 2]


@pytest.mark.parametrize(("given", "rows"), [
    ({}, 32), ({"batch_size": 20}, 20), ({"steps_per_epoch": 3}, 34)])
def test_a_script_is_planned_for_the_batches_of_its_fit(given, rows):
    arrays = {"x": np.ones((100, 4)), "y": np.ones((100, 3))}
    sample, batch_size = command._sample({**arrays, **given})
    assert batch_size == rows and sample[0] is arrays["x"] and sample[1] is arrays["y"]
    assert command._sample({"x": arrays["x"]}) == ((arrays["x"],), 32)


def test_other_data_of_a_script_are_taken_as_they_are():
    dataset = trainer.data.Dataset.from_arrays(BATCH).batch(4)
    assert command._sample({"x": dataset}) == (dataset, None)


def test_a_script_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["plan", "none.py", "--topology", "8xh100"])
    assert "there is no script 'none.py'" in capsys.readouterr().err
