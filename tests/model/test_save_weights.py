"""Weights go into one safetensors file and come back bit for bit, under every strategy, or nothing changes at all."""

import gc
import os
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, compiled_mlp, logits_loss
from tests.support.strategy_cases import LAYOUT, STRATEGIES, LinenNet
from trainer import distribute
from trainer.engine.model import weights_io
from trainer.engine.model.core.model_core import core_of
from trainer.engine.saving.arrays.safetensors_file import read_arrays, save_arrays

X, Y, _ = classification(24)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def built(module=None, **options):
    model = trainer.Model(module or LinenMLP(batch_norm=True))
    model.compile("adam", logits_loss(), **options)
    model.build(X)
    return model


def filled(module=None, **options):
    """Returns a model with weights that no initialisation gives; faster to make than by training."""
    model = built(module, **options)
    rng = np.random.default_rng(1)
    model.set_weights([rng.uniform(0.1, 1, leaf.shape) for leaf in model.get_weights()])
    return model


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


def read_all(path):
    with read_arrays(path) as file:
        return dict(file), file.metadata


# --- what is in the file ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_named_by_their_paths_and_the_file_says_who_wrote_it(path):
    model = built()
    model.save_weights(path)
    arrays, metadata = read_all(path)
    assert sorted(arrays) == ["BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel", "Dense_1/bias",
                              "Dense_1/kernel", "batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"]
    np.testing.assert_array_equal(arrays["Dense_0/kernel"], model.state.params["Dense_0"]["kernel"])
    assert metadata == {"package": "trainer-jax", "format_version": "1"}


@pytest.mark.slow
def test_the_safetensors_library_reads_the_file(path):
    model = built()
    model.save_weights(path)
    arrays = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(arrays["Dense_1/kernel"], model.state.params["Dense_1"]["kernel"])


def test_parameters_and_state_of_one_nnx_layer_stand_together(path):
    built(NNXMLP(batch_norm=True)).save_weights(path)
    names = [name for name in read_all(path)[0] if name.startswith("norm/")]
    assert sorted(names) == ["norm/bias", "norm/mean", "norm/scale", "norm/var"]


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP(batch_norm=True), NNXMLP(batch_norm=True), NNXMLP()],
                         ids=["linen", "nnx", "stateless"])
def test_weights_come_back_bit_for_bit_and_predict_the_same(path, module):
    model = filled(module)
    model.save_weights(path)
    other = built(type(module)(batch_norm=module.norm is not None) if isinstance(module, NNXMLP) else module)
    report = other.load_weights(str(path))
    assert_same_bits(other.get_weights(), model.get_weights())
    np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    assert len(report.matched) == len(model.get_weights()) and not (report.missing or report.unexpected)


@pytest.mark.slow
def test_a_dict_of_modules_has_names_that_begin_with_the_modules(path):
    class Pair(trainer.Model):
        def sample_inputs(self, batch):
            return {"up": batch, "down": batch}

    model = Pair({"up": nn.Dense(2), "down": nn.Dense(3)})
    model.build(X)
    model.save_weights(path)
    assert sorted(read_all(path)[0]) == ["down/bias", "down/kernel", "up/bias", "up/kernel"]


class Clashing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("cache", "x", jnp.zeros, ())
        return x + self.param("Cache", nn.initializers.zeros, ())


def test_a_parameter_and_a_state_array_of_one_path_are_refused(path):
    model = trainer.Model(Clashing())
    model.build(X)
    state = model.state
    core_of(model).state.set(state.replace(params={"cache": {"x": state.params["Cache"]}}))
    for use in (model.save_weights, model.load_weights):
        with pytest.raises(ValueError, match=r"both have the path 'cache/x'.*Rename"):
            use(path)
    assert not path.exists()


# --- strategies -------------------------------------------------------------------------------------------------------

SPLIT = {
    "mirrored": STRATEGIES["mirrored"],
    "central_storage": STRATEGIES["central_storage"],
    "fully_sharded": STRATEGIES["fully_sharded"],
    "sharded_optimizer": STRATEGIES["sharded_optimizer"],
    "model_parallel": lambda: distribute.ModelParallelStrategy({"replica": 2, "model": 4}, layout_map=LAYOUT),
}


def under(strategy, **options):
    with strategy.scope():
        model = trainer.Model(LinenNet(batch_norm=True))
        model.compile("adam", logits_loss(), **options)
    model.build(np.ones((8, 16), np.float32))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_under_every_strategy_the_file_is_whole_and_loads_to_the_places_of_the_weights(path, name):
    one = under(STRATEGIES["one_device"]())
    one.set_weights([np.random.default_rng(0).normal(size=leaf.shape) for leaf in one.get_weights()])
    one.save_weights(path)
    model = under(SPLIT[name](), ema_decay=0.5)
    before = jax.tree.map(lambda leaf: (leaf.sharding, leaf.sharding.memory_kind), model.current_run.state)
    model.load_weights(path)
    assert before == jax.tree.map(lambda leaf: (leaf.sharding, leaf.sharding.memory_kind), model.current_run.state)
    assert_same_bits(model.get_weights(), one.get_weights())
    again = path.with_name("again.safetensors")
    model.save_weights(again)
    assert again.read_bytes() == path.read_bytes()
    x = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    np.testing.assert_allclose(model.predict(x, verbose=0), one.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    model.fit(x, np.zeros(8, int), verbose=0)  # what was loaded can be donated


def test_each_device_gets_its_part_only(path):
    model = under(STRATEGIES["fully_sharded"]())
    model.save_weights(path)
    with mock.patch("jax.device_put", wraps=jax.device_put) as placed:
        model.load_weights(path, ["Dense_0/kernel"])
    [(values, sharding)] = [call.args for call in placed.call_args_list]
    assert isinstance(values, np.ndarray), "on the host until each device gets its part"
    assert sharding.shard_shape(values.shape) == (16, 64 // 4)


@pytest.mark.slow
def test_one_array_of_the_file_is_in_memory_at_a_time(path):
    model = built()
    model.save_weights(path)
    alive, most = [], []
    cast = weights_io.cast_to

    def watched(name, values, dtype):
        gc.collect()
        most.append(sum(reference() is not None for reference in alive))
        alive.append(weakref.ref(values))
        return cast(name, values, dtype).copy()  # or the model's arrays would be in the memory of the file's

    with mock.patch.object(weights_io, "cast_to", watched):
        model.load_weights(path)
    assert len(most) == 8 and max(most) <= 1  # the one that the loop still holds


def test_only_the_first_process_writes(path):
    model = built()
    with mock.patch("jax.process_index", return_value=1):
        model.save_weights(path)
        assert not path.exists()


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bfloat16_model_saves_bfloat16_and_comes_back_bit_for_bit(path):
    model = filled(precision="bfloat16")
    model.save_weights(path)
    assert read_all(path)[0]["Dense_0/kernel"].dtype == jnp.bfloat16
    other = built(precision="bfloat16")
    other.load_weights(path)
    assert_same_bits(other.get_weights(), model.get_weights())


@pytest.mark.slow
def test_float32_weights_are_rounded_to_a_bfloat16_model_and_bfloat16_ones_widened(path):
    wide, narrow = filled(), built(precision="bfloat16")
    wide.save_weights(path)
    narrow.load_weights(path)
    kernel = np.asarray(wide.state.params["Dense_0"]["kernel"])
    loaded = np.asarray(narrow.state.params["Dense_0"]["kernel"])
    assert_same_bits([loaded], [kernel.astype(jnp.bfloat16)])
    narrow.save_weights(path)
    wide.load_weights(path)
    np.testing.assert_array_equal(wide.state.params["Dense_0"]["kernel"], loaded.astype(np.float32))


def arrays_of(model):
    return {name: np.asarray(leaf) for name, leaf in weights_io._named_weights(model.state).items()}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("kernel", [np.full((6, 8), 1e300), np.full((6, 8), -1e39)])
def test_numbers_that_the_models_dtype_cannot_hold_are_refused(path, kernel):
    model = built()
    before = model.get_weights()
    save_arrays(path, {**arrays_of(model), "Dense_0/bias": np.ones(8), "Dense_0/kernel": kernel})
    with pytest.raises(ValueError, match=r"'Dense_0/kernel' has numbers that are too large for the model's float32"):
        model.load_weights(path)
    assert_same_bits(model.get_weights(), before)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("factor", "words"), [(1e300, "too large"), (1j, "complex numbers")])
def test_weights_that_the_models_dtype_cannot_hold_are_not_set(factor, words):
    model = built()
    before = model.get_weights()
    with pytest.raises(ValueError, match=rf"'weights\[1\]' has .*{words}"):
        model.set_weights([before[0], np.ones(before[1].shape) * factor, *before[2:]])
    assert_same_bits(model.get_weights(), before)


def test_infinities_and_nans_in_a_file_are_loaded_as_they_are(path):
    model = built()
    bias = np.array([np.inf, -np.inf, np.nan, 0, 1, 2, 3, 4])
    save_arrays(path, {"Dense_0/bias": bias})
    model.load_weights(path, ["Dense_0/bias"])
    np.testing.assert_array_equal(model.state.params["Dense_0"]["bias"], bias)


# --- which weights ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_patterns_choose_which_weights_are_loaded(path):
    model, other = filled(), built()
    model.save_weights(path)
    before = other.state
    report = other.load_weights(path, patterns=["Dense_0", "batch_stats/.*/mean"])
    assert report.matched == ("Dense_0/bias", "Dense_0/kernel", "batch_stats/BatchNorm_0/mean")
    assert len(report.skipped) == 5
    np.testing.assert_array_equal(other.state.params["Dense_0"]["kernel"], model.state.params["Dense_0"]["kernel"])
    np.testing.assert_array_equal(other.state.params["Dense_1"]["kernel"], before.params["Dense_1"]["kernel"])
    stats, theirs = other.state.model_state["batch_stats"], model.state.model_state["batch_stats"]
    np.testing.assert_array_equal(stats["BatchNorm_0"]["mean"], theirs["BatchNorm_0"]["mean"])
    assert np.any(stats["BatchNorm_0"]["var"] != theirs["BatchNorm_0"]["var"])


@pytest.mark.slow
def test_a_file_with_other_names_loads_with_partial_only(path):
    model, other = filled(LinenMLP()), built()
    model.save_weights(path)
    before = other.get_weights()
    with pytest.raises(ValueError, match=r"(?s)4 missing from the file: BatchNorm_0/bias.*Pass `partial=True`"):
        other.load_weights(path)
    assert_same_bits(other.get_weights(), before)
    report = other.load_weights(path, partial=True)
    assert len(report.matched) == 4 and "batch_stats/BatchNorm_0/mean" in report.missing
    np.testing.assert_array_equal(other.state.params["Dense_1"]["kernel"], model.state.params["Dense_1"]["kernel"])


def test_other_shapes_are_refused_and_nothing_changes(path):
    filled(LinenMLP(classes=4, batch_norm=True)).save_weights(path)
    model = built()
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"Dense_1/kernel \(file: float32\(8, 4\), model: float32\(8, 3\)\)"):
        model.load_weights(path, partial=True)
    assert_same_bits(model.get_weights(), before)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("patterns", "error", "words"), [
    ("Dense_0", TypeError, r"Write \['Dense_0'\]"),
    (["Dens_0"], ValueError, "'Dens_0', which matches none of the 8 paths. Did you mean 'Dense_0'"),
    ([], ValueError, "would load nothing"),
])
def test_patterns_that_cannot_be_used_are_refused(path, patterns, error, words):
    model = built()
    model.save_weights(path)
    with pytest.raises(error, match=words):
        model.load_weights(path, patterns)


@pytest.mark.slow
def test_a_file_cut_short_while_it_is_read_changes_nothing(path):
    model, other = filled(), built()
    model.save_weights(path)
    before = other.get_weights()
    read = weights_io.cast_to

    def cutting(name, values, dtype):
        os.truncate(path, os.path.getsize(path) - 4 * 6)
        return read(name, values, dtype)

    with mock.patch.object(weights_io, "cast_to", cutting), pytest.raises(ValueError, match=r"cut short"):
        other.load_weights(path)
    assert_same_bits(other.get_weights(), before)


# --- the rest of the state --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_optimizers_state_and_the_step_stay(path):
    model = built()
    model.fit(X, Y, epochs=2, verbose=0)
    built().save_weights(path)
    before = jax.tree.map(np.array, (model.state.opt_state, model.state.step))
    assert before[1] == 2
    model.load_weights(path)
    assert_same_bits(jax.tree.leaves(jax.tree.map(np.array, (model.state.opt_state, model.state.step))),
                     jax.tree.leaves(before))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["load_weights", "set_weights"])
@pytest.mark.parametrize("optimizer", ["sgd", {"Dense_0": "sgd", "Dense_1": "adam"}], ids=["one", "by_name"])
def test_moving_averages_start_anew_from_weights_that_are_replaced(path, way, optimizer):
    plain = filled(LinenMLP())
    plain.save_weights(path)
    model = trainer.Model(LinenMLP())
    model.compile(optimizer, logits_loss(), ema_decay=0.9, freeze=["Dense_1/bias"])
    for _ in range(3):
        model.train_on_batch(X, Y)
    model.load_weights(path) if way == "load_weights" else model.set_weights(plain.get_weights())
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-6)
    model.train_on_batch(X, Y)
    # One update further the average is 0.9 of the loaded weights and 0.1 of the new ones.
    kernel = model.state.params["Dense_0"]["kernel"]
    average = model.state.averaged().params["Dense_0"]["kernel"]
    np.testing.assert_allclose(average, 0.9 * plain.state.params["Dense_0"]["kernel"] + 0.1 * kernel, rtol=1e-5)


@pytest.mark.slow
def test_moving_averages_of_weights_that_are_not_loaded_go_on(path):
    model, other = compiled_mlp(ema_decay=0.9), filled(LinenMLP())
    model.fit(X, Y, epochs=3, verbose=0)
    other.save_weights(path)
    before = model.state.averaged().params
    model.load_weights(path, ["Dense_1"])
    after = model.state.averaged().params
    np.testing.assert_array_equal(after["Dense_0"]["kernel"], before["Dense_0"]["kernel"])
    np.testing.assert_array_equal(after["Dense_1"]["kernel"], other.state.params["Dense_1"]["kernel"])


@pytest.mark.slow
def test_the_average_of_a_bfloat16_model_is_of_the_weights_as_it_stores_them(path):
    filled().save_weights(path)
    model = built(precision="bfloat16", ema_decay=0.9)
    model.load_weights(path)
    stored, average = model.state.params["Dense_0"]["kernel"], model.state.opt_state.average["Dense_0"]["kernel"]
    assert average.dtype == np.float32
    np.testing.assert_array_equal(average, np.asarray(stored, np.float32))


def test_arrays_given_to_set_weights_may_be_written_to_afterwards():
    model = built()
    weights = [np.full(leaf.shape, 0.5, leaf.dtype) for leaf in model.get_weights()]
    model.set_weights(weights)
    for weight in weights:
        weight[...] = 7
    assert all(np.all(leaf == 0.5) for leaf in model.get_weights())


@pytest.mark.slow
def test_training_goes_on_from_loaded_weights_without_compiling_anew(path):
    model = compiled_mlp()
    model.fit(X, Y, verbose=0)
    executables = dict(core_of(model).configuration.phases["train"].programs.compiled)
    model.save_weights(path)
    model.load_weights(path)
    model.fit(X, Y, verbose=0)
    assert len(executables) == 1 and core_of(model).configuration.phases["train"].programs.compiled == executables


@pytest.mark.slow
def test_a_model_that_is_not_compiled_has_weights_files_too(path):
    model = trainer.Model(LinenMLP())
    model.build(X)
    model.save_weights(path)
    other = trainer.Model(LinenMLP(), seed=3)
    other.build(X)
    other.load_weights(path)
    assert_same_bits(other.get_weights(), model.get_weights())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["save_weights", "load_weights"])
def test_a_model_that_is_not_built_says_how_to_build_it(path, use):
    with pytest.raises(RuntimeError, match=r"Call `build\(sample\)`"):
        getattr(trainer.Model(LinenMLP()), use)(path)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("use", ["save_weights", "load_weights"])
def test_what_is_no_path_is_refused(use):
    with pytest.raises(TypeError, match=r"`filepath` must be a path.*type int"):
        getattr(built(), use)(3)


def test_an_existing_file_is_replaced_unless_it_is_not_to_be(path):
    model = built()
    path.write_text("something of value")
    with pytest.raises(FileExistsError, match=r"exists already. Pass `overwrite=True`"):
        model.save_weights(path, overwrite=False)
    assert path.read_text() == "something of value"
    model.save_weights(path)
    model.load_weights(path)
    other = path.with_name("new.weights")
    model.save_weights(other, overwrite=False)
    model.load_weights(other)


def test_a_damaged_file_is_refused_and_nothing_changes(path):
    model = built()
    model.save_weights(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"is damaged: the array '.*' does not have the checksum"):
        model.load_weights(path)
    for mine, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_folders_are_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder.*Make it first"):
        built().save_weights(tmp_path / "missing" / "weights.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_with_what_loads_it(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"A checkpoint folder is loaded with `trainer.load`"):
        built().load_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("start", "kind"), [(b"\x89HDF\r\n\x1a\n", "an HDF5 file"), (b"", "was cut short")])
def test_a_file_that_is_no_safetensors_file_is_refused_and_nothing_changes(path, start, kind):
    model = built()
    before = model.get_weights()
    path.write_bytes(start)
    with pytest.raises(ValueError, match=rf"{kind}.*Expected: a safetensors file, as `save_weights` writes it"):
        model.load_weights(path)
    assert_same_bits(model.get_weights(), before)


def test_a_file_of_a_later_format_is_refused_and_one_of_another_program_is_not(path):
    model = built()
    arrays = arrays_of(model)
    save_arrays(path, arrays, {"package": "trainer-jax", "format_version": "2"})
    with pytest.raises(ValueError, match=r"has version 2 of the format.*knows version 1"):
        model.load_weights(path)
    for metadata in (None, {"format": "pt"}):
        save_arrays(path, arrays, metadata)
        assert len(model.load_weights(path).matched) == 8


# --- a part of a model -----------------------------------------------------------------------------------------------


class LinenBackbone(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(2, name="head")(LinenMLP(batch_norm=True, name="backbone")(x, training))


def nnx_backbone(rngs):
    return nnx.Sequential(nnx.Linear(X.shape[1], 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))


class NNXBackbone(nnx.Module):
    def __init__(self, rngs):
        self.backbone, self.head = nnx_backbone(rngs), nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.backbone(x))


@pytest.mark.parametrize(("backbone", "whole"), [
    (lambda: LinenMLP(batch_norm=True), LinenBackbone),
    (lambda: nnx_backbone(nnx.Rngs(0)), lambda: NNXBackbone(nnx.Rngs(1)))], ids=["linen", "nnx"])
def test_the_file_of_a_submodule_is_loaded_into_it(path, backbone, whole):
    alone, model = filled(backbone()), built(whole())
    alone.save_weights(path)
    before = {weight.path: np.asarray(weight.value) for weight in model.weights}
    with pytest.raises(ValueError, match="It has the weights of 'backbone': give `part='backbone'`"):
        model.load_weights(path)
    with pytest.raises(ValueError, match=r"Unknown part 'backbon'\. Did you mean 'backbone'"):
        model.load_weights(path, part="backbon")
    report = model.load_weights(path, part="backbone")
    expected = {weight.path: np.asarray(weight.value) for weight in alone.weights}
    assert sorted(report.matched) == sorted(expected)
    for weight in model.weights:
        name = weight.path.replace("backbone/", "")
        np.testing.assert_array_equal(weight.value, before[weight.path] if "head" in name else expected[name])
