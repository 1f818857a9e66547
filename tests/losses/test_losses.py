"""Losses: Keras's numbers (reference/losses.json, from reference/make_losses.py), types, gradients, weights, names."""

import functools
import json
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import losses
from trainer.losses.base import REDUCTIONS, FunctionLoss, broadcast_sample_weight
from trainer.losses.registry import CLASSES

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "losses.json").read_text())
CROSSENTROPIES = (losses.BinaryCrossentropy, losses.CategoricalCrossentropy, losses.SparseCategoricalCrossentropy,
                  losses.BinaryFocalCrossentropy, losses.CategoricalFocalCrossentropy)
OF_OTHER_SHAPES = {losses.CTC: "sequences_of_labels", losses.Circle: "embeddings"}


def case_id(case):
    arguments = case.get("config", case.get("arguments"))
    parts = [case.get("loss", case.get("function")), *(f"{key}={value}" for key, value in arguments.items())]
    return "-".join([*parts, case["inputs"], *([case["weights"]] if "weights" in case else [])])


def reference_inputs(name):
    inputs = REFERENCE["inputs"][name]
    return np.asarray(inputs["y_true"]), np.asarray(inputs["y_pred"])


class Difference(losses.Loss):
    def call(self, y_true, y_pred):
        return y_true - y_pred


# Numbers


@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", REFERENCE["classes"], ids=case_id)
def test_every_reduction_of_a_class_gives_the_numbers_of_keras(case):
    y_true, y_pred = reference_inputs(case["inputs"])
    for reduction, expected in case["results"].items():
        loss = getattr(losses, case["loss"])(**case["config"], reduction=reduction)
        received = loss(y_true, y_pred, sample_weight=case["sample_weight"])
        assert received.dtype == jnp.float32
        np.testing.assert_allclose(received, expected, rtol=2e-5, atol=1e-6, err_msg=reduction)


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize("case", REFERENCE["functions"], ids=case_id)
def test_a_function_gives_the_numbers_of_keras(case):
    y_true, y_pred = reference_inputs(case["inputs"])
    received = getattr(losses, case["function"])(y_true, y_pred, **case["arguments"])
    np.testing.assert_allclose(received, case["result"], rtol=2e-5, atol=1e-6)


def test_the_reference_covers_every_class_and_function():
    fix = "add its cases to tests/reference/make_losses.py, and run that; or add it to trainer/losses/registry.py"
    assert {case["loss"] for case in REFERENCE["classes"]} == {cls.__name__ for cls in CLASSES}, fix
    assert {case["function"] for case in REFERENCE["functions"]} == {cls.function.__name__ for cls in CLASSES}, fix
    assert REFERENCE["origin"] == "Keras 3.15.1, JAX backend"


def test_certain_mistakes_cost_what_float32_clipping_gives():
    loss = losses.BinaryCrossentropy(reduction="none")
    np.testing.assert_allclose(loss([[1.0], [0.0]], [[0.0], [1.0]]), [16.118095, 15.942385], rtol=1e-6)


@pytest.mark.slow
def test_class_indices_along_another_axis_give_what_the_last_axis_gives():
    y_true, y_pred = reference_inputs("void_pixels")
    moved = losses.SparseCategoricalCrossentropy(ignore_class=-1, axis=1)(y_true, np.moveaxis(y_pred, -1, 1))
    np.testing.assert_allclose(moved, losses.SparseCategoricalCrossentropy(ignore_class=-1)(y_true, y_pred), rtol=1e-6)


@pytest.mark.slow
def test_label_smoothing_spreads_over_the_classes_of_the_given_axis():
    y_true, y_pred = np.eye(3)[[[0, 1], [2, 0]]], np.full((2, 2, 3), 1 / 3) + np.array([0.1, -0.1, 0.0])
    last = losses.categorical_crossentropy(y_true, y_pred, label_smoothing=0.3)
    moved = losses.categorical_crossentropy(
        np.moveaxis(y_true, -1, 1), np.moveaxis(y_pred, -1, 1), label_smoothing=0.3, axis=1
    )
    np.testing.assert_allclose(moved, last, rtol=1e-6)


def test_a_class_that_a_logit_rules_out_does_not_make_the_loss_nan():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(loss([1], [[-jnp.inf, 0.0, 0.0]]), np.log(2), rtol=1e-6)


def test_one_prediction_per_row_gives_one_value_per_row():
    values = losses.MeanSquaredError().values(jnp.zeros(3), jnp.arange(3.0))
    np.testing.assert_array_equal(values, [0, 1, 4])


def test_all_weights_zero_give_zero():
    for reduction in REDUCTIONS:
        loss = losses.MeanSquaredError(reduction=reduction)([[1.0], [2.0]], [[3.0], [5.0]], sample_weight=[0, 0])
        np.testing.assert_array_equal(loss, np.zeros(loss.shape))


def test_no_rows_give_zero():
    assert float(losses.MeanSquaredError()(np.zeros((0, 2)), np.zeros((0, 2)))) == 0.0


# Types


@pytest.mark.parametrize("dtype", ["int32", "float64", "bool", "float16"])
def test_inputs_of_any_dtype_give_float32(dtype):
    assert Difference().values(np.ones((2, 1), dtype), np.zeros((2, 1), dtype)).dtype == jnp.float32
    assert losses.mean_squared_error(np.ones((2, 1), dtype), np.zeros((2, 1), dtype)).dtype == jnp.float32


def test_a_given_dtype_is_the_dtype_of_values_and_result():
    loss = losses.BinaryCrossentropy(dtype="bfloat16")
    y_true, y_pred = np.ones((2, 1)), np.zeros((2, 1))
    assert loss.dtype == "bfloat16"
    assert loss.values(y_true, y_pred).dtype == jnp.bfloat16
    result = loss(y_true, y_pred, sample_weight=[1.0, 1.0])
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(result), 16.118, rtol=1e-2)


def test_class_indices_beyond_256_are_exact_in_a_narrow_dtype():
    logits = np.zeros((1, 300))
    logits[0, 257] = 50.0
    assert float(losses.SparseCategoricalCrossentropy(from_logits=True, dtype="bfloat16")([257], logits)) == 0.0


@pytest.mark.slow
def test_lists_of_numbers_are_arrays_and_trees_of_arrays_reach_a_loss_of_ones_own_as_trees():
    class FromDict(losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred["a"] - y_true["a"] + y_pred["b"]

    assert float(losses.MeanSquaredError()([[0, 0]], [[1, 1]])) == 1.0
    y_pred = {"a": np.array([3]), "b": np.array([1])}
    assert float(FromDict()({"a": np.array([1])}, y_pred)) == 3.0


# Gradients and tracing

ONE_HOT = np.eye(3)[[0, 1, 2, 1]]
HOSTILE = {
    "zeros": (np.zeros((4, 3)), np.zeros((4, 3))),
    "certain and wrong": (ONE_HOT, np.roll(ONE_HOT, 1, axis=1)),
    "certain and right": (ONE_HOT, ONE_HOT),
    "no distribution": (ONE_HOT, np.zeros((4, 3))),
    "large": (ONE_HOT, 1e4 * (1 - ONE_HOT)),
}


@pytest.mark.slow
@pytest.mark.parametrize("inputs", HOSTILE)
@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls not in OF_OTHER_SHAPES], ids=lambda cls: cls.__name__)
def test_gradients_are_finite(cls, inputs):
    y_true, y_pred = HOSTILE[inputs]
    y_true = y_true.argmax(-1) if cls.sparse_labels else y_true
    for config in ({}, {"from_logits": True}) if cls in CROSSENTROPIES else ({},):
        value, gradient = jax.value_and_grad(functools.partial(cls(**config), y_true))(jnp.asarray(y_pred))
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "inputs"), [
    *OF_OTHER_SHAPES.items(), (losses.Circle, "embeddings_of_one_class"), (losses.Dice, "empty_masks")])
def test_gradients_of_sequences_and_of_batches_as_a_whole_are_finite(cls, inputs):
    y_true, y_pred = reference_inputs(inputs)
    value, gradient = jax.value_and_grad(functools.partial(cls(), y_true))(jnp.asarray(y_pred))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("from_logits", [False, True])
def test_gradients_of_ignored_classes_are_zero(from_logits):
    loss = losses.SparseCategoricalCrossentropy(from_logits=from_logits, ignore_class=-1)
    gradient = jax.grad(lambda p: loss(np.array([-1, 1]), p))(jnp.array([[0.0, 0.0], [0.4, 0.6]]))
    assert not gradient[0].any()
    assert gradient[1].any()


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_loss_is_the_same_under_jit(cls):
    y_true, y_pred = reference_inputs(
        OF_OTHER_SHAPES.get(cls, "indices" if cls.sparse_labels else "one_hot"))
    weights = 2.0 if issubclass(cls, losses.Dice | losses.Tversky) else [1, 2, 3, 4]
    np.testing.assert_allclose(jax.jit(cls())(y_true, y_pred, weights), cls()(y_true, y_pred, weights), rtol=1e-5)


# Sample weights


@pytest.mark.parametrize(("values", "weights", "expected"), [
    ((4,), (), ()), ((4,), (4,), (4,)), ((4,), (4, 1), (4,)), ((4,), (1,), (1,)), ((), (), ()),
    ((4, 3), (4,), (4, 1)), ((4, 3), (4, 1), (4, 1)), ((4, 3), (4, 3), (4, 3)), ((4, 3), (4, 3, 1), (4, 3)),
    ((3, 3), (3,), (3, 1)), ((4, 3, 2), (4, 3), (4, 3, 1)),
])
def test_sample_weights_are_squeezed_or_expanded_rows_first(values, weights, expected):
    assert broadcast_sample_weight(jnp.zeros(values), np.ones(weights)).shape == expected


@pytest.mark.parametrize(("values", "weights", "fix"), [
    ((4,), (3,), "Give one weight per row or per value"), ((4, 3), (3,), "Give one weight per row"),
    ((4,), (4, 2), "Give one weight per row"), ((4,), (4, 1, 1), "Give one weight per row"),
    ((), (4,), "must return one value per row"),
])
def test_sample_weights_that_cannot_match_are_refused(values, weights, fix):
    with pytest.raises(ValueError, match="`sample_weight` cannot be matched") as error:
        broadcast_sample_weight(jnp.zeros(values), np.ones(weights))
    for part in (f"sample_weight.shape={weights}", f"values.shape={values}", fix):
        assert part in str(error.value)


# Configuration


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_config_makes_an_equal_loss(cls):
    loss = cls(reduction="sum", name="mine", dtype="float16")
    config = loss.get_config()
    again = cls.from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config
    assert (again.name, again.reduction, again.dtype) == ("mine", "sum", "float16")


@pytest.mark.parametrize(("loss", "config"), [
    (losses.Huber(delta=2.0), {"name": "huber_loss", "reduction": "sum_over_batch_size", "delta": 2.0}),
    (losses.MeanSquaredError("sum", "m"), {"name": "m", "reduction": "sum"}),
    (losses.BinaryCrossentropy(True, 0.1, 1, "sum", "b"),
     {"name": "b", "reduction": "sum", "from_logits": True, "label_smoothing": 0.1, "axis": 1}),
    (losses.CategoricalCrossentropy(True, 0.1, 1, "sum", "c"),
     {"name": "c", "reduction": "sum", "from_logits": True, "label_smoothing": 0.1, "axis": 1}),
    (losses.SparseCategoricalCrossentropy(True, 3, "sum", 1, "s"),
     {"name": "s", "reduction": "sum", "from_logits": True, "ignore_class": 3, "axis": 1}),
    (losses.CosineSimilarity(1, "sum"), {"name": "cosine_similarity", "reduction": "sum", "axis": 1}),
    (Difference("d", "sum"), {"name": "d", "reduction": "sum"}),
    (FunctionLoss(abs, "sum"), {"name": "abs", "reduction": "sum", "function": abs}),
], ids=lambda value: type(value).__name__)
def test_arguments_come_in_the_order_of_keras_and_config_omits_a_dtype_not_given(loss, config):
    assert loss.get_config() == config
    assert loss.dtype == "float32"
    assert type(loss).from_config(config).get_config() == config


def test_a_subclass_is_named_after_its_class():
    class MyHTTPLoss2D(losses.Loss):
        pass

    assert Difference().name == "difference"
    assert MyHTTPLoss2D().name == "my_http_loss2d"


def test_dtype_is_read_only():
    with pytest.raises(AttributeError):
        losses.MeanSquaredError().dtype = "bfloat16"


def test_losses_are_picklable():
    loss = pickle.loads(pickle.dumps(losses.Huber(delta=3.0)))
    assert loss.get_config() == losses.Huber(delta=3.0).get_config()
    assert pickle.loads(pickle.dumps(losses.get("mse"))) is losses.mean_squared_error


def test_a_subclass_without_call_says_what_is_missing():
    with pytest.raises(NotImplementedError, match=r"Loss must define `call\(self, y_true, y_pred\)`"):
        losses.Loss()([1.0], [1.0])


@pytest.mark.parametrize("reduction", ["average", True])
def test_unknown_reductions_are_refused(reduction):
    with pytest.raises(ValueError, match=rf"Invalid value for argument `reduction`.*mean.*Received: .*{reduction}"):
        losses.MeanSquaredError(reduction=reduction)


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ValueError, match=r"Invalid value for argument `dtype`.*int32"):
        losses.MeanSquaredError(dtype="int32")


# Names


@pytest.mark.parametrize(("names", "cls"), [
    (("mse", "MSE", "mean_squared_error"), losses.MeanSquaredError),
    (("mae", "MAE", "mean_absolute_error"), losses.MeanAbsoluteError),
    (("mape", "MAPE", "mean_absolute_percentage_error"), losses.MeanAbsolutePercentageError),
    (("msle", "MSLE", "mean_squared_logarithmic_error"), losses.MeanSquaredLogarithmicError),
    (("bce", "BCE", "binary_crossentropy"), losses.BinaryCrossentropy),
    (("kld", "KLD", "kl_divergence"), losses.KLDivergence),
    (("categorical_crossentropy",), losses.CategoricalCrossentropy),
    (("sparse_categorical_crossentropy",), losses.SparseCategoricalCrossentropy),
    (("huber",), losses.Huber), (("log_cosh",), losses.LogCosh), (("poisson",), losses.Poisson),
    (("cosine_similarity",), losses.CosineSimilarity), (("hinge",), losses.Hinge),
    (("squared_hinge",), losses.SquaredHinge), (("categorical_hinge",), losses.CategoricalHinge),
], ids=lambda value: value[-1] if isinstance(value, tuple) else value.__name__)
def test_a_name_gives_the_function_and_as_loss_its_class(names, cls):
    function = getattr(losses, names[-1])
    for name in names:
        assert losses.get(name) is function
        assert type(losses.as_loss(name)) is cls
    assert type(losses.get(cls.__name__)) is cls
    assert losses.get(function) is function
    assert type(losses.as_loss(function)) is cls
    assert losses.as_loss(function).name == names[-1]


def test_get_and_as_loss_return_what_is_a_loss_already():
    loss = losses.Huber()
    assert losses.get(None) is None
    assert losses.get(loss) is losses.as_loss(loss) is loss
    assert losses.get(max) is max
    assert type(losses.as_loss(losses.Huber)) is losses.Huber


def test_an_unknown_name_lists_the_near_ones():
    with pytest.raises(ValueError, match=r"Unknown loss 'mean_square_error'\. Did you mean 'mean_squared_error'"):
        losses.get("mean_square_error")


@pytest.mark.parametrize("identifier", [3, dict, ["mse"]])
def test_what_is_no_loss_is_refused(identifier):
    with pytest.raises(TypeError, match="`loss` must be the name of a loss, a function"):
        losses.get(identifier)


def test_as_loss_refuses_none():
    with pytest.raises(TypeError, match=r"`loss` must be the name of a loss.*NoneType"):
        losses.as_loss(None)


def test_a_users_function_becomes_a_loss_with_its_name_and_matched_ranks():
    def gap(y_true, y_pred):
        assert y_true.dtype == jnp.int32, "labels keep their dtype"
        assert y_pred.dtype == jnp.float32
        return jnp.abs(y_true - y_pred).max(-1)

    loss = losses.as_loss(gap)
    assert loss.name == "gap"
    assert losses.as_loss(functools.partial(gap)).name == "partial"
    np.testing.assert_array_equal(loss.values(np.array([1, 2]), np.array([[0], [4]])), [1, 2])
    assert not loss.expects_probabilities
    assert not loss.sparse_labels
    loss.validate(np.zeros((4, 2)), np.zeros(3))


def test_a_users_function_may_return_a_scalar_and_take_trees():
    loss = losses.as_loss(lambda y_true, y_pred: jnp.sum(y_pred["a"]))
    values = loss.values({"b": np.zeros(2)}, {"a": np.ones(2)})
    assert (values.shape, float(values)) == ((), 2.0)
    assert float(loss({"b": np.zeros(2)}, {"a": np.ones(2)}, sample_weight=3)) == 6.0


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_crossentropies_expect_probabilities_unless_given_logits_and_one_takes_class_indices(cls):
    generalized = losses.CategoricalGeneralizedCrossEntropy
    assert cls().expects_probabilities == (cls in (*CROSSENTROPIES, generalized))
    assert cls().sparse_labels == (cls in (losses.SparseCategoricalCrossentropy, generalized))
    assert losses.as_loss(cls.function).expects_probabilities == cls().expects_probabilities
    if cls in CROSSENTROPIES:
        assert not cls(from_logits=True).expects_probabilities


def test_a_mask_tells_which_values_of_an_ignored_class_do_not_count():
    y_true, y_pred = np.array([0, -1, 1], "int8"), np.full((3, 2), 0.5)
    np.testing.assert_array_equal(
        losses.SparseCategoricalCrossentropy(ignore_class=-1).mask(y_true, y_pred), [True, False, True]
    )
    np.testing.assert_array_equal(
        losses.SparseCategoricalCrossentropy(ignore_class=255).mask(np.array([255, 1], "uint8"), y_pred[:2]),
        [False, True],
    )
    assert losses.SparseCategoricalCrossentropy().mask(y_true, y_pred) is None
    assert losses.MeanSquaredError().mask(y_pred, y_pred) is None


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("labels", "dtype"), [
    (np.array([2**24 + 1, 3], "int32"), "int32"), (np.array([3, 4], "uint8"), "int32"), ([3, 4], "int32"),
    (np.array([True, False]), "float32"), (np.array([0.5, 1.0], "float16"), "float32")])
def test_a_loss_of_ones_own_gets_integers_as_integers_and_other_labels_as_floats(labels, dtype):
    class Seen(losses.Loss):
        def call(self, y_true, y_pred):
            assert (y_true.dtype, y_pred.dtype) == (dtype, "float32")
            return (y_true - jnp.asarray(labels)) + 0 * y_pred

    assert float(Seen()(labels, np.zeros(2, "float16"))) == 0.0
