"""S5: bad input is refused in words that name the argument, what was received and the fix, before anything compiles."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import LinenMLP, logits_loss, mirrored

X, Y = np.zeros((10, 4), np.float32), np.zeros(10, np.int64)
SPREAD = np.arange(40, dtype=np.float32).reshape(10, 4)


def model(module=None, **options):
    made = trainer.Model(module or nn.Dense(3))
    made.compile(**{"optimizer": "sgd", "loss": logits_loss(), **options})
    return made


def fit(x=X, y=Y, compiled=None, **options):
    return (compiled or model()).fit(x, y, verbose=0, **options)


class Bad(trainer.Model):
    def __init__(self, returned):
        super().__init__(nn.Dense(3))
        self.returned = returned

    def train_step(self, state, batch):
        logs, new_state = super().train_step(state, batch)
        return self.returned(logs, new_state)


class Largest(trainer.metrics.Metric):
    """As in Keras: nothing says how the accumulators of two steps become one."""

    def __init__(self):
        super().__init__()
        self.largest = self.add_variable()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(jnp.maximum(self.largest.value, abs(y_true - y_pred).max()))

    def result(self):
        return self.largest


def fit_custom(returned):
    made = Bad(returned)
    made.compile("sgd", logits_loss())
    return fit(compiled=made)


def predict_list():
    made = model()
    made.build(X)
    made.predict([X] * 4, verbose=0)


def predict_in_a_step():
    class Predicts(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return jnp.mean(self.predict(x))

    made = Predicts(nn.Dense(3))
    made.compile("sgd")
    fit(compiled=made)


class Nothing(nn.Module):
    @nn.compact
    def __call__(self, x):
        nn.Dense(3)(x)


class OfKeras(trainer.Model):
    def train_step(self, data):
        return {"loss": 0.0}


class Printing(trainer.Model):
    def train_step(self, state, batch):
        logs, state = super().train_step(state, batch)
        return {"loss": float(logs["loss"])}, state


def of_class(cls):
    made = cls(nn.Dense(3))
    made.compile("sgd", logits_loss())
    return made


def fit_in_another_scope():
    made = model()
    with mirrored(2).scope():
        fit(compiled=made)


def rmse(y_true, y_pred):
    return jnp.sqrt(jnp.mean((jnp.asarray(y_true, jnp.float32)[:, None] - y_pred) ** 2))


class RMSE(trainer.losses.Loss):
    def call(self, y_true, y_pred):
        return jnp.sqrt(jnp.mean((y_true[:, None] - y_pred) ** 2))


class OverridesCall(trainer.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return jnp.mean((y_true[:, None] - y_pred) ** 2)


def change_while_it_runs(change):
    made = model()
    fit(compiled=made, callbacks=[trainer.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: change(made))])


def fit_without_jit():
    with jax.disable_jit():
        fit()


def fit_after_a_build_on_other_rows():
    made = model()
    fit(compiled=made)
    made.build(X[:, :3])
    fit(compiled=made)


class TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x), nn.Dense(1)(x)


def fit_two_outputs(y, first_y=None, **options):
    made = model(TwoOutputs(), **{"loss": ["mse", "mse"], **options})
    for targets in (first_y, y):
        if targets is not None:
            fit(y=targets, compiled=made)


class Joined(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(jnp.concatenate([x["age"], x["fare"]], -1))


def squares(y_true, y_pred):
    return ((jnp.asarray(y_true, jnp.float32).reshape(-1, 1) - y_pred) ** 2).reshape(len(y_true), -1)


def predict_without_a_key():
    made = model(Joined())
    fit({"age": X, "fare": X}, compiled=made)
    made.predict({"age": X, "fair": X}, verbose=0)


def compile_in_another_scope():
    made = trainer.Model(nn.Dense(3))
    with mirrored(2).scope():
        made.compile("sgd", "mse")


def set_state_of_other_shapes():
    made = model()
    made.build(X)
    made.state = made.state.replace(params={"kernel": np.zeros(2), "bias": np.zeros(3)})


CASES = {
    "lengths": (ValueError, ["x", "y", "10", "9"], lambda: fit(y=Y[:9])),
    "not compiled": (RuntimeError, ["compile", "fit"], lambda: trainer.Model(nn.Dense(3)).fit(X, Y)),
    "evaluate not compiled": (RuntimeError, ["compile", "evaluate"], lambda: trainer.Model(nn.Dense(3)).evaluate(X, Y)),
    "batch_size": (ValueError, ["batch_size", "0"], lambda: fit(batch_size=0)),
    "batch_size type": (TypeError, ["batch_size"], lambda: fit(batch_size=2.5)),
    "epochs": (ValueError, ["epochs", "-1"], lambda: fit(epochs=-1)),
    "epochs type": (TypeError, ["epochs", "str"], lambda: fit(epochs="3")),
    "initial_epoch": (ValueError, ["initial_epoch"], lambda: fit(initial_epoch=-1)),
    "verbose": (ValueError, ["verbose", "3"], lambda: model().fit(X, Y, verbose=3)),
    "validation_freq": (ValueError, ["validation_freq"], lambda: fit(validation_freq=0, validation_data=(X, Y))),
    "validation_freq type": (TypeError, ["validation_freq"], lambda: fit(validation_freq=1.5)),
    "validation_freq text": (TypeError, ["validation_freq", "str"],
                             lambda: fit(validation_freq="3", validation_data=(X, Y))),
    "validation_freq epochs": (ValueError, ["validation_freq", "0"],
                               lambda: fit(validation_freq=[2, 0], validation_data=(X, Y))),
    "validation_batch_size": (ValueError, ["validation_batch_size", "0"],
                              lambda: fit(validation_data=(X, Y), validation_batch_size=0)),
    "validation_data parts": (ValueError, ["validation_data", "4 parts"], lambda: fit(validation_data=(X, Y, Y, Y))),
    "validation_data rows": (ValueError, ["validation_data", "(9,)"], lambda: fit(validation_data=(X, Y[:9]))),
    "inputs of the module": (ValueError, ["module", "(8, 4)"], lambda: fit(x=[X, X])),
    "inputs of rank one": (ValueError, ["`x`", "(10,)", "one number per row", "`x[:, None]`"], lambda: fit(x=X[:, 0])),
    "inputs of rank one, as many as features": (
        ValueError, ["`x`", "(8,)", "`x[:, None]`"],
        lambda: fit(x=X[:8, 0], y=Y[:8], compiled=model([nn.Dense(4), nn.Dense(8)], loss="mse"))),
    "inputs of rank one that the module cannot be initialized on": (
        ValueError, ["`x`", "(10,)", "`x[:, None]`"],
        lambda: model(nn.Conv(3, (2,))).predict(X[:, 0], verbose=0)),
    "a dict of inputs of rank one": (
        ValueError, ["`x['age']`", "`x['fare']`", "(10,)", "`x['age'][:, None]`"],
        lambda: fit(x={"age": X[:, 0], "fare": X[:, 1]}, compiled=model(Joined()))),
    "a missing key": (ValueError, ["`x`", "['fair']", "['fare']", "KeyError"], predict_without_a_key),
    "names of inputs": (ValueError, ["module", "'left'", "missing"],
                        lambda: fit(x={"left": X}, compiled=model(lambda left, right: left + right))),
    "inputs of named modules": (ValueError, ["sample_inputs", "(8, 4)"],
                                lambda: fit(compiled=model({"one": nn.Dense(3), "two": nn.Dense(3)}))),
    "a generator on_batch": (TypeError, ["`x`", "one batch"], lambda: model().train_on_batch(iter([(X, Y)]))),
    "weights": (TypeError, ["weights", "int"], lambda: (m := model(), m.build(X), m.set_weights(3))),
    "layers": (TypeError, ["layers", "Dense"], lambda: trainer.Sequential(nn.Dense(3))),
    "masked arrays": (ValueError, ["x", "filled"], lambda: fit(x=np.ma.masked_array(X))),
    "many things": (ValueError, ["object", "(10 in all)"], lambda: fit(x=[object()] * 10)),
    "validation_split": (ValueError, ["validation_split"], lambda: fit(validation_split=1.5)),
    "both validations": (ValueError, ["validation_split", "validation_data"],
                         lambda: fit(validation_split=0.5, validation_data=(X, Y))),
    "steps_per_epoch": (ValueError, ["steps_per_epoch"], lambda: fit(steps_per_epoch=0)),
    "validation_steps": (ValueError, ["validation_steps"], lambda: fit(validation_data=(X, Y), validation_steps=0)),
    "steps of evaluate": (TypeError, ["steps", "float"], lambda: model().evaluate(X, Y, steps=1.5)),
    "steps of predict": (ValueError, ["steps", "-1"], lambda: model().predict(X, steps=-1)),
    "seed": (ValueError, ["seed", "-1"], lambda: trainer.Model(nn.Dense(3), seed=-1)),
    "seed type": (TypeError, ["seed", "str"], lambda: trainer.Model(nn.Dense(3), seed="a")),
    "module": (TypeError, ["Flax", "int"], lambda: trainer.Model(3)),
    "module class": (TypeError, ["Flax"], lambda: trainer.Model(nn.Dense)),
    "layer": (TypeError, ["'relu'"], lambda: trainer.Sequential([nn.Dense(3), "relu"])),
    "optimizer name": (ValueError, ["adamm", "adam"], lambda: model(optimizer="adamm")),
    "optimizer type": (TypeError, ["optimizer", "int"], lambda: model(optimizer=3)),
    "optimizer class": (TypeError, ["optimizer", "Adam(...)"], lambda: model(optimizer=trainer.optimizers.Adam)),
    "optimizer function": (TypeError, ["optimizer", "adam(...)"], lambda: model(optimizer=optax.adam)),
    "optimizer dict": (ValueError, ["optimizer", "one optimizer per top-level submodule", "set_to_zero"],
                       lambda: model(optimizer={"generator": "adam"}).build(X)),
    "loss name": (ValueError, ["mse_", "mse"], lambda: model(loss="mse_")),
    "loss type": (TypeError, ["loss", "int"], lambda: model(loss=3)),
    "loss reduction": (ValueError, ["reduction", "none"], lambda: model(loss=logits_loss(reduction="none"))),
    "loss_weights": (ValueError, ["loss_weights", "number of losses"],
                     lambda: model(loss=["mse", "mse"], loss_weights=[1.0])),
    "loss_weights nan": (ValueError, ["loss_weights", "nan"], lambda: model(loss_weights=[float("nan")])),
    "loss_weights type": (TypeError, ["loss_weights", "str"], lambda: model(loss_weights="1")),
    "metrics as loss_weights": (TypeError, ["loss_weights", "str", "metrics="],
                                lambda: model(loss_weights=["accuracy"])),
    "no loss": (ValueError, ["loss"], lambda: fit(compiled=model(loss=None))),
    "no y": (ValueError, ["y"], lambda: fit(y=None)),
    "metric name": (ValueError, ["acuracy", "accuracy"], lambda: model(metrics=["acuracy"])),
    "metric name of an output": (ValueError, ["f1", "'f1_score'"], lambda: model(metrics={"label": ["mse", "f1"]})),
    "metric name with weights": (ValueError, ["roc_auc", "'auc'"], lambda: model(weighted_metrics=[["roc_auc"], None])),
    "number as a metric": (TypeError, ["metrics", "int"], lambda: model(metrics=[3])),
    "loss name of another library": (ValueError, ["cross_entropy", "'sparse_categorical_crossentropy'"],
                                     lambda: model(loss="cross_entropy")),
    "lr": (TypeError, ["SGD", "'lr'", "Did you mean 'learning_rate'"], lambda: trainer.optimizers.SGD(lr=0.1)),
    "decay": (TypeError, ["AdamW", "'decay'", "'weight_decay'"], lambda: trainer.optimizers.AdamW(decay=0.1)),
    "a metric that is no sum": (ValueError, ["largest", "additive", "merge_variables"],
                                lambda: fit(y=np.ones((10, 3)), compiled=model(loss="mse", metrics=[Largest()]))),
    "metrics type": (TypeError, ["metrics", "str"], lambda: model(metrics="accuracy")),
    "metric output": (KeyError, ["metrics", "head", "can't be found in the model's output"],
                      lambda: fit(compiled=model(metrics={"head": ["accuracy"], "tail": ["accuracy"]}))),
    "batch_norm": (ValueError, ["batch_norm", "globl", "global"], lambda: model(batch_norm="globl")),
    "steps_per_execution": (ValueError, ["steps_per_execution", "0"], lambda: model(steps_per_execution=0)),
    "jit_compile": (ValueError, ["jit_compile"], lambda: model(jit_compile="yes")),
    "empty": (ValueError, ["empty"], lambda: fit(X[:0], Y[:0])),
    "sample_weight": (ValueError, ["sample_weight", "9"], lambda: fit(sample_weight=np.ones(9))),
    "strings": (ValueError, ["x"], lambda: fit(x=np.array(["a"] * 10))),
    "endless": (ValueError, ["steps_per_epoch"],
                lambda: fit(trainer.data.Dataset.from_arrays((X, Y)).batch(5).repeat(), None)),
    "unbatched": (ValueError, ["batch"], lambda: fit(trainer.data.Dataset.from_arrays((X, Y)), None)),
    "labels": (ValueError, ["label", "7", "3"], lambda: fit(y=Y + 7)),
    "labels of the second output": (ValueError, ["label", "7", "1 outputs per row"], lambda: fit_two_outputs(
        [X[:, :1], Y + 7], loss=["mse", logits_loss()])),
    "negative labels": (ValueError, ["label", "-1", "3"], lambda: fit(y=Y - 1)),
    "one-hot labels": (ValueError, ["CategoricalCrossentropy"], lambda: fit(y=np.eye(3)[Y])),
    "validation labels": (ValueError, ["label", "3"], lambda: fit(validation_data=(X, Y + 3))),
    "logits": (ValueError, ["from_logits"], lambda: fit(X - 5, compiled=model(loss="sparse_categorical_crossentropy"))),
    "monitor": (ValueError, ["val_los", "val_loss"],
                lambda: fit(validation_data=(X, Y), callbacks=[trainer.callbacks.EarlyStopping(monitor="val_los")])),
    "callbacks": (TypeError, ["callbacks", "str"], lambda: fit(callbacks=["early"])),
    "features": (ValueError, ["shape", "(5,)", "(4,)"],
                 lambda: (m := model(), fit(compiled=m), m.predict(np.zeros((2, 5)), verbose=0))),
    "features of evaluate": (ValueError, ["shape", "(5,)", "(4,)"],
                             lambda: (m := model(), fit(compiled=m), m.evaluate(np.zeros((2, 5)), Y[:2], verbose=0))),
    "outputs without rows": (
        ValueError, ["outputs", "10 rows", "(1, 3)"],
        lambda: fit(compiled=model([nn.Dense(3), lambda x: x.mean(0, keepdims=True)], loss=squares))),
    "outputs without rows, to evaluate": (
        ValueError, ["outputs", "10 rows", "(1, 3)"],
        lambda: model([nn.Dense(3), lambda x: x.mean(0, keepdims=True)], loss=squares).evaluate(X, Y, verbose=0)),
    "outputs that flatten rows": (ValueError, ["outputs", "10 rows", "(20, 2)"],
                                  lambda: trainer.Model(lambda x: x.reshape(-1, 2)).predict(X, verbose=0)),
    "a shape for a sample": (ValueError, ["rows of `x`, and no shape", "np.zeros((1, 28, 28))", "scalar"],
                             lambda: model().build((None, 4))),
    "shapes for a sample": (ValueError, ["(images[:1], texts[:1])", "((int, int), (int, int))"],
                            lambda: model().build(((8, 4), (8, 3)))),
    "no such device": (ValueError, ["devices", "cpu:9"],
                       lambda: trainer.distribute.MirroredStrategy(["cpu:0", "cpu:9"])),
    "no devices": (ValueError, ["devices", "empty"], lambda: trainer.distribute.MirroredStrategy([])),
    "device twice": (ValueError, ["devices", "cpu:0", "twice"],
                     lambda: trainer.distribute.MirroredStrategy(["cpu:0", "cpu:0"])),
    "no such backend": (ValueError, ["devices", "gpu"], lambda: trainer.distribute.MirroredStrategy(["gpu:0"])),
    "a number of devices": (TypeError, ["devices", "list", "int"], lambda: trainer.distribute.MirroredStrategy(2)),
    "device name": (ValueError, ["device", "the first"], lambda: trainer.distribute.OneDeviceStrategy("the first")),
    "device index": (ValueError, ["device", "99"], lambda: trainer.distribute.OneDeviceStrategy(99)),
    "device type": (TypeError, ["device", "float"], lambda: trainer.distribute.OneDeviceStrategy(1.0)),
    "fit under another strategy": (ValueError, ["MirroredStrategy"], fit_in_another_scope),
    "compile under another strategy": (ValueError, ["MirroredStrategy"], compile_in_another_scope),
    "state before build": (RuntimeError, ["build"], lambda: model().state),
    "state of other shapes": (ValueError, ["state.params['kernel']", "(2,)", "(4, 3)"], set_state_of_other_shapes),
    "summary before build": (RuntimeError, ["build"], lambda: model().summary()),
    "step without a state": (TypeError, ["train_step", "(logs, state)"], lambda: fit_custom(lambda logs, state: logs)),
    "logs of a wrong type": (TypeError, ["train_step", "dict"], lambda: fit_custom(lambda logs, state: (3.0, state))),
    "a log that is a vector": (TypeError, ["train_step", "loss", "(3,)"],
                               lambda: fit_custom(lambda logs, state: ({"loss": np.zeros(3)}, state))),
    "a step that changes the state": (
        TypeError, ["train_step", "kernel", "(4, 3)", "absent"],
        lambda: fit_custom(lambda logs, state: (logs, state.replace(params={"bias": state.params["bias"]})))),
    "a loss of the batch, with weights": (
        ValueError, ["'rmse'", "values of shape ()", "one value per row", "sample_weight"],
        lambda: fit(x=SPREAD, compiled=model(loss=rmse), sample_weight=np.ones(10))),
    "a loss of the batch, with weights of classes": (
        ValueError, ["'rmse'", "one value per row", "class_weight"],
        lambda: fit(x=SPREAD, compiled=model(loss=RMSE()), class_weight={0: 2.0})),
    "a weighted metric of the batch": (
        ValueError, ["metric 'rmse'", "one scalar for a batch without weights"],
        lambda: fit(x=SPREAD, compiled=model(weighted_metrics=[rmse]), sample_weight=np.ones(10))),
    "a tuple of batches": (
        ValueError, ["is 4 inputs", "[(x, y), ...]"], lambda: model().fit(((X, Y),) * 4, verbose=0)),
    "inputs in a list for a model of one": (
        ValueError, ["rows of shape [0] (4,)", "is 4 inputs", "[(x,), ...]"], predict_list),
    "predict in a step": (TypeError, ["Predicts.train_step", "self.apply", "y_pred"], predict_in_a_step),
    "a loss that overrides its call": (
        TypeError, ["OverridesCall", "call(self, y_true, y_pred)", "compute_loss"],
        lambda: model(loss=OverridesCall())),
    "logits for a metric": (ValueError, ["metric 'sparse_categorical_crossentropy'", "from_logits"],
                            lambda: fit(x=X - 5, compiled=model(metrics=["sparse_categorical_crossentropy"]))),
    "logits for an area": (
        ValueError, ["metric 'auc'", "from_logits"],
        lambda: fit(x=X - 5, y=np.ones((10, 3)), compiled=model(loss="mse", metrics=[trainer.metrics.AUC()]))),
    "logits for a calibration error": (
        ValueError, ["metric 'expected_calibration_error'", "from_logits"],
        lambda: fit(x=X - 5, compiled=model(metrics=["expected_calibration_error"]))),
    "other names of outputs": (ValueError, ["`y`", "'main'", "output_2"],
                               lambda: fit_two_outputs({"main": Y, "aux": Y})),
    "an output without targets": (ValueError, ["'output_2'", "has a loss", "no targets"],
                                  lambda: fit_two_outputs({"output_1": Y}, first_y=(Y, Y))),
    "an output with a metric and without targets": (
        ValueError, ["'mae'", "'output_2'", "no targets"],
        lambda: fit_two_outputs({"output_1": Y}, first_y=(Y, Y), loss=["mse", None], metrics={"output_2": ["mae"]})),
    "no y in validation": (ValueError, ["needs targets", "`validation_data=(x, y)`"], lambda: fit(validation_data=X)),
    "no y in evaluate": (ValueError, ["needs targets", "`evaluate(x, y)`"], lambda: model().evaluate(X, verbose=0)),
    "a module without return": (ValueError, ["no outputs", "`return`"], lambda: fit(compiled=model(Nothing()))),
    "a step of Keras": (TypeError, ["`train_step(self, state, batch)`", "(logs, state)", "train_step(data)"],
                        lambda: fit(compiled=of_class(OfKeras))),
    "a value in a step": (TypeError, ["run_eagerly=True", "`jax.debug.print(", "JAX says: Abstract tracer"],
                          lambda: fit(compiled=of_class(Printing))),
    "compile in fit": (RuntimeError, ["compile", "running", "ended"],
                       lambda: change_while_it_runs(lambda made: made.compile("sgd", logits_loss()))),
    "trainable in fit": (RuntimeError, ["trainable", "running"],
                         lambda: change_while_it_runs(lambda made: setattr(made, "trainable", False))),
    "without jit": (ValueError, ["disable_jit", "run_eagerly=True"], fit_without_jit),
    "a copy": (TypeError, ["copied", "get_weights", "trainer.load"],
               lambda: (made := model(), copy.deepcopy(made), made.build(X), copy.copy(made))),
    "another build": (ValueError, ["(4,)", "(3,)"], fit_after_a_build_on_other_rows),
    "gradients by name": (ValueError, ["generator", "dict of optimizers"],
                          lambda: fit_custom(lambda logs, state: (logs, state.apply_gradients(generator={})))),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("kinds", "words", "call"), CASES.values(), ids=CASES)
def test_bad_input_is_refused_in_words_that_help(kinds, words, call):
    with pytest.raises(kinds) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("name", ["labels", "logits", "one-hot labels", "metric name", "monitor", "no y"])
def test_bad_data_is_refused_before_the_train_step_compiles(name):
    compiled = []

    def listen(event, seconds, **details):
        if event.endswith("backend_compile_duration") and "train_group" in str(details):
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(CASES[name][0]):
            CASES[name][2]()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


COMPLEX, COMPLEX_Y = SPREAD * 1j, np.zeros((10, 3), np.complex64)


@pytest.mark.parametrize(("call", "words"), {
    "outputs": (lambda: fit(COMPLEX, SPREAD[:, :3], model(loss="mse")), "`y_pred`"),
    "targets": (lambda: fit(X, COMPLEX_Y, model(loss="mae")), "`y_true`"),
    "outputs, a loss of one's own": (
        lambda: fit(COMPLEX, COMPLEX_Y, model(loss=lambda y, p: abs(y - p).mean(-1))), "`y_pred`"),
    "a loss of one's own": (
        lambda: fit(X, COMPLEX_Y, model(loss=lambda y, p: ((y - p)**2).mean(-1))), "The values of the loss"),
    "sample_weight": (
        lambda: fit(X, SPREAD[:, :3], model(loss="mse"), sample_weight=np.ones(10) * 1j), "`sample_weight`"),
    "a metric": (lambda: trainer.metrics.MeanSquaredError().update_state(COMPLEX_Y, COMPLEX_Y.real), "`y_true`"),
    "a mean": (lambda: trainer.metrics.Mean().update_state([1j]), "Values of the variable"),
}.values())
def test_complex_numbers_are_not_cut_to_reals(call, words):
    with pytest.raises(TypeError, match=f"^{words}.* must be real numbers here.*imaginary parts"):
        call()


def test_complex_targets_are_for_a_loss_that_makes_reals_of_them():
    history = fit(X, COMPLEX_Y, model(loss=lambda y, p: abs(y - p).mean(-1))).history
    assert history["loss"] == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 10])
def test_tokens_of_rank_one_are_taken_as_they_are(rows):
    assert np.isfinite(fit(x=Y[:rows], y=Y[:rows], compiled=model([nn.Embed(5, 4), nn.Dense(3)])).history["loss"]).all()


def test_a_step_of_ones_own_may_give_the_module_other_inputs_than_those_of_rank_one():
    class FromLabels(trainer.Model):
        def train_step(self, state, batch):
            labels = trainer.unpack_x_y_sample_weight(batch)[0]
            return {"size": self.apply(state.params, state, jax.nn.one_hot(labels, 4))[0].mean()}, (
                state.replace(step=state.step + 1))

    made = FromLabels(nn.Conv(3, (2,)))
    made.compile("sgd")
    made.build(X)
    assert np.isfinite(fit(Y, None, compiled=made).history["size"]).all()


@pytest.mark.slow
def test_a_pipeline_that_raises_names_the_batch_and_keeps_the_cause():
    def breaks():
        yield X, Y
        yield X, Y
        raise OSError("disk gone")

    with pytest.raises(RuntimeError, match=r"(?s)batch 2.*disk gone") as caught:
        fit(breaks(), None, steps_per_epoch=5)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_batch_that_changes_shape_is_named():
    def changes():
        yield X, Y
        yield X[:, :3], Y

    with pytest.raises(ValueError, match=r"batch 1") as caught:
        fit(changes(), None, steps_per_epoch=2)
    assert "(10, 3)" in str(caught.value) and "(10, 4)" in str(caught.value)


@pytest.mark.slow
def test_weights_survive_a_fit_that_fails():
    made = model(LinenMLP(), optimizer=optax.sgd(0.1))
    fit(compiled=made)

    def breaks():
        yield X, Y
        raise OSError("disk gone")

    with pytest.raises(RuntimeError):
        made.fit(breaks(), steps_per_epoch=3, verbose=0)
    assert all(np.isfinite(weight).all() for weight in made.get_weights())
    fit(compiled=made)


def test_jaxs_own_watch_for_nan_names_the_batches_and_leaves_the_weights():
    made = model()
    fit(compiled=made)
    before = made.get_weights()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="train step from batch 0 on"):
        fit(X * np.nan, compiled=made)
    for mine, other in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
@pytest.mark.parametrize(("validation_data", "name"), [
    ((X,), "validation_data"), ({"clean": (X, Y), "noisy": [(X,)]}, "validation_data['noisy']")])
def test_an_error_of_validation_data_says_so(validation_data, name):
    with pytest.raises(ValueError, match="The loss needs targets") as raised:
        fit(validation_data=validation_data)
    assert f"about `{name}`, and not about the data to train on" in raised.value.__notes__[-1]
