"""Which labels and predictions the losses accept, and what they say of those they refuse."""

import jax
import numpy as np
import pytest

from trainer import losses
from trainer.losses.registry import CLASSES

SPARSE = losses.SparseCategoricalCrossentropy


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(("cls", "y_true", "y_pred"), [
    (losses.MeanSquaredError, spec(8, 3, dtype="int32"), spec(8, 3)),
    (losses.MeanSquaredError, spec(8), spec(8, 1)),
    (losses.MeanSquaredError, spec(8, 1), spec(8)),
    (losses.MeanSquaredError, spec(8, 3, 1), spec(8, 3)),
    (losses.MeanSquaredError, spec(8), spec(8)),
    (losses.BinaryCrossentropy, spec(8, dtype="bool"), spec(8, 1, dtype="bfloat16")),
    (losses.CategoricalCrossentropy, spec(8, 5), spec(8, 5)),
    (SPARSE, spec(8, dtype="int64"), spec(8, 5)),
    (SPARSE, spec(8, 1, dtype="uint8"), spec(8, 5)),
    (SPARSE, spec(8, 4, dtype="int32"), spec(8, 4, 5)),
    (losses.Loss, None, {"a": spec(3)}),
])
def test_shapes_that_work_are_accepted(cls, y_true, y_pred):
    assert cls().validate(y_true, y_pred) is None


@pytest.mark.parametrize(("loss", "y_true", "y_pred", "message"), [
    (losses.MeanSquaredError(), spec(8, 1), spec(8, 3), "must have the same shape.*Give one label for each output"),
    (losses.MeanSquaredError(), spec(8, 3), spec(8, 3, 2), "must have the same shape"),
    (losses.MeanSquaredError(), spec(8, 3), spec(4, 3), "must have the same shape"),
    (losses.MeanSquaredError(), spec(), spec(), r"must have shape \(batch, \.\.\.\).*'mean_squared_error'"),
    (losses.KLDivergence(), spec(8), spec(8), r"must have shape \(batch, \.\.\., features\).*missing axis"),
    (losses.BinaryCrossentropy(), spec(8, 1), spec(8, 3), "must have the same shape.*SparseCategoricalCrossentropy"),
    (losses.CategoricalCrossentropy(), spec(8), spec(8, 3), "same shape.*use SparseCategoricalCrossentropy"),
    (losses.CategoricalCrossentropy(), spec(8, 1), spec(8, 1), "more than one class.*use BinaryCrossentropy"),
    (SPARSE(), spec(8, 3), spec(8, 3), "labels are one-hot: use CategoricalCrossentropy"),
    (SPARSE(), spec(8, 2, dtype="int32"), spec(8, 3), r"indices of shape \(8,\) or \(8, 1\).*one class index for each"),
    (SPARSE(), spec(4, dtype="int32"), spec(8, 3), r"indices of shape \(8,\) or \(8, 1\)"),
    (SPARSE(), spec(8), spec(8, 3), r"integer dtype.*float32.*astype\(\"int32\"\)"),
    (SPARSE(), spec(dtype="int32"), spec(3), r"must have shape \(batch, \.\.\., features\)"),
    (SPARSE(axis=2), spec(8, dtype="int32"), spec(8, 3), "axis 2 is out of bounds"),
    (losses.CategoricalCrossentropy(axis=2), spec(8, 3), spec(8, 3), "axis 2 is out of bounds"),
])
def test_shapes_and_dtypes_that_cannot_work_are_refused(loss, y_true, y_pred, message):
    with pytest.raises(ValueError, match=message) as error:
        loss.validate(y_true, y_pred)
    if "out of bounds" not in message:
        assert f"y_pred.shape={y_pred.shape}" in str(error.value)
    with pytest.raises(ValueError, match=message):
        loss(np.zeros(y_true.shape, y_true.dtype), np.zeros(y_pred.shape, y_pred.dtype))


DENSE = [losses.BinaryCrossentropy, losses.CategoricalCrossentropy]


@pytest.mark.parametrize(("cls", "arguments", "error", "message"), [
    *[(cls, {"label_smoothing": number}, ValueError,
       rf"`label_smoothing` must be a number in \[0, 1\]. Received: label_smoothing={number}")
      for cls in DENSE for number in (-0.1, 1.5)],
    *[(cls, {"label_smoothing": "0.1"}, TypeError, "`label_smoothing` must be a number .* Received: str")
      for cls in DENSE],
    *[(cls, {"from_logits": value}, TypeError, "`from_logits` must be True or False. Received: a value of type")
      for cls in [*DENSE, SPARSE] for value in ("no", 0.1, None)],
    (losses.Huber, {"delta": 0.0}, ValueError, "`delta` must be a number above 0. Received: delta=0"),
    (losses.Huber, {"delta": -1}, ValueError, "`delta` must be a number above 0. Received: delta=-1"),
    (losses.Huber, {"delta": None}, TypeError, "`delta` must be a number above 0. Received: NoneType"),
])
def test_arguments_that_make_no_loss_are_refused(cls, arguments, error, message):
    with pytest.raises(error, match=message):
        cls(**arguments)


@pytest.mark.parametrize("cls", DENSE)
def test_labels_may_be_smoothed_from_not_at_all_to_evenly(cls):
    assert cls(np.bool_(True), 0).label_smoothing == 0
    assert cls(label_smoothing=1).label_smoothing == 1


@pytest.mark.parametrize(("y_true", "y_pred", "argument"), [(None, spec(8, 3), "y_true"), (spec(8, 3), {}, "y_pred")])
@pytest.mark.parametrize("cls", [losses.MeanSquaredError, losses.CategoricalCrossentropy, SPARSE])
def test_labels_and_predictions_that_are_no_arrays_are_refused(cls, y_true, y_pred, argument):
    with pytest.raises(TypeError, match=f"`{argument}` must be an array"):
        cls().validate(y_true, y_pred)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_functions_refuse_shapes_that_would_broadcast(cls):
    message = "must hold class indices" if cls.sparse_labels else "must have the same shape"
    with pytest.raises(ValueError, match=message):
        cls.function(np.zeros((8, 2), "int32"), np.zeros((8, 3)))
