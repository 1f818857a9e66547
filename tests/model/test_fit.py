"""fit, evaluate and predict: Keras's arguments and what they mean."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer import callbacks as cb


def compiled(module=None, replicas=2, optimizer="sgd", loss=None, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(module or LinenMLP(), seed=1)
        model.compile(optimizer, loss or logits_loss(), **options)
    return model


class Recorder(cb.Callback):
    """Writes down which hook was called with which number."""

    def __init__(self):
        self.calls = []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("epoch", epoch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("train", batch, logs["loss"]))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("test", batch))


@pytest.mark.slow
def test_history_has_python_floats_for_each_epoch_and_validation_only_where_it_ran():
    x, y, _ = classification(20)
    model = compiled(metrics=["accuracy"])
    history = model.fit(x, y, epochs=4, validation_data=(x, y), validation_freq=2, verbose=0)
    assert history is model.history and history.epoch == [0, 1, 2, 3]
    assert {name: len(values) for name, values in history.history.items()} == {
        "loss": 4, "accuracy": 4, "val_loss": 2, "val_accuracy": 2}
    assert all(type(value) is float for values in history.history.values() for value in values)
    np.testing.assert_allclose(
        history.history["val_loss"][-1], model.evaluate(x, y, verbose=0)["loss"], rtol=1e-5)


@pytest.mark.slow
def test_validation_freq_may_be_a_numpy_integer():
    x, y, _ = classification(8)
    history = compiled().fit(x, y, epochs=3, validation_data=(x, y), validation_freq=np.int64(2), verbose=0)
    assert len(history.history["val_loss"]) == 1


@pytest.mark.slow
def test_validation_freq_may_list_epochs():
    x, y, _ = classification(8)
    history = compiled().fit(x, y, epochs=4, validation_data=(x, y), validation_freq=[1, 4], verbose=0).history
    assert len(history["val_loss"]) == 2


@pytest.mark.slow
def test_a_callback_sees_every_batch_with_its_number_and_its_own_logs_though_steps_are_fused():
    x, y, _ = classification(40)
    recorder = Recorder()
    compiled(steps_per_execution=4).fit(
        x, y, batch_size=8, epochs=2, validation_data=(x[:16], y[:16]), callbacks=recorder, verbose=0)
    names = [call[:2] for call in recorder.calls]
    epoch = [*(("train", n) for n in range(5)), ("test", 0), ("test", 1)]
    assert names == [("epoch", 0), *epoch, ("epoch", 1), *epoch]
    losses = [call[2] for call in recorder.calls if call[0] == "train"]
    assert len(set(losses)) == 10


@pytest.mark.slow
def test_stop_training_at_the_beginning_of_an_epoch_ends_fit_after_its_first_batch():
    class Stopper(trainer.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    x, y, _ = classification(40)
    model = compiled()
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Stopper()])
    assert int(model.state.step) == 5 + 1


@pytest.mark.slow
def test_stop_training_ends_fit_after_the_batch():
    class Stops(cb.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    x, y, _ = classification(40)
    model = compiled()
    history = model.fit(x, y, batch_size=8, epochs=3, callbacks=[Stops()], verbose=0)
    assert history.epoch == [0] and int(model.state.step) == 2


@pytest.mark.slow
def test_initial_epoch_and_steps_per_epoch_count_as_in_keras():
    x, y, _ = classification(48)
    model = compiled()
    history = model.fit(x, y, batch_size=8, initial_epoch=2, epochs=5, steps_per_epoch=3, verbose=0)
    assert history.epoch == [2, 3, 4] and int(model.state.step) == 9
    assert history.params["steps"] == 3 and history.params["epochs"] == 5


@pytest.mark.slow
def test_validation_split_takes_the_last_rows():
    x, y, _ = classification(20)
    model = compiled()
    split = model.fit(x, y, validation_split=0.25, shuffle=False, verbose=0).history
    other = compiled().fit(x[:15], y[:15], validation_data=(x[15:], y[15:]), shuffle=False, verbose=0).history
    assert split == other


@pytest.mark.slow
def test_class_weight_is_the_sample_weight_of_each_label():
    x, y, _ = classification(20)
    by_class = compiled().fit(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, verbose=0).history
    weights = np.array([1.0, 2.0, 0.5], np.float32)[y]
    by_row = compiled().fit(x, y, sample_weight=weights, verbose=0).history
    np.testing.assert_allclose(by_class["loss"], by_row["loss"], rtol=1e-6)


@pytest.mark.slow
def test_shuffle_is_a_function_of_the_seed_and_the_epoch():
    x, y, _ = classification(40)

    def losses(replicas, **options):
        return compiled(replicas=replicas).fit(x, y, batch_size=8, epochs=2, verbose=0, **options).history["loss"]

    np.testing.assert_allclose(losses(1), losses(8), rtol=1e-5)
    assert losses(1) == losses(1)
    assert losses(1) != losses(1, shuffle=False)


def as_generator(x, y):
    yield from zip(np.split(x, 4), np.split(y, 4), strict=True)


class TorchLike:
    """What a torch DataLoader looks like from outside."""

    def __init__(self, x, y):
        self.batches = list(as_generator(x, y))

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter([list(batch) for batch in self.batches])


def grain_dataset(x, y):
    import grain

    return grain.MapDataset.source(list(zip(x, y, strict=True))).batch(10)


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    as_generator,
    TorchLike,
    grain_dataset,
    lambda x, y: grain_dataset(x, y).to_iter_dataset(),
    lambda x, y: trainer.data.Dataset.from_arrays((x, y)).batch(10),
    lambda x, y: trainer.data.Dataset.from_arrays((x, y)).map(lambda a, b: (a, b)).batch(10),
    lambda x, y: trainer.data.Dataset.from_arrays((jax.numpy.asarray(x), y)).batch(10),
], ids=["generator", "torch", "grain", "grain-iter", "dataset", "mapped", "jax"])
def test_every_kind_of_data_gives_the_numbers_of_arrays(make):
    x, y, _ = classification(40)
    arrays = compiled().fit(x, y, batch_size=10, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(compiled().fit(make(x, y), verbose=0).history["loss"], arrays, rtol=1e-6)


@pytest.mark.slow
def test_an_endless_generator_needs_and_obeys_steps_per_epoch():
    x, y, _ = classification(8)
    model = compiled()
    history = model.fit(((x, y) for _ in itertools.count()), epochs=3, steps_per_epoch=4, verbose=0)
    assert len(history.epoch) == 3 and int(model.state.step) == 12


@pytest.mark.slow
def test_a_generator_that_ends_early_warns_and_ends_training():
    x, y, _ = classification(40)
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        history = compiled().fit(as_generator(x, y), epochs=3, steps_per_epoch=3, verbose=0)
    assert history.epoch == [0, 1]


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, left, right):
        shared = nn.Dense(4)(left) + nn.Dense(4)(right)
        return {"label": nn.Dense(3)(shared), "size": nn.Dense(1)(shared)}


@pytest.mark.slow
def test_several_inputs_and_outputs_have_a_loss_a_weight_and_metrics_each():
    x, y, w = classification(20)
    targets = {"label": y, "size": x.sum(-1, keepdims=True)}
    model = compiled(
        TwoInputs(), loss={"label": logits_loss(), "size": "mse"}, loss_weights={"label": 1.0, "size": 0.25},
        metrics={"label": ["accuracy"], "size": ["mae"]}, weighted_metrics={"size": ["mae"]})
    inputs = {"left": x, "right": x[:, :2]}
    model.fit(inputs, targets, sample_weight=w, batch_size=8, verbose=0)
    logs = model.evaluate(inputs, targets, sample_weight=w, batch_size=8, verbose=0)
    assert list(logs) == ["loss", "label_loss", "size_loss", "label_accuracy", "size_mae", "size_weighted_mae"]
    np.testing.assert_allclose(logs["loss"], logs["label_loss"] + 0.25 * logs["size_loss"], rtol=1e-5)
    predictions = model.predict(inputs, verbose=0)
    assert predictions["label"].shape == (20, 3) and predictions["size"].shape == (20, 1)
    error = np.abs(predictions["size"] - targets["size"])[:, 0]
    np.testing.assert_allclose(logs["size_mae"], error.mean(), rtol=1e-5)
    np.testing.assert_allclose(logs["size_weighted_mae"], (error * w).sum() / w.sum(), rtol=1e-5)


@pytest.mark.slow
def test_metrics_with_one_name_get_numbers():
    x, y, _ = classification(8)
    model = compiled(metrics=["accuracy", "accuracy"], weighted_metrics=["accuracy"])
    assert list(model.fit(x, y, verbose=0).history) == ["loss", "accuracy", "accuracy_1", "weighted_accuracy"]


@pytest.mark.slow
def test_a_metric_called_loss_leaves_the_loss_alone():
    def loss(y_true, y_pred):
        return abs(y_true - y_pred).mean(axis=-1)

    x, _, _ = classification(8)
    logs = compiled(loss="mse", metrics=[loss]).evaluate(x, x[:, :3], verbose=0)
    assert list(logs) == ["loss", "loss_1"] and logs["loss"] != logs["loss_1"]


@pytest.mark.slow
def test_metrics_are_exact_over_the_epoch_with_an_uneven_last_batch():
    x, y, w = classification(19)
    model = compiled(replicas=3, metrics=["accuracy"],
                     weighted_metrics=["accuracy"])
    logs = model.evaluate(x, y, sample_weight=w, batch_size=8, verbose=0)
    hits = model.predict(x, verbose=0).argmax(-1) == y
    np.testing.assert_allclose(logs["accuracy"], hits.mean(), rtol=1e-6)
    np.testing.assert_allclose(logs["weighted_accuracy"], (hits * w).sum() / w.sum(), rtol=1e-6)


@pytest.mark.slow
def test_predict_keeps_the_order_and_streams_batches():
    x, _, _ = classification(45)
    model = compiled(replicas=4)
    model.build(x)
    whole = model.predict(x, batch_size=8, verbose=0)
    assert isinstance(whole, np.ndarray)
    np.testing.assert_allclose(whole, model(x), rtol=1e-5, atol=1e-6)
    parts = list(model.predict_iter(x, batch_size=8))
    assert [len(part) for part in parts] == [8, 8, 8, 8, 8, 5]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(model.predict(x, batch_size=8, steps=2, verbose=0), whole[:16])


@pytest.mark.slow
def test_evaluate_returns_a_dict_or_keras_list():
    x, y, _ = classification(8)
    model = compiled(metrics=["accuracy"])
    logs = model.evaluate(x, y, verbose=0)
    assert model.evaluate(x, y, verbose=0, return_dict=False) == [logs["loss"], logs["accuracy"]]
    assert isinstance(compiled().evaluate(x, y, verbose=0, return_dict=False), float)


def test_a_dict_of_evaluate_cannot_be_unpacked_by_mistake():
    x, y, _ = classification(8)
    model = compiled(metrics=["accuracy"])
    with pytest.raises(TypeError, match=r"Keras's list: `evaluate\(\.\.\., return_dict=False\)`"):
        loss, accuracy = model.evaluate(x, y, verbose=0)
    with pytest.raises(TypeError, match="returns a dict"):
        loss, *_ = model.evaluate(x, y, verbose=0)
    logs, _ = (lambda: (model.evaluate(x, y, verbose=0), None))()  # the caller unpacks another result
    assert [*logs] == sorted(model.evaluate(x, y, verbose=0), reverse=True) == ["loss", "accuracy"]
    loss, accuracy = model.evaluate(x, y, verbose=0, return_dict=False)
    assert [loss, accuracy] == [*logs.values()]


@pytest.mark.slow
def test_train_on_batch_equals_fit_and_gives_the_logs_of_its_batch():
    x, y, _ = classification(8)
    by_fit, by_batch = compiled(metrics=["accuracy"]), compiled(metrics=["accuracy"])
    history = by_fit.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    first = by_batch.train_on_batch(x, y, return_dict=True)
    second = by_batch.train_on_batch(x, y, return_dict=True)
    np.testing.assert_allclose([first["loss"], second["loss"]], history["loss"], rtol=1e-6)
    assert isinstance(by_batch.test_on_batch(x, y), list)
    np.testing.assert_allclose(
        by_batch.test_on_batch(x, y, return_dict=True)["loss"], by_batch.evaluate(x, y, verbose=0)["loss"], rtol=1e-6)
    np.testing.assert_allclose(by_batch.predict_on_batch(x), by_fit.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lists_of_numbers_are_arrays():
    x, y, _ = classification(8)
    model, same = compiled(), compiled()
    np.testing.assert_allclose(model.train_on_batch(x.tolist(), y.tolist()), same.train_on_batch(x, y), rtol=1e-6)
    np.testing.assert_array_equal(model(x.tolist()), model(x))
    built = compiled()
    built.build(x.tolist())
    assert built.count_params() == model.count_params()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [
    "sgd", optax.sgd(0.01), optax.chain(optax.clip(1.0), optax.sgd(0.01)), optax.sgd(optax.constant_schedule(0.01)),
], ids=["name", "optax", "chain", "schedule"])
def test_the_learning_rate_can_be_set_between_batches(optimizer):
    class Halves(cb.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2

    x, y, _ = classification(32)
    model = compiled(optimizer=optimizer)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    model.fit(x, y, batch_size=8, callbacks=[Halves()], verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01 / 16)
    before = model.get_weights()
    model.optimizer.learning_rate = 0.0
    model.fit(x, y, batch_size=8, verbose=0)
    for ours, theirs in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_state_that_was_read_stays_valid_while_training_goes_on():
    x, y, _ = classification(16)
    model = compiled()
    model.build(x)
    before = model.state
    kernel = np.array(before.params["Dense_0"]["kernel"])
    model.fit(x, y, verbose=0)
    np.testing.assert_array_equal(before.params["Dense_0"]["kernel"], kernel)
    assert not np.array_equal(model.state.params["Dense_0"]["kernel"], kernel)
    model.state = before
    np.testing.assert_array_equal(model.get_weights()[1], kernel)
    arrays = jax.tree.map(np.array, before.params)
    model.state = before.replace(params=arrays)
    arrays["Dense_0"]["kernel"][:] = 0
    np.testing.assert_array_equal(model.get_weights()[1], kernel)


@pytest.mark.slow
def test_weights_can_be_read_and_set():
    x, y, _ = classification(16)
    one, other = compiled(LinenMLP(batch_norm=True)), compiled(LinenMLP(batch_norm=True), replicas=4)
    one.fit(x, y, verbose=0)
    other.build(x)
    other.set_weights(one.get_weights())
    np.testing.assert_allclose(one.predict(x, verbose=0), other.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert one.count_params() == sum(weight.size for weight in one.get_weights())
    with pytest.raises(ValueError, match=r"weights\[0\].*\(1,\)"):
        one.set_weights([np.zeros(1), *one.get_weights()[1:]])
    with pytest.raises(ValueError, match="arrays"):
        one.set_weights([])


@pytest.mark.slow
def test_an_nnx_module_of_the_user_has_the_trained_weights_after_fit():
    x, y, _ = classification(16)
    module = NNXMLP(batch_norm=True)
    before = np.array(module.first.kernel[...])
    model = compiled(module)
    model.fit(x, y, epochs=2, verbose=0)
    assert not np.array_equal(before, module.first.kernel[...])
    module.eval()
    np.testing.assert_allclose(module(x), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    model.fit(x, y, verbose=0)
    assert np.isfinite(np.asarray(module.first.kernel[...])).all(), "training on must not take the user's arrays"


@pytest.mark.slow
def test_a_model_without_weights_and_one_that_is_frozen_can_fit():
    x, _, _ = classification(8)
    with mirrored(2).scope():
        model = trainer.Sequential([lambda x: 2 * x])
        model.compile("sgd", "mse")
    np.testing.assert_allclose(model.fit(x, x, verbose=0).history["loss"], [(x**2).mean()], rtol=1e-5)
    frozen = compiled()
    frozen.build(x)
    frozen.trainable = False
    before = frozen.get_weights()
    frozen.fit(*classification(8)[:2], verbose=0)
    for ours, theirs in zip(before, frozen.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_counts_beyond_the_integers_of_float32_stay_exact():
    from trainer.engine.step.running_logs import MetricValue, add_step, empty_running_logs, results

    metric = trainer.metrics.Mean()
    step = {"count": MetricValue([np.float32(1.0), np.float32(1.0)], metric), "loss": np.float32(3.0)}
    running = empty_running_logs(step)
    big = dict.fromkeys(running.sums, jax.numpy.asarray(running.sums["float32"]).at[0].set(2.0**25))
    running = dataclasses.replace(running, sums=big)
    for _ in range(5):
        running = add_step(running, step, 1)
    totals, lost = np.float64(running.sums["float32"])
    np.testing.assert_array_equal(totals + lost, [2**25, *[2**25 + 5] * 2, 2**25 + 15, 2**25 + 5])
    assert results(running) == {"count": 1.0, "loss": pytest.approx(1.0)}


def test_a_metric_may_start_from_numbers_of_python():
    class Largest(trainer.metrics.Metric):
        additive = False

        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_variable(name="largest")

        def stateless_reset_state(self):
            return [-1.0]

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.largest.assign(jax.numpy.maximum(self.largest, y_pred.max()))

        def merge_variables(self, first, second):
            return [jax.numpy.maximum(first[0], second[0])]

        def result(self):
            return self.largest

    x, y, _ = classification(24)
    model = compiled(metrics=[Largest()])
    assert model.evaluate(x, y, return_dict=True, verbose=0)["largest"] == pytest.approx(
        max(model.predict(x, verbose=0).max(), -1.0))


@pytest.mark.slow
def test_linen_collections_other_than_batch_norms_are_kept():
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x, training=False):
            seen = self.variable("stats", "batches", lambda: np.zeros((), np.float32))
            if training:
                seen.value = seen.value + 1.0
            return nn.Dense(3)(x)

    x, y, _ = classification(24)
    model = compiled(Counts(), replicas=3)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert float(model.state.model_state["stats"]["batches"]) == 6.0


@pytest.mark.slow
def test_nnx_and_linen_take_training_flags_of_any_name():
    class Flagged(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

        def __call__(self, x, deterministic=True):
            return self.linear(x) * (1.0 if deterministic else 0.0)

    x, y, _ = classification(8)
    model = compiled(Flagged())
    np.testing.assert_allclose(model.fit(x, y, verbose=0).history["loss"], [np.log(3)], rtol=1e-5)
    assert model.evaluate(x, y, verbose=0)["loss"] != pytest.approx(np.log(3), rel=1e-5)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("labels", "loss"), [
    ("sparse", trainer.losses.SparseCategoricalCrossentropy), ("one-hot", trainer.losses.CategoricalCrossentropy),
    ("binary", trainer.losses.BinaryCrossentropy)])
def test_a_crossentropy_by_name_takes_the_outputs_as_the_loss_takes_them(labels, loss):
    x, y, _ = classification(20)
    y = {"sparse": y, "one-hot": np.eye(3, dtype=np.float32)[y], "binary": (y > 0).astype(np.float32)[:, None]}[labels]
    module = nn.Dense(1 if labels == "binary" else 3)
    logs = compiled(module, 1, loss=loss(from_logits=True), metrics=["crossentropy"]).evaluate(x, y, verbose=0)
    assert logs["crossentropy"] == pytest.approx(logs["loss"], rel=1e-5)


@pytest.mark.slow
def test_optax_losses_of_integer_labels_can_be_given_as_functions():
    def crossentropy(y_true, y_pred):
        return optax.softmax_cross_entropy_with_integer_labels(y_pred, y_true)

    x, y, _ = classification(20)
    by_function = compiled(loss=crossentropy, metrics=[crossentropy]).fit(x, y, batch_size=8, verbose=0).history
    by_name = compiled().fit(x, y, batch_size=8, verbose=0).history
    np.testing.assert_allclose(by_function["loss"], by_name["loss"], rtol=1e-5)
    np.testing.assert_allclose(by_function["crossentropy"], by_name["loss"], rtol=1e-5)
