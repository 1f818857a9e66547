"""Callbacks that were written for Keras, in `fit` of the trainer."""

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.callbacks import BackupAndRestore, EarlyStopping, LearningRateScheduler, ReduceLROnPlateau
from trainer.callbacks.base.keras_callback import as_callback
from trainer.core.plain import encode

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")

rng = np.random.default_rng(0)
x, y = rng.normal(size=(40, 4)).astype(np.float32), rng.normal(size=(40, 1)).astype(np.float32)


def new_model(rate=0.05):
    model = trainer.Model(nn.Dense(1), seed=0)
    model.compile(trainer.optimizers.SGD(rate), "mse")
    return model


def fitted(*callbacks, epochs=8, **options):
    model = new_model()
    history = model.fit(x, y, batch_size=16, epochs=epochs, validation_data=(x[:10], y[:10]), verbose=0,
                        callbacks=list(callbacks), **options)
    return model, history.history


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), [
    (lambda: keras.callbacks.EarlyStopping("val_loss", min_delta=0.05, patience=1, restore_best_weights=True),
     lambda: EarlyStopping("val_loss", min_delta=0.05, patience=1, restore_best_weights=True)),
    (lambda: keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=0.2),
     lambda: ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=0.2)),
    (lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
     lambda: LearningRateScheduler(lambda epoch, rate: rate * 0.5)),
])
def test_kerass_own_do_what_ours_do(theirs, ours):
    (one, found), (other, expected) = fitted(theirs()), fitted(ours())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)
    for mine, its in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.slow
def test_hooks_come_as_in_keras(tmp_path):
    class Recorder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            events.append(("epoch", epoch, sorted(logs), float(self.model.optimizer.learning_rate)))

        def on_train_batch_end(self, batch, logs=None):
            events.append(("batch", batch, isinstance(logs["loss"], float)))

    events = []
    fitted(Recorder(), keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TerminateOnNaN(), epochs=2)
    batches = [("batch", number, True) for number in range(3)]
    end = ["loss", "val_loss"], pytest.approx(0.05)
    assert events == [*batches, ("epoch", 0, *end), *batches, ("epoch", 1, *end)]
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == "epoch,loss,val_loss"


def test_batches_are_fused_where_no_batch_hook_is_overridden():
    callback = trainer.callbacks.CallbackList([keras.callbacks.EarlyStopping("loss")])
    assert not callback.wants_batch_hooks("train") and not callback.wants("on_test_begin")
    assert trainer.callbacks.CallbackList(
        [keras.callbacks.LambdaCallback(on_train_batch_end=print)]).wants_batch_hooks("train")


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_their_state(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def callbacks():
        return keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=2, min_delta=10.0), BackupAndRestore(
            tmp_path / "backup")

    _, expected = fitted(callbacks()[0])
    model = new_model()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=16, epochs=8, validation_data=(x[:10], y[:10]), verbose=0,
                  callbacks=[*callbacks(), Interrupt()])
    _, found = fitted(*callbacks(), keras.callbacks.Callback())
    assert found == expected


def test_of_their_attributes_plain_data_is_saved():
    class Holds(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.counts = {"a": [1, (2.5, None)], "b": {"c": np.float32(3)}}
            self.by_place = {"places": {(0, 1): 2}}  # a checkpoint has no such keys
            self.owner = {"owner": object()}

    callback = as_callback(Holds())
    assert callback.state_dict().keys() & {"counts", "by_place", "owner"} == {"counts"}
    encode(callback.state_dict())


def test_a_class_is_refused_by_name():
    with pytest.raises(TypeError, match="Give an instance, not the class"):
        fitted(keras.callbacks.EarlyStopping)


class LogsTheOptimizer(keras.callbacks.Callback):
    """What callbacks of trackers, such as MLflow's, ask a model for."""

    def on_train_begin(self, logs=None):
        self.config = self.model.optimizer.get_config()


@pytest.mark.slow
def test_a_tracker_reads_the_optimizers_arguments():
    callback = LogsTheOptimizer()
    fitted(callback, epochs=1)
    assert callback.config["name"] == "sgd" and callback.config["learning_rate"] == pytest.approx(0.05)


@pytest.mark.slow
def test_tqdms_callback_counts_epochs_and_batches(capsys):
    tqdm_keras = pytest.importorskip("tqdm.keras")
    _, history = fitted(tqdm_keras.TqdmCallback(verbose=1), epochs=2)
    assert "2/2" in capsys.readouterr().err and list(history) == ["loss", "val_loss"]
