"""Which labels and predictions the losses accept, and what they say of those they refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import losses
from trainer.losses.base import FunctionLoss
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


LARGE = np.array([2**40, 3_000_000_000])  # which wrap around in 32 bits


@pytest.mark.parametrize("large", [LARGE, LARGE.astype(np.uint64)], ids=["int64", "uint64"])
def test_integers_beyond_32_bits_keep_their_values_as_labels_predictions_and_weights(large):
    zeros, mean = np.zeros(2, np.float32), np.float32(LARGE.mean())
    loss = losses.MeanAbsoluteError()
    for value in (loss(large, zeros), loss(zeros, large), loss(zeros + 1, zeros, sample_weight=large)):
        assert float(value) == mean
    assert float(losses.MeanSquaredError()(large, zeros)) == pytest.approx(np.square(LARGE.astype(float)).mean())
    assert np.asarray(losses.mean_absolute_error(large[:, None], zeros[:, None])).tolist() == LARGE.tolist()
    with pytest.raises(ValueError, match="class indices of an integer dtype"):
        SPARSE()(large, np.eye(2, dtype=np.float32))


@pytest.mark.parametrize(("loss", "y_true", "y_pred", "message"), [
    (losses.MeanSquaredError(), spec(8, 1), spec(8, 3), "must have the same shape.*Give one label for each number"),
    (losses.MeanSquaredError(), spec(8, 1), spec(8, 3), "class indices use SparseCategoricalCrossentropy"),
    (losses.MeanSquaredError(), spec(8), spec(8, 4, 1), r"axes between by `lambda x: x.mean\(axis=\(1,\)\)`"),
    (SPARSE(), spec(8, dtype="int32"), spec(8, 4, 4, 3), r"flatten by .*reshape\(len\(x\), -1\).*axis=\(1, 2\)"),
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


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls not in (losses.CTC, losses.Circle)],
                         ids=lambda cls: cls.__name__)
def test_functions_refuse_shapes_that_would_broadcast(cls):
    message = "must hold class indices" if cls.sparse_labels else "must have the same shape"
    with pytest.raises(ValueError, match=message):
        cls.function(np.zeros((8, 2), "int32"), np.zeros((8, 3)))


LABELS, PROBABILITIES = np.array([[0], [1], [2]]), np.array([[0.25], [0.5], [0.75]], "float32")


def crossentropy(y_true, y_pred):
    return -y_true * jnp.log(y_pred) - (1 - y_true) * jnp.log(1 - y_pred)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"])
def test_labels_do_not_wrap_around_in_a_function(dtype):
    expected = FunctionLoss(crossentropy)(LABELS.astype("float32"), PROBABILITIES)
    np.testing.assert_allclose(FunctionLoss(crossentropy)(LABELS.astype(dtype), PROBABILITIES), expected, rtol=1e-6)
    assert float(FunctionLoss(lambda y_true, y_pred: y_true * 100)(LABELS.astype(dtype), PROBABILITIES)) == 100


@pytest.mark.slow
def test_labels_of_64_bits_keep_them_in_a_function():
    seen = []
    with jax.enable_x64(True):
        for dtype in ("uint32", "int64", "uint64"):
            labels = np.full((2, 1), 2**32 - 1, dtype)
            FunctionLoss(lambda y_true, y_pred: seen.append(-y_true) or y_pred)(labels, PROBABILITIES[:2])
    assert [(values.dtype, int(values[0, 0])) for values in seen] == [("int64", 1 - 2**32)] * 3


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
def test_class_indices_stay_integers_in_a_function(dtype):
    logits = np.array([[1.0, 2.0, 3.0]] * 3, "float32")

    def function(y_true, y_pred):
        return optax.softmax_cross_entropy_with_integer_labels(y_pred, y_true[..., 0])

    expected = SPARSE(from_logits=True)(LABELS, logits)
    np.testing.assert_allclose(FunctionLoss(function)(LABELS.astype(dtype), logits), expected, rtol=1e-6)


def test_yes_and_no_stay_so_in_a_function():
    def function(y_true, y_pred):
        return jnp.where(~y_true, y_pred, 0.0)

    assert float(FunctionLoss(function, "sum")(LABELS > 0, PROBABILITIES)) == 0.25
    with pytest.raises(TypeError, match="bool"):
        FunctionLoss(crossentropy)(LABELS > 0, PROBABILITIES)


def test_every_array_of_a_tree_of_labels_reaches_a_function_signed():
    labels = {"a": LABELS.astype("uint8"), "b": LABELS.astype("float32")}
    values = FunctionLoss(lambda y_true, y_pred: -y_true["a"] - y_true["b"] + 0 * y_pred, "sum")(labels, PROBABILITIES)
    assert float(values) == -6


@pytest.mark.parametrize(("loss", "y_true", "y_pred", "message"), [
    (losses.CTC(), np.ones(4, "int32"), np.ones((4, 6, 3)), "(batch, steps, classes)"),
    (losses.CTC(), np.ones((4, 2), "int32"), np.ones((4, 3)), "y_pred.shape=(4, 3)"),
    (losses.Circle(), np.ones((4, 3), "int32"), np.ones((4, 3)), "embeddings of shape (batch, features)"),
    (losses.Dice(), np.ones((4, 3)), np.ones((4, 2)), "must have the same shape"),
])
def test_losses_of_other_shapes_say_which(loss, y_true, y_pred, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        loss(y_true, y_pred)


@pytest.mark.parametrize("q", [0, 1, -0.5])
def test_a_generalized_crossentropy_needs_an_exponent_between_0_and_1(q):
    with pytest.raises(ValueError, match="`q` must be above 0 and below 1"):
        losses.CategoricalGeneralizedCrossEntropy(q=q)


def test_rows_of_an_overlap_of_the_whole_batch_have_no_weights():
    with pytest.raises(ValueError, match="The loss must return one value per row"):
        losses.Dice()(np.ones((4, 3)), np.ones((4, 3)), [1, 2, 3, 4])
    losses.Dice(axis=(1,))(np.ones((4, 3)), np.ones((4, 3)), [1, 2, 3, 4])
