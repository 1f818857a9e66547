"""What a report says that each device holds, against what arrays take once they are placed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import trainer
from trainer import distribute
from trainer.core.tree_paths import named_leaves
from trainer.core.units import readable_bytes, readable_number
from trainer.tools.plan.state_report import report

PARAMS = {"down": {"kernel": jax.ShapeDtypeStruct((8, 6), jnp.float32)},
          "up": {"bias": jax.ShapeDtypeStruct((8,), jnp.bfloat16), "kernel": jax.ShapeDtypeStruct((6, 8), jnp.float32)}}
SPECS = {"down/kernel": P(("replica", "model"), None), "up/bias": P("model"), "up/kernel": P(None, "model")}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.reshape(jax.devices("cpu"), (2, 4)), ("replica", "model"))


def replicated(mesh, leaves, memory_kind=None):
    return dict.fromkeys(leaves, NamedSharding(mesh, P(), memory_kind=memory_kind))


def adam_report(mesh, memory_kind=None, title="A title", gradients=None):
    """Returns the report of parameters split over the model axis, and the leaves and shardings it was made from."""
    params, model_state = named_leaves(PARAMS), {
        "count": jax.ShapeDtypeStruct((), jnp.int32), "dropout": jax.eval_shape(jax.random.key, 0)}
    opt_state = named_leaves(jax.eval_shape(optax.adam(0.1).init, PARAMS))
    split = {path: NamedSharding(mesh, spec) for path, spec in SPECS.items()}
    spec_of = {path: next((spec for suffix, spec in SPECS.items() if path.endswith(suffix)), P()) for path in opt_state}
    trees = {
        "params": (params, split),
        "gradients": (params, {path: split[path] for path in gradients or params}),
        "opt_state": (opt_state, {path: NamedSharding(mesh, spec, memory_kind=memory_kind)
                                  for path, spec in spec_of.items()}),
        "model_state": (model_state, replicated(mesh, model_state)),
    }
    return report(title, *trees["params"], *trees["opt_state"], *trees["model_state"], trees["gradients"][1]), trees


def held_by(device, leaves, shardings):
    """Returns the bytes that a device holds once zeros are placed."""
    placed = [jax.device_put(np.zeros(leaves[path].shape, leaves[path].dtype), sharding)
              for path, sharding in shardings.items()]
    return sum(shard.data.nbytes for array in placed for shard in array.addressable_shards if shard.device == device)


def test_sizes_are_those_of_the_placed_arrays(mesh, devices):
    size, trees = adam_report(mesh)
    assert size.parameter_bytes == held_by(devices[5], *trees["params"]) == 24 + 4 + 48
    assert size.gradient_bytes == held_by(devices[5], *trees["gradients"]) == 24 + 4 + 48
    assert size.optimizer_bytes == held_by(devices[5], *trees["opt_state"]) == 2 * (24 + 4 + 48) + 4
    assert size.model_state_bytes == 4 + 8  # a count and one random key
    assert size.total == {"device": 76 + 76 + 156 + 12} and size.total_bytes == 320
    assert size.unsharded_bytes == 4 * (192 + 16 + 192) + 4 + 12


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.permutations([None, "replica", "model"]),
       st.sampled_from(["float32", "bfloat16", "int8", "complex64"]))
def test_rows_count_what_jax_gives_each_device(multiples, axes, dtype):
    mesh = Mesh(np.reshape(jax.devices("cpu"), (2, 4)), ("replica", "model"))
    shape, spec = tuple(8 * multiple for multiple in multiples), P(*axes[:len(multiples)])
    sharding = {"kernel": NamedSharding(mesh, spec)}
    kernel = {"kernel": jax.ShapeDtypeStruct(shape, dtype)}
    size = report("", kernel, sharding, {}, {}, {}, {}, {})
    assert size.rows[0].device_bytes == size.parameter_bytes == held_by(jax.devices("cpu")[3], kernel, sharding)
    assert size.unsharded_bytes == np.zeros(shape, kernel["kernel"].dtype).nbytes


def test_a_report_allocates_nothing(mesh):
    adam_report(mesh)
    arrays = len(jax.live_arrays())
    huge = {"kernel": jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)}
    size = report("", huge, replicated(mesh, huge), {}, {}, {}, {}, replicated(mesh, huge))
    assert len(jax.live_arrays()) == arrays
    assert size.total_bytes == 2**43 and "8.0 TiB" in str(size)


def test_the_text_shows_each_parameter_and_the_sums(mesh):
    size, _ = adam_report(mesh, title="Eight devices")
    assert str(size).splitlines() == [
        "Eight devices",
        "Parameter    Shape   Dtype     Spec                          Per device",
        "-----------------------------------------------------------------------",
        "down/kernel  (8, 6)  float32   (('replica', 'model'), None)        24 B",
        "up/bias      (8,)    bfloat16  ('model',)                           4 B",
        "up/kernel    (6, 8)  float32   (None, 'model')                     48 B",
        "-----------------------------------------------------------------------",
        "Per device",
        "Parameters                76 B",
        "Gradients                 76 B",
        "Optimizer state          156 B",
        "Model state               12 B",
        "Total                    320 B",
        "One device, unsharded  1.6 KiB",
        "Batches, activations and temporary buffers are not counted.",
    ]


def test_parts_in_another_memory_are_summed_and_shown_apart(mesh):
    size, _ = adam_report(mesh, memory_kind="pinned_host")
    assert size.optimizer_state == {"pinned_host": 156} and size.optimizer_bytes == 156
    assert size.total == {"device": 164, "pinned_host": 156} and size.total_bytes == 320
    lines = [line.split() for line in str(size).splitlines()]
    assert ["Optimizer", "state", "156", "B", "in", "pinned_host"] in lines
    assert ["Total", "164", "B"] in lines
    assert ["Total", "156", "B", "in", "pinned_host"] in lines


def test_a_part_may_lie_in_two_memories(mesh):
    params = named_leaves(PARAMS)
    shardings = replicated(mesh, params) | replicated(mesh, ["up/kernel"], "pinned_host")
    size = report("", params, shardings, {}, {}, {}, {}, {})
    assert size.parameters == {"device": 192 + 16, "pinned_host": 192} and size.parameter_bytes == 400
    assert [line.split() for line in str(size).splitlines() if line.startswith("Parameters")] == [
        ["Parameters", "208", "B"], ["Parameters", "192", "B", "in", "pinned_host"]]


def test_everything_in_another_memory_leaves_none_on_the_device(mesh):
    params = named_leaves(PARAMS)
    size = report("", params, replicated(mesh, params, "pinned_host"), {}, {}, {}, {}, {})
    assert size.total == {"pinned_host": 400}


def test_the_memory_of_the_device_counts_as_default_however_it_is_named(mesh, devices):
    params = named_leaves(PARAMS)
    kind = devices[0].default_memory().kind
    assert report("", params, replicated(mesh, params, kind), {}, {}, {}, {}, {}).parameters == {"device": 400}


def test_parameters_without_a_gradient_add_none(mesh):
    size, _ = adam_report(mesh, gradients=["up/bias"])
    assert size.gradient_bytes == 4 and size.parameter_bytes == 76


@pytest.mark.parametrize(("spec", "text"), [(P(), "replicated"), (P(None, None), "replicated"),
                                            (P("model"), "('model',)"), (P(None, "replica"), "(None, 'replica')")])
def test_a_spec_is_shown_as_a_rule_is_written(mesh, spec, text):
    kernel = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    size = report("", kernel, {"kernel": NamedSharding(mesh, spec)}, {}, {}, {}, {}, {})
    assert size.rows[0].spec == text and text in str(size)


class Quarters(jax.sharding.Sharding):
    """Splits the first dimension by four."""

    is_fully_replicated = False
    memory_kind = None

    def shard_shape(self, global_shape):
        return (global_shape[0] // 4, *global_shape[1:])


def test_shardings_without_a_spec_are_described(devices):
    kernel = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    specs = [report("", kernel, {"kernel": sharding}, {}, {}, {}, {}, {}).rows[0].spec
             for sharding in (SingleDeviceSharding(devices[0]), Quarters())]
    assert specs == ["replicated", "shards of (2, 8)"]


def test_every_parameter_of_a_long_model_is_shown_at_full_width(mesh):
    paths = {f"{'deeply_nested_block/' * 12}layer_{index}/kernel": jax.ShapeDtypeStruct((3,), jnp.float32)
             for index in range(300)}
    lines = str(report("", paths, replicated(mesh, paths), {}, {}, {}, {}, {})).splitlines()
    assert [line.split()[0] for line in lines[3:303]] == list(paths)


def test_a_model_without_parameters_has_a_report():
    size = report("Nothing", {}, {}, {}, {}, {}, {}, {})
    assert size.rows == () and size.total == {"device": 0} and size.unsharded_bytes == 0
    assert "Total" in str(size)


def test_a_report_is_short_where_python_shows_values(mesh):
    assert repr(adam_report(mesh)[0]) == "StateReport('A title', total_bytes=320)"


@pytest.mark.parametrize(("part", "arguments"), [("params", 0), ("opt_state", 2), ("model_state", 4)])
def test_leaves_and_shardings_of_different_paths_are_refused(mesh, part, arguments):
    leaves = {"kernel": jax.ShapeDtypeStruct((8,), jnp.float32)}
    trees = [{}] * 7
    trees[arguments] = leaves
    with pytest.raises(ValueError, match=f"In `{part}`, 'kernel' has a shape but no sharding. Give both for the same"):
        report("", *trees)
    trees[arguments:arguments + 2] = {}, replicated(mesh, leaves)
    with pytest.raises(ValueError, match=f"In `{part}`, 'kernel' has a sharding but no shape. Give both for the same"):
        report("", *trees)


def test_a_gradient_of_no_parameter_is_refused(mesh):
    with pytest.raises(ValueError, match="In `gradients`, 'kernel' has a sharding but no shape"):
        report("", {}, {}, {}, {}, {}, {}, replicated(mesh, ["kernel"]))


@pytest.mark.parametrize(("size", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 - 1, "1.0 MiB"), (2**20 - 2**9, "1023.5 KiB"),
    (5 * 2**29, "2.5 GiB"), (2**50, "1.0 PiB"), (2**61, "2048.0 PiB"),
])
def test_bytes_are_shown_in_the_unit_that_suits_them(size, text):
    assert readable_bytes(size) == text


@given(st.integers(0, 2**59))
def test_bytes_are_shown_to_one_decimal_and_below_1024(size):
    number, unit = readable_bytes(size).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert abs(float(number) * scale - size) <= 0.051 * scale
    assert float(number) < 1024


@pytest.mark.parametrize("shapes", [False, True])
def test_a_batch_adds_the_peak_of_a_step(shapes, devices, capsys):
    model = trainer.Model(nn.Dense(256))
    model.compile("adam", "mse", steps_per_execution=1)
    batch = np.ones((16, 128), np.float32), np.ones((16, 256), np.float32)
    if shapes:
        batch = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in batch)
    found = distribute.FullyShardedStrategy(devices[:4]).explain(model, batch=batch)
    assert not model.built
    weights = (128 + 1) * 256 * 4
    assert 3 * weights / 4 + weights < found.peak_bytes < 4 * weights  # the state's parts, and whole gradients
    assert 2 * weights < found.temporary_bytes + 4096 < found.peak_bytes  # gathered parameters, and whole gradients
    assert found.step_flops == pytest.approx(2 * 2 * (16 // 4) * 128 * 256, rel=1.0)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    shown = {line[0]: line[-1].strip() for line in lines}
    assert shown["Peak of a step"] == readable_bytes(found.peak_bytes)
    assert shown["Gradients, activations, temporary"] == readable_bytes(found.temporary_bytes)
    assert shown["Operations of a step"] == readable_number(found.step_flops, "FLOP")


def test_a_peak_needs_a_model_that_is_compiled(devices):
    with pytest.raises(RuntimeError, match="compile"):
        distribute.MirroredStrategy(devices[:2]).explain(
            trainer.Model(nn.Dense(1)), batch=(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)))
