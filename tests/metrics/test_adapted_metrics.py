"""Metrics of clu, metrax and `nnx.metrics`: their own numbers, on any number of replicas, by their own rule of merging.

Stand-ins have clu's protocol, so that these tests run where it is not installed.
"""

import copy
import pickle

import cloudpickle
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, struct

import trainer
from trainer import distribute, metrics
from trainer.metrics.adapted import adapted, is_of_another_library, parts

ROWS, CLASSES = 37, 3  # the last batch has rows for some replicas only, and is padded
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 4)).astype("float32")
y = rng.integers(0, CLASSES, ROWS).astype("int32")


@struct.dataclass
class Hits:
    """clu's protocol: the share of hits, as an int and a float."""

    hits: jnp.ndarray
    rows: jnp.ndarray

    @classmethod
    def from_model_output(cls, *, logits, labels, **_):
        assert logits.ndim == labels.ndim + 1
        return cls(jnp.sum(logits.argmax(-1) == labels), jnp.float32(labels.size))

    @classmethod
    def empty(cls):
        return cls(jnp.int32(0), jnp.float32(0))

    def merge(self, other):
        return type(self)(self.hits + other.hits, self.rows + other.rows)

    def compute(self):
        return self.hits / self.rows


@struct.dataclass
class HitsOfLastBatch(Hits):
    def merge(self, other):
        return other

    def _reduce_merge(self, other):
        return super().merge(other)


@struct.dataclass
class Highest:
    """metrax's protocol, of predictions and weights: a maximum, which does not begin with 0."""

    value: jnp.ndarray

    @classmethod
    def from_model_output(cls, predictions, labels, sample_weights=None):
        return cls(jnp.max(predictions if sample_weights is None else predictions * sample_weights))

    @classmethod
    def empty(cls):
        return cls(jnp.float32(-jnp.inf))

    def merge(self, other):
        return type(self)(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value


@struct.dataclass
class AllRows(Highest):
    @classmethod
    def from_model_output(cls, predictions, labels):
        return cls(predictions)


@struct.dataclass
class Loss(Highest):
    @classmethod
    def from_model_output(cls, loss):
        return cls(loss)


@struct.dataclass
class LossByName(Highest):
    """As clu's `from_output("loss")`, whose signature does not tell what it reads."""

    @classmethod
    def from_model_output(cls, **outputs):
        return cls(outputs["loss"])


class Several:
    """clu's protocol of a collection."""

    __annotations__ = {"share": Hits, "last_share": HitsOfLastBatch}

    @classmethod
    def single_from_model_output(cls, **outputs):
        made = cls()
        made.share, made.last_share = (each.from_model_output(**outputs) for each in cls.__annotations__.values())
        return made

    @classmethod
    def empty(cls):
        raise AssertionError("not needed")

    merge = compute = empty


def strategy_of(replicas, devices):
    return distribute.OneDeviceStrategy() if replicas == 1 else distribute.MirroredStrategy(devices[:replicas])


def evaluated(strategy, given, x=x, y=y, outputs=CLASSES, loss="sparse_categorical_crossentropy", **options):
    with strategy.scope():
        model = trainer.Model(nn.Sequential([nn.Dense(outputs), nn.softmax if outputs > 1 else nn.sigmoid]), seed=0)
        model.compile("sgd", loss, metrics=given, **options)
    logs = model.evaluate(x, y, batch_size=16, verbose=0)
    return logs, model.predict(x, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_results_are_those_of_all_rows_by_the_metrics_own_rule(devices, replicas):
    logs, predictions = evaluated(strategy_of(replicas, devices), [
        Hits, Hits.empty(), HitsOfLastBatch, Several, nnx.metrics.Accuracy(), "accuracy",
        nnx.MultiMetric(hits=nnx.metrics.Accuracy(), spread=nnx.metrics.Welford("logits"))])
    hits = predictions.argmax(-1) == y
    expected = {"hits": hits.mean(), "hits_1": hits.mean(), "hits_of_last_batch": hits[32:].mean(),
                "share": hits.mean(), "last_share": hits[32:].mean(), "accuracy": hits.mean(),
                "accuracy_1": hits.mean(), "hits_2": hits.mean(), "spread_mean": predictions.mean(),
                "spread_standard_deviation": predictions.std(),
                "spread_standard_error_of_mean": predictions.std() / np.sqrt(predictions.size)}
    assert list(logs)[1:8] == list(expected)[:7] and logs.keys() == {"loss", *expected}
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_a_column_of_predictions_is_one_number_per_row_and_weights_reach_who_takes_them(devices, replicas):
    weights = rng.uniform(0, 2, ROWS).astype("float32")
    with strategy_of(replicas, devices).scope():
        model = trainer.Model(nn.Dense(1), seed=0)
        model.compile("sgd", "mse", metrics=[Highest], weighted_metrics=[Highest])
    logs = model.evaluate(x, y, sample_weight=weights, batch_size=16, verbose=0)
    predictions = model.predict(x, verbose=0)[:, 0]
    np.testing.assert_allclose(logs["highest"], predictions.max(), rtol=1e-6)
    np.testing.assert_allclose(logs["weighted_highest"], (predictions * weights).max(), rtol=1e-6)


@pytest.mark.slow
def test_microbatches_are_parts_of_a_batch():
    def fitted(microbatches):
        model = trainer.Model(nn.Dense(CLASSES), seed=0)
        model.compile(trainer.optimizers.SGD(0.0), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=[Hits, HitsOfLastBatch, nnx.metrics.Accuracy()], microbatches=microbatches)
        return model.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0).history

    one, two = fitted(1), fitted(2)
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_step_may_return_them_as_logs(devices, replicas):
    class Own(trainer.Model):
        def test_step(self, state, batch):
            inputs, labels = batch[:2]
            logits = self.apply(state.params, state, inputs, training=False)[0]
            return {"hits": Hits.from_model_output(logits=logits, labels=labels),
                    "several": Several.single_from_model_output(logits=logits, labels=labels)}

    with strategy_of(replicas, devices).scope():
        model = Own(nn.Dense(CLASSES), seed=0)
        model.compile("sgd", "mse")
    logs = model.evaluate(x[:32], y[:32], batch_size=16, verbose=0)
    hits = model.predict(x[:32], verbose=0).argmax(-1) == y[:32]
    expected = {"hits": hits.mean(), "share": hits.mean(), "last_share": hits[16:].mean()}
    assert logs.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_they_can_be_updated_by_hand_and_leave_the_objects_that_were_given_alone():
    given = nnx.metrics.Accuracy()
    metric = metrics.get(given)
    for labels in ([0, 1], [1, 1]):
        metric.update_state(np.array(labels), np.array([[2.0, 1.0], [1.0, 2.0]], "float32"))
    assert float(metric.result()) == 0.75 and metric.direction == "max"
    assert int(given.count[...]) == 0
    metric.reset_state()
    assert np.isnan(metric.result())
    last = adapted(HitsOfLastBatch)
    for labels in ([0, 1], [1, 1]):
        last.update_state(np.array(labels), np.array([[2.0, 1.0], [1.0, 2.0]], "float32"))
    assert float(last.result()) == 0.5


def test_an_object_before_its_first_update_changes_no_other():
    labels, predictions = np.zeros(2), np.array([-3.0, -1.0], "float32")
    metric = adapted(Highest)
    metric.build(labels, predictions)
    empty = metric.stateless_reset_state()
    updated = metric.stateless_update_state(empty, labels, predictions)
    for pair in ((updated, empty), (empty, updated), (updated, updated)):
        assert float(metric.stateless_result(metric.merge_variables(*pair))) == -1.0
    assert not metric.merge_variables(empty, empty)[-1]


def test_they_can_be_sent_to_other_processes_and_copied():
    labels, logits = np.array([0, 1]), np.array([[2.0, 1.0], [2.0, 1.0]], "float32")
    for given in (Hits, nnx.metrics.Accuracy()):
        metric = adapted(given)
        metric.build(labels, logits)
        for again in (pickle.loads(cloudpickle.dumps(metric)), copy.deepcopy(metric)):
            again.update_state(labels, logits)
            assert float(again.result()) == 0.5


def test_what_has_their_methods_is_recognized():
    for each in (Hits, Hits.empty(), Several, nnx.metrics.Average(), nnx.MultiMetric()):
        assert is_of_another_library(each)
    for each in (metrics.Mean, metrics.Mean(), len, dict, {}, "acc", 3, None):
        assert not is_of_another_library(each)
    assert [metric.name for metric in parts(nnx.MultiMetric(outer=nnx.MultiMetric(inner=nnx.metrics.Accuracy())))] == [
        "inner"]


class Latest(nnx.metrics.Metric):
    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.zeros(()))

    def reset(self):
        self.value[...] = jnp.zeros(())

    def update(self, *, predictions, **_):
        self.value[...] = predictions.mean()

    def compute(self):
        return self.value[...]


class Product(Latest):
    def reset(self):
        self.value[...] = jnp.ones(())


@pytest.mark.parametrize(("given", "error", "message"), [
    (AllRows, ValueError, "'all_rows' keeps all rows, which a compiled step cannot.*model.predict"),
    (Loss, ValueError, "'loss' is computed from 'loss'. Received: labels and predictions"),
    (nnx.metrics.Average("loss"), ValueError, "'average' is computed from 'loss'.*the loss is logged in any case"),
    (LossByName, ValueError, "'loss_by_name' is computed from 'loss'.*the loss is logged in any case"),
    (nnx.metrics.Accuracy, TypeError, r"Received: the class Accuracy. Pass an instance: `nnx.metrics.Accuracy\(\)`"),
    (Latest, TypeError, r"Received: the class Latest. Pass an instance: `Latest\(\)`"),
    (Product(), ValueError, "'product' does not begin with zeros.*additive = False"),
    (Latest(), ValueError, "'latest' does not accumulate by adding"),
])
def test_what_cannot_be_computed_is_refused_before_anything_is(given, error, message):
    with pytest.raises(error, match=message):
        evaluated(distribute.OneDeviceStrategy(), [given])


def other_shapes(y_true, y_pred):
    return y_pred @ y_true.reshape(1, -1)[:, :2]


@struct.dataclass
class Fails(Highest):
    @classmethod
    def from_model_output(cls, predictions, labels):
        return cls(predictions @ predictions)


@pytest.mark.parametrize(("given", "name"), [
    (other_shapes, "other_shapes"), (Fails, "fails")])
def test_an_error_of_a_metrics_own_code_names_the_metric(given, name):
    with pytest.raises(TypeError) as caught:
        evaluated(distribute.OneDeviceStrategy(), ["accuracy", given])
    assert any(note.startswith(f"It was raised by the metric {name!r} for (y_true, y_pred) = (array of shape (")
               for note in caught.value.__notes__)


def test_weights_are_refused_by_a_metric_that_takes_none():
    model = trainer.Model(nn.Dense(CLASSES), seed=0)
    model.compile("sgd", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=[Hits])
    with pytest.raises(ValueError, match=r"'hits' takes no sample weights. Give it as one of `metrics`"):
        model.evaluate(x, y, sample_weight=np.ones(ROWS), verbose=0)


def test_several_metrics_in_one_are_for_compile_alone():
    with pytest.raises(ValueError, match=r"Several metrics in one have several results.*compile\(metrics="):
        metrics.get(Several)


def test_a_metric_that_labels_do_not_fit_says_so_in_its_own_words():
    with pytest.raises(AssertionError):
        adapted(Hits).update_state(np.zeros((4, 3), "float32"), np.zeros((4, 3), "float32"))


# The libraries themselves


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_metrics_of_clu_are_clus_of_all_rows(devices, replicas):
    clu = pytest.importorskip("clu.metrics")

    def right(logits, labels, **_):
        return (logits.argmax(-1) == labels).astype(jnp.float32)

    several = clu.Collection.create(share=clu.Accuracy, last=clu.LastValue.from_fun(right))
    logs, predictions = evaluated(strategy_of(replicas, devices), [clu.Accuracy, several])
    hits = predictions.argmax(-1) == y
    expected = {"accuracy": hits.mean(), "share": hits.mean(), "last": hits[32:].mean()}
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-6, err_msg=name)
    assert logs.keys() == {"loss", *expected}
    logs, _ = evaluated(strategy_of(replicas, devices), [
        clu.Average.from_fun(right), clu.Average.from_fun(lambda logits, **_: logits[:, 0])])
    assert list(logs) == ["loss", "right", "from_fun"]
    with pytest.raises(ValueError, match="keeps all rows"):
        evaluated(distribute.OneDeviceStrategy(), [clu.CollectingMetric.from_outputs(("logits",))])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_metrics_of_metrax_are_metraxs_of_all_rows(devices, replicas):
    metrax = pytest.importorskip("metrax")
    wrapped = pytest.importorskip("metrax.nnx")
    names = ["AUCROC", "AUCPR", "Precision", "Recall", "MSE", "MAE", "RMSE", "RSQUARED"]
    labels = (y > 0).astype("int32")
    logs, predictions = evaluated(
        strategy_of(replicas, devices), [*(getattr(metrax, name) for name in names), wrapped.Precision()], y=labels,
        outputs=1, loss="binary_crossentropy")
    for name in names:
        whole = getattr(metrax, name).from_model_output(
            predictions=jnp.asarray(predictions[:, 0]), labels=jnp.asarray(labels)).compute()
        np.testing.assert_allclose(logs[name.lower()], whole, rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(logs["precision_1"], logs["precision"])
