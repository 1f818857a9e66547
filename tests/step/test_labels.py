"""Labels and outputs that a loss or a metric leaves out, or would take for others."""

import warnings

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import losses, metrics

EYE = np.eye(3, dtype=np.float32)
X = EYE[[0, 1, 2, 0, 2]]
VOID = np.array([0, 1, -100, -100, 0])
IGNORING = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)
SIGNS = 2 * EYE[[0, 1, 2, 0, 2]] - 1
INDEX_METRICS = ("accuracy", "sparse_top_k_categorical_accuracy", "ce")


def own_loss(y_true, y_pred):
    return optax.softmax_cross_entropy_with_integer_labels(y_pred, y_true.clip(0))


def own_metric(y_true, y_pred):
    return (y_true == y_pred.argmax(-1)) * 1.0


def identity(loss, chosen=None, weighted=None, module=None):
    model = trainer.Model(module or nn.Dense(3, use_bias=False, kernel_init=lambda *_: EYE))
    model.compile("sgd", loss, metrics=chosen, weighted_metrics=weighted)
    return model


@pytest.mark.sampled(2)
@pytest.mark.every_case
@pytest.mark.parametrize("devices", [1, 2])
def test_metrics_of_class_indices_leave_out_the_labels_that_the_loss_leaves_out(devices):
    chosen = [*INDEX_METRICS, metrics.SparseTopKCategoricalAccuracy(1, name="top"), metrics.sparse_categorical_accuracy,
              metrics.MeanIoU(3, name="iou", sparse_y_pred=False), own_metric]
    with trainer.distribute.MirroredStrategy(jax.local_devices()[:devices]).scope():
        model = identity(IGNORING, chosen, ["accuracy"])
    kept = np.array([0, 1, 4])
    logs = model.evaluate(X, VOID, 4, sample_weight=np.array([1, 2, 9, 9, 1]), verbose=0)
    assert logs["accuracy"] == logs["top"] == logs["sparse_categorical_accuracy"] == pytest.approx(2 / 3)
    assert logs["weighted_accuracy"] == pytest.approx(3 / 4)
    assert logs["sparse_top_k_categorical_accuracy"] == 1.0
    assert logs["ce"] == pytest.approx(float(losses.SparseCategoricalCrossentropy(from_logits=True)(
        VOID[kept], X[kept])), rel=1e-6)
    assert logs["iou"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert logs["own_metric"] == pytest.approx(2 / 5)  # a function of one's own sees all labels


@pytest.mark.slow
def test_so_does_validation_and_a_class_among_the_ignored_ones():
    model = identity(losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), ["accuracy"])
    y = np.array([0, 1, 0, 1, 2])
    history = model.fit(X, y, validation_data=(X, y), batch_size=5, verbose=0).history
    assert history["accuracy"] == history["val_accuracy"] == [pytest.approx(2 / 3)]


class Sequences(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"tags": x[:, None] + np.zeros((1, 2, 1), np.float32), "kind": x}


@pytest.mark.slow
def test_each_output_has_the_labels_of_its_own_loss():
    model = identity({"tags": IGNORING, "kind": losses.SparseCategoricalCrossentropy(from_logits=True)},
                     {"tags": ["accuracy"], "kind": ["accuracy"]}, module=Sequences())
    tags = np.array([[0, -100], [1, 2], [-100, -100], [0, 1], [2, -100]])
    logs = model.evaluate(X, {"tags": tags, "kind": np.arange(5) % 3}, batch_size=2, verbose=0)
    assert logs["tags_accuracy"] == pytest.approx(4 / 6)
    assert logs["kind_accuracy"] == pytest.approx(4 / 5)


REFUSED = {
    "labels from 1, loss": (identity, (IGNORING, ["accuracy"]), [1, 2, 3, 1, 2],
                            "label 3, but the model has 3 outputs"),
    "labels from 1": (identity, (own_loss, ["accuracy"]), [1, 2, 3, 1, 2],
                      "label 3, which the metric 'accuracy' would count wrong: its labels are 0 to 2"),
    "void": (identity, (own_loss, ["accuracy"]), VOID, "label -100, which the metric 'accuracy'.*ignore_class"),
    "top k": (identity, (own_loss, ["sparse_top_k_categorical_accuracy"]), [0, 1, -1, 0, 0], "label -1, which"),
    "function": (identity, (own_loss, [metrics.sparse_categorical_accuracy]), [0, 1, 2, 0, 3], "label 3, which"),
    "crossentropy": (identity, (own_loss, ["ce"]), [0, 1, 2, 0, 3], "label 3, which the metric 'ce'"),
    "IoU": (identity, (own_loss, [metrics.MeanIoU(3, sparse_y_pred=False)]), [0, 1, 2, 0, 255], "label 255, which"),
    "signs": (identity, ("hinge", [metrics.BinaryAccuracy()]), SIGNS, "label -1, which.*`y > 0`"),
    "signs, AUC": (identity, ("hinge", [metrics.AUC(from_logits=True)]), SIGNS, "label -1, which the metric 'auc'"),
    "signs, precision": (identity, ("hinge", ["precision"]), SIGNS, "label -1, which the metric 'precision'"),
    "signs, F": (identity, ("hinge", [metrics.F1Score()]), SIGNS, "label -1, which the metric 'f1_score'"),
    "1 and 2": (identity, ("mse", [metrics.BinaryAccuracy()]), SIGNS / 2 + 1.5, "label 2, which.*`y - 1`"),
    "signs, loss": (identity, ("bce",), SIGNS, "label -1, but the labels of 'binary_crossentropy' are 0 for no"),
    "signs, focal": (identity, (losses.BinaryFocalCrossentropy(from_logits=True),), SIGNS, "label -1, but the labels"),
    "signs, loss as a metric": (identity, ("hinge", ["bce"]), SIGNS, "label -1, which the metric 'bce' would count"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:The metric .binary_accuracy. takes")
def test_a_label_that_would_be_counted_wrong_is_refused(case):
    make, arguments, y, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make(*arguments).evaluate(X, np.asarray(y), verbose=0)


def test_it_is_refused_in_a_later_batch_too():
    model = identity(own_loss, ["accuracy"])
    batches = [(X, np.zeros(5, int)), (X, np.array([0, 0, 0, 0, 7]))]
    with pytest.raises(ValueError, match="label 7"):
        model.evaluate(iter(batches), verbose=0)


@pytest.mark.slow
def test_labels_of_weight_0_may_be_any_where_weights_count():
    weights = (VOID >= 0) * 1.0
    for shaped in (weights, weights[:, None]):
        logs = identity(own_loss, weighted=["accuracy"]).evaluate(X, VOID, sample_weight=shaped, verbose=0)
        assert logs["accuracy"] == pytest.approx(2 / 3)
    model = identity(losses.SparseCategoricalCrossentropy(from_logits=True))
    assert np.isfinite(model.evaluate(X, VOID, sample_weight=weights, verbose=0)["loss"])
    with pytest.raises(ValueError, match="label -100, which the metric 'accuracy'"):
        identity(own_loss, ["accuracy"]).evaluate(X, VOID, sample_weight=weights, verbose=0)


@pytest.mark.slow
def test_a_metric_of_ones_own_may_take_any_labels():
    class Signs(metrics.BinaryAccuracy):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_true > 0, y_pred, sample_weight)

    assert identity("hinge", [Signs()]).evaluate(X, SIGNS, verbose=0)["binary_accuracy"] == 1.0
    ignoring = metrics.MeanIoU(3, name="iou", sparse_y_pred=False, ignore_class=-100)
    assert identity(own_loss, [ignoring]).evaluate(X, VOID, verbose=0)["iou"] == pytest.approx(1 / 2)


def test_no_class_of_the_top_k_has_a_label_outside_of_the_classes():
    values = metrics.sparse_top_k_categorical_accuracy([-1, 3, 2], [[0.1, 0.2, 0.7]] * 3, 3)
    assert values.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.sampled(3)
@pytest.mark.every_case
@pytest.mark.parametrize(("end", "loss", "chosen", "names"), [
    (nn.softmax, losses.SparseCategoricalCrossentropy(from_logits=True), None, ["sparse_categorical_crossentropy"]),
    (nn.softmax, losses.SparseCategoricalCrossentropy(from_logits=True), ["ce"],
     ["sparse_categorical_crossentropy", "ce"]),
    (nn.sigmoid, losses.BinaryFocalCrossentropy(from_logits=True), None, ["binary_focal_crossentropy"]),
    (nn.sigmoid, "bce", [metrics.AUC(from_logits=True)], ["auc"]),
    (nn.softmax, "sparse_categorical_crossentropy", ["accuracy"], []),
    (nn.tanh, losses.SparseCategoricalCrossentropy(from_logits=True), ["ce"], []),
])
def test_probabilities_that_are_taken_for_logits_are_said(end, loss, chosen, names):
    model = trainer.Sequential([nn.Dense(3), end])
    model.compile("sgd", loss, metrics=chosen)
    y = np.arange(5) % 3 if "Sparse" in repr(loss) or "sparse" in repr(loss) else EYE[np.arange(5) % 3]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y, verbose=0)
        model.fit(X, y, verbose=0)
    said = [str(one.message) for one in caught]
    assert len(said) == len(names), said
    for message, name in zip(said, names, strict=True):
        assert repr(name) in message and "from_logits=True, but the model ends with a softmax or sigmoid" in message
    assert all(one.filename == __file__ for one in caught)
