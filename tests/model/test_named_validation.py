"""Several sets of data to validate on: their logs, what callbacks see of them, and a resume between them."""

import csv

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.callbacks import BackupAndRestore, Callback, CSVLogger, EarlyStopping, ModelCheckpoint, ValidateEvery

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)).astype(np.float32), RNG.normal(size=(20, 1)).astype(np.float32)
CLEAN = (X[:7], Y[:7])
NOISY = (X[:11] + 1, Y[:11], np.linspace(0, 1, 11, dtype=np.float32))


def compiled(**arguments):
    model = trainer.Model(nn.Dense(1))
    model.compile(**{"optimizer": "sgd", "loss": "mse", "weighted_metrics": ["mae"], **arguments})
    return model


def sets():
    return {"clean": CLEAN, "noisy": trainer.data.Dataset.from_arrays(NOISY).batch(4)}


class Noting(Callback):
    """Notes the hooks of validations."""

    def __init__(self):
        self.noted = []

    def on_test_begin(self, logs=None):
        self.noted.append("begin")

    def on_test_batch_end(self, batch, logs=None):
        self.noted.append((batch, sorted(logs)))

    def on_test_end(self, logs=None):
        self.noted.append(dict(logs))


@pytest.mark.slow
def test_the_logs_of_each_set_are_those_of_evaluate():
    model = compiled()
    noting = Noting()
    history = model.fit(X, Y, epochs=2, validation_data=sets(), validation_batch_size=4, verbose=0, callbacks=[noting])
    assert list(history.history) == ["loss", "mae", "val_clean_loss", "val_clean_mae", "val_noisy_loss",
                                     "val_noisy_mae"]
    clean = model.evaluate(*CLEAN, verbose=0)
    noisy = model.evaluate(NOISY[0], NOISY[1], sample_weight=NOISY[2], verbose=0)
    for name, expected in {**{f"val_clean_{name}": value for name, value in clean.items()},
                           **{f"val_noisy_{name}": value for name, value in noisy.items()}}.items():
        assert len(history.history[name]) == 2
        np.testing.assert_allclose(history.history[name][-1], expected, rtol=1e-5)
    ends = [noted for noted in noting.noted if isinstance(noted, dict)]
    assert [list(logs) for logs in ends] == 2 * [["clean_loss", "clean_mae"], ["noisy_loss", "noisy_mae"]]
    assert noting.noted[1] == (0, ["clean_loss", "clean_mae"])
    np.testing.assert_allclose(model.get_metrics_result()["loss"], noisy["loss"], rtol=1e-5)


@pytest.mark.slow
def test_several_replicas_have_the_logs_of_one_device():
    def run(strategy):
        with strategy.scope():
            model = compiled()
        return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, validation_data=sets(), validation_batch_size=4,
                         verbose=0).history

    expected = run(trainer.distribute.OneDeviceStrategy("cpu:0"))
    history = run(trainer.distribute.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]))
    assert list(history) == list(expected)
    for name, values in history.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5)


@pytest.mark.slow
def test_the_training_is_that_without_a_validation():
    models = compiled(), compiled()
    losses = [model.fit(X, Y, epochs=3, verbose=0, validation_data=data).history["loss"]
              for model, data in zip(models, (None, sets()), strict=True)]
    assert losses[0] == losses[1]
    for weight, same in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.slow
def test_evaluate_takes_sets_and_returns_their_logs_one_after_another():
    model = compiled()
    model.fit(X, Y, verbose=0)
    logs = model.evaluate(sets(), batch_size=4, verbose=0)
    assert list(logs) == ["clean_loss", "clean_mae", "noisy_loss", "noisy_mae"]
    np.testing.assert_allclose(logs["clean_loss"], model.evaluate(*CLEAN, verbose=0)["loss"], rtol=1e-6)
    assert model.evaluate(sets(), verbose=0, return_dict=False) == pytest.approx(list(logs.values()), rel=1e-6)


@pytest.mark.slow
def test_callbacks_monitor_the_logs_of_a_set(tmp_path):
    class Accuracy(trainer.metrics.MeanMetricWrapper):
        direction = "max"

    model = compiled(metrics=[Accuracy(lambda y_true, y_pred: 0.0 * y_pred, name="accuracy")])
    stopping = EarlyStopping("val_noisy_accuracy", patience=0)  # whose direction is that of "accuracy"
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}-{val_clean_loss:.2f}.safetensors", "val_clean_loss",
                                 save_weights_only=True)
    model.fit(X, Y, epochs=3, validation_data=sets(), verbose=0, callbacks=[stopping, checkpoint])
    assert stopping.monitor_op is np.greater and stopping.stopped_epoch == 1
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match=r"monitor='val_loss', which no log has. Did you mean .*val_clean_loss"):
        model.fit(X, Y, validation_data=sets(), verbose=0, callbacks=[EarlyStopping()])


@pytest.mark.slow
def test_a_log_of_epochs_has_columns_for_sets_that_come_later(tmp_path):
    file = tmp_path / "log.csv"
    history = compiled().fit(X, Y, epochs=2, validation_data=sets(), validation_freq=2, verbose=0,
                             callbacks=[CSVLogger(file)])
    rows = list(csv.DictReader(file.read_text().splitlines()))
    for name in ("val_clean_loss", "val_noisy_mae"):
        assert [row[name] for row in rows] == ["NA", str(history.history[name][0])]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_shows_each_set(verbose, capsys):
    compiled().fit(X, Y, validation_data=sets(), verbose=verbose)
    printed = capsys.readouterr().out
    assert "val_clean_loss" in printed and "val_noisy_mae" in printed


@pytest.mark.slow
def test_validating_in_the_middle_of_epochs_takes_the_sets_of_fit_or_its_own():
    shared, own = ValidateEvery(2), ValidateEvery(2, validation_data=sets())
    model = compiled()
    history = model.fit(X, Y, batch_size=5, validation_data=sets(), verbose=0, callbacks=[shared, own])
    assert shared.history["step"] == [2, 4]
    for name in ("val_clean_loss", "val_noisy_loss"):
        np.testing.assert_allclose(shared.history[name], own.history[name], rtol=1e-6)
        np.testing.assert_allclose(shared.history[name][-1], history.history[name][0], rtol=1e-6)


def test_sets_that_can_be_read_once_are_none_to_validate_on_again_and_again():
    with pytest.raises(ValueError, match="Received: a tuple_iterator, which yields its batches once"):
        ValidateEvery(2, validation_data={"clean": CLEAN, "noisy": iter((CLEAN,))})
    with pytest.raises(ValueError, match="data that can be read again for each checkpoint"):
        trainer.SidecarEvaluator(compiled(), {"clean": CLEAN, "noisy": iter((CLEAN,))}, "backup")


@pytest.mark.slow
def test_a_sidecar_evaluates_each_set(tmp_path):
    model = compiled()
    backup = BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(X, Y, verbose=0, callbacks=[backup])
    (evaluation,) = trainer.SidecarEvaluator(compiled(), sets(), tmp_path / "backup", verbose=0).start()
    assert list(evaluation) == ["step", "epoch", "clean_loss", "clean_mae", "noisy_loss", "noisy_mae"]
    np.testing.assert_allclose(evaluation["noisy_loss"], model.evaluate(sets(), verbose=0)["noisy_loss"], rtol=1e-6)


class Interrupted(Exception):
    pass


class InterruptIn(Callback):
    """Ends a run in the validation of some number, before a batch of it ends."""

    def __init__(self, validation):
        self.validation, self.begun = validation, 0

    def on_test_begin(self, logs=None):
        self.begun += 1

    def on_test_batch_end(self, batch, logs=None):
        if self.begun == self.validation and batch == 1:
            raise Interrupted


def generated():
    while True:
        for begin in range(0, 20, 4):
            yield X[begin:begin + 4], Y[begin:begin + 4]


@pytest.mark.slow
@pytest.mark.parametrize("validation", [3, 4])  # the first and the second set of the second epoch
@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_a_run_that_ends_in_the_validation_of_a_set_resumes_exactly(tmp_path, validation, kind):
    def run(folder, *others):
        model = compiled(optimizer="adam")
        noisy = sets()["noisy"] if kind == "arrays" else generated()  # of which each validation takes the next batches
        backup = BackupAndRestore(tmp_path / folder, save_freq=2, save_on_error=True, delete_checkpoint=False)
        monitors = [EarlyStopping("val_noisy_loss", patience=5), ValidateEvery(3)] if kind == "arrays" else []
        history = model.fit(X, Y, batch_size=4, epochs=3, verbose=0, validation_steps=2, validation_batch_size=4,
                            validation_data={"clean": CLEAN, "noisy": noisy}, callbacks=[*monitors, *others, backup])
        return model, history.history, [(monitor.state_dict()) for monitor in monitors]

    numbers = {"arrays": validation + 6, "generator": validation}  # `ValidateEvery` has validated three times before
    quiet, expected, states = run("undisturbed", InterruptIn(None))
    with pytest.raises(Interrupted):
        run("resumed", InterruptIn(numbers[kind]))
    model, history, resumed = run("resumed", InterruptIn(None))
    assert history == expected
    assert repr(resumed) == repr(states)
    for weight, same in zip(model.get_weights(), quiet.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_sets(tmp_path):
    def run(data, epochs=2):
        compiled().fit(X, Y, epochs=epochs, verbose=0, validation_data=data,
                       callbacks=[BackupAndRestore(tmp_path, delete_checkpoint=False)])

    run(sets(), 1)
    for data, message in (
            ({**sets(), "noisy": CLEAN}, "The validation data 'noisy' do not match the run"),
            ({"clean": CLEAN}, "The validation data 'noisy' do not match .*: there are none now"),
            (CLEAN, "The validation data do not match .*: there are some now"),
            ({**sets(), "other": CLEAN}, "The validation data 'other' do not match .*: there are some now"),
            (None, "The validation data 'clean' do not match .*: there are none now")):
        with pytest.raises(ValueError, match=message):
            run(data)
    run(sets())


class Inputs(nn.Module):
    @nn.compact
    def __call__(self, a, b):
        return nn.Dense(1)(a + b)


def test_a_dict_of_arrays_is_one_set_of_inputs():
    class Model(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return (y_pred ** 2).mean()

    model = Model(Inputs())
    model.compile("sgd")
    data = {"a": X, "b": X}
    history = model.fit(data, validation_data=data, verbose=0).history
    assert list(history) == ["loss", "val_loss"]
    assert list(model.evaluate(data, verbose=0)) == ["loss"]
    history = model.fit(data, validation_data={"both": (data,), "again": (data,)}, verbose=0).history
    assert list(history) == ["loss", "val_both_loss", "val_again_loss"]
    with pytest.raises(ValueError, match=r"has the names of the inputs `x`, 'a', 'b'\. .*`\(inputs, targets\)`"):
        model.fit(data, validation_data={"a": (X,), "b": (X,)}, verbose=0)


@pytest.mark.parametrize(("data", "error", "message"), [
    ({"clean": CLEAN, "x": X}, ValueError, r"of sets of data, .* of other values: 'x'\. .*tuple `\(x,\)`"),
    ({1: CLEAN}, TypeError, "a dict of sets of data whose keys are strings"),
    ({"": CLEAN}, ValueError, "a set with an empty name"),
    ({"clean": CLEAN, "noisy": (X[:3], Y[:2])}, ValueError, r"`validation_data\['noisy'\]` must be `\(x, y\)`"),
    ({"clean": CLEAN, "noisy": iter([CLEAN])}, ValueError, r"`validation_data\['noisy'\]` is a generator"),
])
def test_what_is_no_dict_of_sets_is_refused_before_training(data, error, message):
    model = compiled()
    with pytest.raises(error, match=message):
        model.fit(X, Y, epochs=2, validation_data=data, verbose=0)
    assert not model.built or model.optimizer.iterations == 0


def test_sets_that_would_share_a_log_are_refused():
    def loss(y_true, y_pred):
        return abs(y_true - y_pred)

    loss.__name__ = "b_loss"
    model = compiled(metrics=[loss])
    with pytest.raises(ValueError, match="Two sets of data would have the log 'val_a_b_loss'"):
        model.fit(X, Y, validation_data={"a": CLEAN, "a_b": CLEAN}, verbose=0)
