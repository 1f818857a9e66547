"""Which target belongs to which output of a model: by place, by key, by field or by name."""

import collections
import typing

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored
from trainer.engine.step.output_matching import match_arrays, match_choices, output_names

A, B, C = (np.full(2, value) for value in range(3))


class Pair(typing.NamedTuple):
    main: typing.Any
    aux: typing.Any


@flax.struct.dataclass
class Struct:
    main: typing.Any
    aux: typing.Any


@pytest.mark.parametrize(("outputs", "names"), [
    (A, [None]),
    ({"only": A}, [None]),
    ((A, B), ["output_1", "output_2"]),
    ((A, {"k": B}), ["output_1", "output_2/k"]),
    (Pair(A, B), ["main", "aux"]),
    (Struct(A, B), ["main", "aux"]),
])
def test_outputs_are_called_as_the_module_calls_them(outputs, names):
    assert output_names(outputs) == names


@pytest.mark.parametrize(("values", "outputs", "expected"), [
    ((A, B), (B, A), [0, 1]),
    ((A, None), (A, B), [0, None]),
    ({"output_2": B}, (A, B), [None, 1]),
    ({"output_2": B, "output_1": A}, (A, B), [0, 1]),
    ({f"output_{number}": np.full(2, number) for number in range(1, 12)}, (A,) * 11, list(range(1, 12))),
    ({"main": A, "aux": B}, Pair(A, B), [0, 1]),
    ({"aux": B}, Struct(A, B), [None, 1]),
    (Struct(A, B), Struct(A, B), [0, 1]),
    ((A, B), Pair(A, B), [0, 1]),
    ({"z": A, "b": B}, collections.OrderedDict(z=A, b=B), [0, 1]),
    ({"a": A, "b": (B, C)}, {"b": (A, A), "a": A}, [0, 1, 2]),
    ((A, B, C), (A, (B, C)), [0, 1, 2]),
    ({"output_2": {"k": B}}, (A, {"k": B, "l": C}), [None, 1, None]),
    ({"output_2/l": C}, (A, {"k": B, "l": C}), [None, None, 2]),
    ({"only": A}, A, [0]),
    (A, {"only": A}, [0]),
    (None, (A, B), [None, None]),
])
def test_each_output_gets_its_own_target(values, outputs, expected):
    matched = match_arrays("y", values, outputs)
    assert [None if value is None else int(value[0]) for value in matched] == expected


@pytest.mark.parametrize(("values", "outputs"), [
    ({"main": A, "aux": B}, (A, B)),
    ({"typo": A}, {"a": A, "b": B}),
    ((A, B), {"a": A, "b": B}),
    ((A, B, C), (A, {"k": B, "l": C})),
    ({"a": A, "b": B}, A),
    (A, (A, B)),
])
def test_targets_of_other_names_or_without_are_refused(values, outputs):
    with pytest.raises(ValueError, match="`y` must have one array per output"):
        match_arrays("y", values, outputs)


@pytest.mark.parametrize(("values", "wanted", "expected"), [
    (A, [True, False], [0, None]),
    (B, [False, True], [None, 1]),
    ([B], [False, True], [None, 1]),
    ((A, C), [True, False, True], [0, None, 2]),
    ((A, B), [True, False], [0, 1]),
])
def test_targets_alone_are_those_of_the_outputs_that_need_some(values, wanted, expected):
    matched = match_arrays("y", values, (A,) * len(wanted), wanted=wanted)
    assert [None if value is None else int(value[0]) for value in matched] == expected


@pytest.mark.parametrize(("values", "wanted"), [(A, [True, True]), ((A, B), [False, True, False]), ({"a": A}, [True])])
def test_more_or_fewer_targets_than_outputs_that_need_some_are_refused(values, wanted):
    with pytest.raises(ValueError, match="`y` must have one array per output"):
        match_arrays("y", values, tuple(np.ones(2) for _ in range(max(len(wanted), 2))), wanted=wanted)


@pytest.mark.parametrize(("choices", "expected"), [
    (["mse", "mae"], ["mse", "mse", "mae"]),
    ([{"k": "mse"}, "mae"], ["mse", None, "mae"]),
    ({"output_1": {"l": "mse"}}, [None, "mse", None]),
    ({"output_1/l": "mse", "output_2": "mae"}, [None, "mse", "mae"]),
    (["mse", None, "mae"], ["mse", None, "mae"]),
])
def test_losses_of_nested_outputs_may_be_nested(choices, expected):
    assert match_choices("loss", choices, ({"k": A, "l": B}, C), lambda choices, number: True) == expected


class WithAuxiliaryLoss(nn.Module):
    """As mixtures of experts have one."""

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(1)(x)
        return logits, jnp.square(logits).mean()


class AddsAuxiliaryLoss(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        outputs, auxiliary = y_pred
        return super().compute_loss(x, y, outputs, sample_weight) + 0.1 * auxiliary


def fitted_with_auxiliary_loss(replicas, rows, model_class=AddsAuxiliaryLoss, **compiled):
    x, y = np.split(np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32), [3], axis=1)
    with mirrored(replicas).scope():
        model = model_class(WithAuxiliaryLoss())
        model.compile(optax.sgd(0.1), **compiled)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {**history, **model.evaluate(x, y, batch_size=8, verbose=0)}, model, x


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "compiled"), [
    (trainer.Model, {"loss": ["mse", None], "metrics": [["mae"], None]}),
    (AddsAuxiliaryLoss, {"loss": "mse", "metrics": {"output_1": ["mae"]}}),
])
def test_a_scalar_among_the_outputs_may_be_part_of_the_loss(model_class, compiled):
    (one, _, _), (four, _, _) = (
        fitted_with_auxiliary_loss(replicas, 18, model_class, **compiled) for replicas in (1, 4))
    assert set(one) == {"loss", "output_1_mae"}
    assert one.keys() == four.keys()
    for name, values in one.items():
        np.testing.assert_allclose(four[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_loss_of_a_scalar_output_alone_is_one_devices():
    def itself(y_true, y_pred):
        return y_pred

    (one, _, _), (four, _, _) = (
        fitted_with_auxiliary_loss(replicas, 14, trainer.Model, loss=[None, itself]) for replicas in (1, 4))
    for name, values in one.items():
        np.testing.assert_allclose(four[name], values, rtol=1e-5, err_msg=name)


def test_a_scalar_output_has_no_predictions():
    _, model, x = fitted_with_auxiliary_loss(1, 8, trainer.Model, loss=["mse", None])
    with pytest.raises(ValueError, match=r"of which 'output_2' does not, for 8 rows.*predict_step"):
        model.predict(x, verbose=0)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("container", [Pair, Struct])
def test_a_module_may_return_fields(container):
    class Fields(nn.Module):
        @nn.compact
        def __call__(self, x):
            return container(x.sum(-1) + 0 * nn.Dense(1)(x)[:, 0], x[:, 0])

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    model = trainer.Model(Fields())
    model.compile("sgd", {"main": "mse", "aux": "mae"}, metrics={"aux": ["mae"]})
    logs = model.evaluate(x, {"aux": x[:, 0] + 1, "main": x.sum(-1)}, verbose=0)
    assert logs == {"loss": 1.0, "main_loss": 0.0, "aux_loss": 1.0, "aux_mae": 1.0}
    assert jax.tree.map(np.shape, model.predict(x, verbose=0)) == container((4,), (4,))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("shape", [(), (7,)])
def test_an_output_that_no_loss_takes_needs_no_rows(shape):
    class WithExtra(nn.Module):
        @nn.compact
        def __call__(self, x):
            return {"main": nn.Dense(1)(x), "extra": x.sum() * np.ones(shape, np.float32)}

    class Penalized(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return super().compute_loss(x, y, y_pred, sample_weight) + y_pred["extra"].mean()

    x = np.ones((4, 3), np.float32)
    model = Penalized(WithExtra())
    model.compile("sgd", {"main": "mse"}, metrics={"main": ["mae"]})
    assert np.isfinite(model.fit(x, {"main": x[:, 0]}, verbose=0).history["loss"]).all()
