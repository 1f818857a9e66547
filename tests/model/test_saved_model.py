"""`Model.save` and `trainer.load`: the whole training state, in a file or a folder."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer import distribute
from trainer.engine.model.core import saved_model

X, Y, _ = classification(40)


def make_model(module=None, optimizer="adam", strategy=None):
    with (strategy or distribute.OneDeviceStrategy()).scope():
        model = trainer.Model(module or LinenMLP(batch_norm=True, dropout=0.2), seed=3)
        model.compile(optimizer, logits_loss(), metrics=["accuracy"], ema_decay=0.9)
    return model


def fit(model, epochs, initial_epoch=0):
    return model.fit(X, Y, batch_size=8, epochs=epochs, initial_epoch=initial_epoch, verbose=0)


def assert_same_weights(one, other):
    for mine, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(scope="module")
def trained():
    model = make_model()
    fit(model, 2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "model.safetensors"])
@pytest.mark.parametrize("built", [False, True])
def test_a_loaded_model_trains_on_to_the_bit(tmp_path, trained, name, built):
    trained.save(tmp_path / name)
    assert (tmp_path / name).is_file() == ("." in name)
    expected, model = make_model(), make_model()
    fit(expected, 3)
    if built:
        model.build(X)
    assert trainer.load(tmp_path / name, model) is model
    assert_same_weights(model, trained)
    assert int(model.state.step) == 10
    fit(model, 3, initial_epoch=2)
    assert_same_weights(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_the_strategy_may_be_another_one(tmp_path, trained, name):
    trained.save(tmp_path / name)
    sharded = distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(4)], min_shard_bytes=0)
    model = trainer.load(tmp_path / name, make_model(strategy=sharded))
    assert_same_weights(model, trained)
    model.save(tmp_path / f"again_{name}")
    assert_same_weights(trainer.load(tmp_path / f"again_{name}", make_model(strategy=mirrored(2))), trained)


@pytest.mark.slow
def test_an_nnx_model_is_built_by_loading(tmp_path):
    model = make_model(NNXMLP())
    fit(model, 1)
    model.save(tmp_path / "model")
    assert_same_weights(trainer.load(tmp_path / "model", make_model(NNXMLP(seed=1))), model)


@pytest.mark.slow
def test_what_is_there_is_replaced_unless_told_otherwise(tmp_path, trained):
    for name in ("model", "model.safetensors"):
        trained.save(tmp_path / name)
        trained.save(tmp_path / name)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            trained.save(tmp_path / name, overwrite=False)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_another_optimizer_is_refused(tmp_path, trained, name):
    trained.save(tmp_path / name)
    with pytest.raises(ValueError, match=r"opt_state(.|\n)*compile the model as it was when it was saved"):
        trainer.load(tmp_path / name, make_model(optimizer=trainer.optimizers.Adam(amsgrad=True)))


@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_a_model_that_is_not_compiled_is_told_so(tmp_path, trained, name):
    trained.save(tmp_path / name)
    with pytest.raises(ValueError, match=r"not compiled.*Call `compile\(...\)` as when.*errors.html#not-compiled"):
        trainer.load(tmp_path / name, trainer.Model(LinenMLP(batch_norm=True, dropout=0.2)))


@pytest.mark.slow
def test_another_optimizer_with_the_same_state_is_refused(tmp_path, trained):
    trained.save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"of the optimizer 'Adam'. Received: 'AdamW'\. Make and compile"):
        trainer.load(tmp_path / "model.safetensors", make_model(optimizer=trainer.optimizers.AdamW(0.1)))


@pytest.mark.parametrize(("call", "name", "instead"), [
    ("save", "model.keras", "Write '.*model.safetensors', or '.*model' for a folder"),
    ("save_weights", "model.weights.h5", "Write '.*model.weights.safetensors'"),
    ("export", "model.onnx", 'give `format="onnx"`'),
])
def test_a_file_is_not_given_the_suffix_of_another_format(tmp_path, trained, call, name, instead):
    with pytest.raises(ValueError, match=rf"`filepath` has the suffix.*{instead}"):
        getattr(trained, call)(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_training_state_is_loaded_whatever_its_file_is_called(tmp_path, trained):
    trained.save(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.keras")
    assert_same_weights(trainer.load(tmp_path / "model.keras", make_model()), trained)


def test_a_damaged_file_is_refused(tmp_path, trained):
    path = tmp_path / "model.safetensors"
    trained.save(path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        trainer.load(path, make_model())


@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_a_newer_format_is_refused(tmp_path, trained, monkeypatch, name):
    monkeypatch.setattr(saved_model, "FORMAT_VERSION", 2)
    trained.save(tmp_path / name)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has version 2 of the format of training states\. This trainer knows"):
        trainer.load(tmp_path / name, make_model())


def test_other_files_are_told_apart(tmp_path, trained):
    trained.save_weights(tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"is another kind of file\. Expected: a training state, as `Model\.save` "
                                         r"writes it\. Weights alone are loaded with `Model.load_weights`"):
        trainer.load(tmp_path / "weights.safetensors", make_model())
    trained.save(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*model.safetensors"):
        trainer.load(tmp_path / "model.kers", make_model())
    with pytest.raises(TypeError, match="`model` must be a model"):
        trainer.load(tmp_path / "model.safetensors", LinenMLP())


@pytest.mark.slow
def test_a_checkpoint_of_a_run_is_told_apart(tmp_path):
    fit_callbacks = [trainer.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)]
    make_model().fit(X, Y, epochs=1, callbacks=fit_callbacks, verbose=0)
    (checkpoint,) = tmp_path.glob("step_*")
    with pytest.raises(ValueError, match="`BackupAndRestore`"):
        trainer.load(checkpoint, make_model())


def test_a_model_without_weights_has_nothing_to_save(tmp_path):
    with pytest.raises(RuntimeError, match="no weights yet"):
        make_model().save(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("path", ["folder", "file.safetensors"])
def test_counts_that_callbacks_add_are_no_part_of_how_a_model_is_compiled(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    x = np.ones((8, 3), np.float32)

    def new(callback=None, **options):
        model = trainer.Model(nn.Dense(2), seed=0)
        model.compile("adam", "mse", **options)
        model.fit(x, x[:, :2], batch_size=2, verbose=0, callbacks=callback)
        return model

    guarded, counting, plain = new(trainer.callbacks.SpikeGuard(window=3)), new(skip_non_finite=True), new()
    kept = jax.tree.map(np.array, guarded.state.opt_state)
    for one, other in ((guarded, plain), (guarded, counting), (plain, counting), (counting, guarded),
                       (new(trainer.callbacks.SpikeGuard(window=2)), guarded)):
        one.save(path)
        saved, before = one.state, other.state.opt_state
        trainer.load(path, other)
        for found, expected in ((other.state.params, saved.params), (other.state.step, saved.step),
                                (other.state.opt_state.inner, saved.opt_state.inner)):
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert jax.tree.map(np.shape, other.state.opt_state) == jax.tree.map(np.shape, before)
        other.fit(x, x[:, :2], batch_size=2, verbose=0)
    same = new(trainer.callbacks.SpikeGuard(window=3))
    same.save(path)
    guarded.spike_rule = same.spike_rule
    jax.tree.map(np.testing.assert_array_equal, trainer.load(path, guarded).state.opt_state.spikes, kept.spikes)
