"""What users send to other processes can be pickled and copied: optimizers, losses, metrics, callbacks, histories."""

import copy
import inspect
import pickle

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import callbacks, losses, metrics, optimizers, regularizers
from trainer.optimizers import schedules

WAYS = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy, "copy": copy.copy}
X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
NEEDED = {"SensitivityAtSpecificity": (0.5,), "SpecificityAtSensitivity": (0.5,),
          "PrecisionAtRecall": (0.5,), "RecallAtPrecision": (0.5,), "IoU": (2, [0]), "MeanIoU": (2,),
          "OneHotIoU": (2, [0]), "OneHotMeanIoU": (2,), "MeanMetricWrapper": (losses.mean_squared_error,),
          "LossMetric": (losses.Huber(),),
          "PolynomialDecay": (0.5, 5), "ExponentialDecay": (0.5, 5, 0.9), "InverseTimeDecay": (0.5, 5, 0.9),
          "CosineDecay": (0.5, 5), "CosineDecayRestarts": (0.5, 5), "PiecewiseConstantDecay": ([1], [0.5, 0.25]),
          "LossScaleOptimizer": (optimizers.SGD(0.5),)}
BASES = ("Loss", "Metric", "Optimizer", "LearningRateSchedule", "Regularizer", "Penalty", "CommonArguments",
         "FurtherArguments")


def made():
    """Returns an object of each public class with a configuration, by name."""
    classes = {}
    for package in (losses, metrics, optimizers, schedules, regularizers):
        names = getattr(package, "__all__", None) or [
            name for name, value in vars(package).items() if getattr(value, "__module__", None) == package.__name__]
        classes |= {name: getattr(package, name) for name in names if inspect.isclass(getattr(package, name))}
    return {name: kind(*NEEDED.get(name, ())) for name, kind in classes.items()
            if hasattr(kind, "get_config") and name not in BASES}


MADE = made()


@pytest.mark.parametrize("way", WAYS)
def test_what_has_a_configuration_comes_back_with_it(way):
    assert len(MADE) > 80
    for name, value in MADE.items():
        again = WAYS[way](value)
        assert type(again) is type(value) and again.get_config() == value.get_config(), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name, value in MADE.items() if isinstance(value, optimizers.Optimizer)])
def test_an_optimizer_comes_back_equal_and_at_its_rate(name, way):
    optimizer = getattr(optimizers, name)(clipnorm=1.0, name="mine")
    optimizer.learning_rate = 0.125
    again = WAYS[way](optimizer)
    assert type(again) is type(optimizer) and again.get_config() == optimizer.get_config()
    assert float(again.learning_rate) == 0.125 and again.name == "mine"
    assert again == optimizer or name == "Muon"  # whose parts compare by identity


def test_an_optimizer_of_the_users_own_with_a_schedule_comes_back():
    optimizer = Mine(schedules.CosineDecay(0.5, 5), twice=True)
    again = WAYS["pickle"](optimizer)
    assert again.get_config() == optimizer.get_config() and again.twice and float(again.learning_rate) == 0.5


class Mine(optimizers.SGD):
    def __init__(self, learning_rate, twice=False, **common):
        super().__init__(learning_rate, **common)
        self.twice = twice


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model and the callbacks of its `fit`, with the history last."""
    folder = tmp_path_factory.mktemp("run")
    used = [
        callbacks.EarlyStopping("loss", restore_best_weights=True), callbacks.ReduceLROnPlateau("loss"),
        callbacks.ModelCheckpoint(folder / "w.safetensors", save_weights_only=True), callbacks.TerminateOnNaN(),
        callbacks.CSVLogger(folder / "log.csv"), callbacks.TensorBoard(folder / "board"),
        callbacks.LearningRateScheduler(halved), callbacks.BackupAndRestore(folder / "backup"),
        callbacks.OrbaxCheckpoint(folder / "orbax"), callbacks.ValidateEvery(1), callbacks.ProgbarLogger(),
        callbacks.Throughput(), callbacks.LambdaCallback(), callbacks.RunRecord(folder / "record"),
        callbacks.LogTo(callbacks.loggers.JSONLines(folder / "log.jsonl"))]
    model = trainer.Model(nn.Dense(1), seed=0)
    model.compile("adam", "mse", metrics=["mae"])
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=used, validation_data=(X, Y))
    return model, [*used, history]


def halved(epoch, rate):
    return rate / 2


@pytest.mark.parametrize("way", WAYS)
def test_callbacks_come_back_without_the_model(trained, way):
    for callback in trained[1]:
        again = WAYS[way](callback)
        assert type(again) is type(callback) and again.model is None and callback.model is trained[0]
        assert repr(again.state_dict()) == repr(callback.state_dict())


def test_a_history_comes_back_with_its_values(trained):
    history = trained[1][-1]
    again = WAYS["pickle"](history)
    assert again.history == history.history and again.epoch == [0, 1] and again.params == history.params
    assert again.timing == history.timing and again.epochs_of("val_loss") == [0, 1]


def test_a_stopping_that_comes_back_trains_again(trained):
    stopping = WAYS["pickle"](trained[1][0])
    trained[0].fit(X, Y, epochs=2, verbose=0, callbacks=[stopping])
    assert stopping.model is trained[0]


def test_the_optimizer_of_a_model_comes_back_alone_at_the_current_rate(trained):
    model = trained[0]
    again = WAYS["pickle"](model.optimizer)
    assert isinstance(again, optimizers.Adam) and float(again.learning_rate) == float(model.optimizer.learning_rate)
    assert float(again.learning_rate) < 0.001


def test_what_evaluate_and_predict_return_can_be_pickled(trained):
    results = trained[0].evaluate(X, Y, verbose=0), trained[0].predict(X, verbose=0)
    assert WAYS["pickle"](results)[0] == results[0] and not isinstance(results[1], jax.Array)


def test_an_optax_transformation_can_be_sent_by_cloudpickle():
    cloudpickle = pytest.importorskip("cloudpickle")
    again = pickle.loads(cloudpickle.dumps(optimizers.get(optax.adam(0.25))))
    assert float(again.learning_rate) == 0.25


@pytest.mark.slow
def test_an_estimator_of_scikit_learn_can_be_cloned_and_sent_to_processes():
    base, cloudpickle = map(pytest.importorskip, ("sklearn.base", "cloudpickle"))  # the latter is joblib's, and Ray's
    optimizer = optimizers.AdamW(0.5)
    classifier = trainer.TrainerClassifier(nn.Dense(2), optimizer=optimizer, epochs=1,
                                           callbacks=[callbacks.EarlyStopping("loss")])
    classifier.fit(X, np.arange(8) % 2)
    clone = base.clone(classifier)
    assert clone.optimizer == optimizer and clone.optimizer is not optimizer
    sent = pickle.loads(cloudpickle.dumps(classifier))
    np.testing.assert_array_equal(sent.predict(X), classifier.predict(X))
