"""Which target belongs to which output of a model: by place, by key, by field or by name."""

import collections
import typing

import flax
import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.step.output_matching import match_arrays, output_names

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
