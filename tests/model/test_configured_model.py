"""What `compile` was given, as it is read and set: beside Keras where there are numbers."""

import numpy as np
import pytest
from flax import linen as nn

import trainer

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X @ np.ones((3, 1)) > 0).astype(np.float32)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


def compiled(**arguments):
    model = trainer.Sequential([nn.Dense(1), nn.sigmoid])
    model.compile(**{"optimizer": trainer.optimizers.Adam(0.1), "loss": "binary_crossentropy", "metrics": ["accuracy"],
                     **arguments})
    return model


def test_before_compile_there_is_nothing():
    model = trainer.Model(nn.Dense(1))
    assert (model.optimizer, model.loss, model.metrics, model.metrics_names, model.get_metrics_result()) == (
        None, None, [], [], {})
    assert not model.run_eagerly and model.jit_compile
    with pytest.raises(RuntimeError, match=r"Call `compile\(optimizer, loss\)` before"):
        model.optimizer = "sgd"


def test_the_loss_and_the_metrics_are_what_compile_was_given():
    loss, metric = trainer.losses.BinaryCrossentropy(), trainer.metrics.BinaryAccuracy()
    model = compiled(loss=loss, metrics=[metric])
    assert model.loss is loss
    model.fit(X, Y, verbose=0)
    assert model.metrics[1].result().keys() == {"binary_accuracy"}
    for name, value in (("loss", "mse"), ("metrics", ["mae"])):
        with pytest.raises(AttributeError, match=rf"`{name}` .* Call `compile\(..., {name}=...\)`"):
            setattr(model, name, value)
    assert model.loss is loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_names_and_results_of_metrics_are_those_of_keras(keras):
    theirs = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
    model = compiled()
    model.build(X)
    kernel, bias = theirs.get_weights()
    model.set_weights([bias, kernel])
    theirs.compile(keras.optimizers.Adam(0.1), "binary_crossentropy", metrics=["accuracy"])
    for call in ("fit", "evaluate"):
        for each in (theirs, model):
            getattr(each, call)(X, Y, batch_size=4, verbose=0, **({"shuffle": False} if call == "fit" else {}))
        assert model.metrics_names == theirs.metrics_names == ["loss", "compile_metrics"]
        result, expected = model.get_metrics_result(), theirs.get_metrics_result()
        assert result.keys() == expected.keys()
        for name, value in result.items():
            assert isinstance(value, float)
            np.testing.assert_allclose(value, expected[name], rtol=1e-5)
    model.reset_metrics()
    assert set(model.get_metrics_result().values()) == {0.0}


@pytest.mark.slow
def test_an_optimizer_that_is_set_begins_and_leaves_the_weights_and_all_else():
    model = compiled(freeze="**/bias")
    model.fit(X, Y, epochs=2, verbose=0)
    before = model.get_weights()
    model.optimizer = trainer.optimizers.SGD(0.5)
    assert (model.optimizer.name, model.optimizer.iterations) == ("sgd", 0)
    for weight, same in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, same)
    expected = compiled(optimizer=trainer.optimizers.SGD(0.5), freeze="**/bias")
    expected.build(X)
    expected.set_weights(before)
    histories = [each.fit(X, Y, shuffle=False, verbose=0).history for each in (model, expected)]
    assert histories[0] == histories[1]
    for weight, same in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.slow
def test_the_optimizer_of_another_model_is_taken_without_its_state():
    model, other = compiled(), compiled(optimizer=trainer.optimizers.SGD(0.25))
    other.fit(X, Y, verbose=0)
    model.optimizer = other.optimizer
    assert (model.optimizer.name, float(model.optimizer.learning_rate), model.optimizer.iterations) == ("sgd", 0.25, 0)
    with pytest.raises(ValueError, match="Unknown optimizer 'adamm'"):
        model.optimizer = "adamm"
    assert model.optimizer.name == "sgd"


@pytest.mark.slow
def test_steps_run_uncompiled_once_that_is_set_and_compiled_again():
    ran = []

    class Watched(trainer.Sequential):
        def train_step(self, state, batch):
            ran.append(1)
            return super().train_step(state, batch)

    model, plain = Watched([nn.Dense(1), nn.sigmoid]), compiled()
    model.compile(trainer.optimizers.Adam(0.1), "binary_crossentropy", metrics=["accuracy"])
    losses, plains = [], []
    for eager in (False, True, False):
        model.run_eagerly = eager
        assert (model.run_eagerly, model.jit_compile) == (eager, not eager)
        ran.clear()
        losses += model.fit(X, Y, batch_size=2, shuffle=False, verbose=0).history["loss"]
        plains += plain.fit(X, Y, batch_size=2, shuffle=False, verbose=0).history["loss"]
        assert (len(ran) >= 8) == eager
    np.testing.assert_allclose(losses, plains, rtol=1e-5)
    assert model.optimizer.iterations == 24
    model.jit_compile = False
    assert model.run_eagerly
    model.optimizer = "sgd"
    assert model.run_eagerly
    model.jit_compile = "auto"
    model.optimizer = "sgd"
    assert not model.run_eagerly


def test_what_contradicts_is_refused():
    model = compiled(deterministic=True)
    with pytest.raises(ValueError, match="Give one of them"):
        model.run_eagerly = True
    assert not model.run_eagerly

    class Sets(trainer.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for name, value in (("run_eagerly", True), ("optimizer", "sgd")):
                with pytest.raises(RuntimeError, match="when `fit` has ended"):
                    setattr(self.model, name, value)
            noted.append(epoch)

    noted = []
    compiled().fit(X, Y, epochs=2, verbose=0, callbacks=[Sets()])
    assert noted == [0, 1]


def test_load_model_asks_for_the_model(tmp_path):
    model = compiled()
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "saved")
    other = trainer.load_model(tmp_path / "saved", model=compiled())
    for weight, same in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)
    assert other.optimizer.iterations == 1
    with pytest.raises(TypeError, match=r"needs a model: .* no code of it. .*load_model\('.*saved', model=new_model"):
        trainer.load_model(tmp_path / "saved")
    with pytest.raises(ValueError, match="load_keras_weights"):
        trainer.load_model("model.keras")
    with pytest.raises(AttributeError, match=r"trainer.load_model\(path, model=...\)"):
        _ = trainer.models.load_model
