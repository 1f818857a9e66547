"""Layers that name no dtype compute in the one they are told, whatever they meet on the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tests.core.test_precision import F16, F32, assert_near, dtypes, nnx_cnn, operand_dtypes
from tests.support.module_cases import key_maker
from trainer.core.modules import as_functional
from trainer.core.precision import apply_with_policy, get

RANDOM = np.random.default_rng(0)
ROWS, SEQUENCES, IMAGES, VIDEOS = (RANDOM.normal(size=shape).astype(np.float32)
                                   for shape in [(4, 3), (4, 5, 3), (4, 4, 4, 1), (4, 2, 4, 4, 1)])
TABLE = np.linspace(0, 1, 3, dtype=np.float32)


class LinenRNN(nn.Module):
    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.RNN(self.cell)(x))


class NNXRNN(nnx.Module):
    def __init__(self, cell):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(cell(3, 4, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


class LinenTable(nn.Module):
    """Adds a table of constants, and has layers inside of Flax's transformations."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm()(nn.remat(nn.Dense)(3)(x + TABLE))
        return nn.jit(nn.Dense)(2)(x + TABLE)


class NNXTable(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.head = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.LayerNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x + TABLE))


class Crossed(nn.Module):
    @nn.compact
    def __call__(self, x, context):
        return nn.Dense(2)(x) + nn.Dense(2)(context)


class LinenKeywords(nn.Module):
    """Has a layer whose arguments are named like those of an interceptor."""

    @nn.compact
    def __call__(self, x):
        return Crossed()(x, context=x + TABLE)


class Shared(nn.Module):
    def setup(self):
        self.embed = nn.Embed(7, 3)

    def __call__(self, tokens):
        return self.embed.attend(self.embed(tokens) + TABLE)


CASES = {
    **{f"linen {cell.__name__}": (lambda cell=cell: LinenRNN(cell(4)), SEQUENCES)
       for cell in (nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.MGUCell, nn.SimpleCell)},
    "linen ConvLSTMCell": (lambda: LinenRNN(nn.ConvLSTMCell(2, (3, 3))), VIDEOS),
    **{f"nnx {cell.__name__}": (lambda cell=cell: NNXRNN(cell), SEQUENCES)
       for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell)},
    # Unlike the other cells, it names float32 unless told otherwise.
    "nnx SimpleCell": (lambda: NNXRNN(functools.partial(nnx.SimpleCell, dtype=None)), SEQUENCES),
    "nnx batch norm": (lambda: nnx_cnn(batch_norm=True), IMAGES),
    "linen table": (LinenTable, ROWS),
    "nnx table": (NNXTable, SEQUENCES),
    "stack with table": (lambda: [nn.Dense(3), lambda x: x + TABLE, nn.Dense(2)], ROWS),
    "linen keywords": (LinenKeywords, ROWS),
    "linen method": (Shared, RANDOM.integers(0, 7, (4, 5))),
}


@functools.cache
def built(name):
    make, inputs = CASES[name]
    functional = as_functional(make())
    return functional, *functional.init(jax.random.key(0), inputs)[:2], inputs


def run(name, params, policy, training, remat=False):
    functional, _, model_state, inputs = built(name)

    def apply(params, model_state, inputs):
        return functional.apply(params, model_state, inputs, training=training, make_key=key_maker(), remat=remat,
                                compute_dtype=policy and policy.compute_dtype)

    def loss(params):
        outputs, new_state = apply_with_policy(policy, apply, params, model_state, inputs)
        return jnp.mean(jnp.square(outputs)), new_state

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_every_product_and_convolution_computes_in_the_dtype(name, training):
    assert operand_dtypes(lambda params: run(name, params, get("mixed_float16"), training), built(name)[1]) == {F16}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen SimpleCell", "nnx LSTMCell", "nnx batch norm", "linen table"])
def test_rematerialised_layers_compute_in_the_dtype_too(name):
    assert operand_dtypes(lambda params: run(name, params, get("mixed_float16"), True, remat=True),
                          built(name)[1]) == {F16}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen LSTMCell", "nnx LSTMCell", "nnx batch norm", "linen table", "nnx table"])
def test_results_are_those_of_float32_up_to_the_precision_of_the_dtype(name):
    received, expected = (jax.jit(lambda params, policy=policy: run(name, params, policy, True))(built(name)[1])
                          for policy in (get("mixed_float16"), None))
    for one, other in zip(received, expected, strict=True):
        assert_near(one, other, 0.02)
        assert dtypes(one) == dtypes(other)


@pytest.mark.parametrize("make", [lambda: [nn.Dense(3), nn.Dense(2, dtype=jnp.float32)],
                                  lambda: [nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
                                           nnx.Linear(3, 2, dtype=jnp.float32, rngs=nnx.Rngs(0))]])
def test_a_layer_with_a_dtype_of_its_own_keeps_it(make):
    layers = make()
    functional = as_functional(layers)
    params, model_state, _ = functional.init(jax.random.key(0), ROWS)
    apply = functools.partial(functional.apply, training=True, make_key=key_maker())
    assert operand_dtypes(lambda: apply(params, model_state, ROWS, compute_dtype=F16)) == {F16, F32}
    assert layers[0].dtype is None, "the user's own layers are left as they are"
    assert operand_dtypes(lambda: apply(params, model_state, ROWS)) == {F32}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [lambda: [nn.Dense(2, param_dtype=jnp.complex64)],
                                  lambda: [nnx.Linear(3, 2, param_dtype=jnp.complex64, rngs=nnx.Rngs(0))]])
def test_a_layer_of_complex_numbers_keeps_them(make):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), ROWS)
    outputs, _ = functional.apply(params, model_state, ROWS, training=True, make_key=key_maker(), compute_dtype=F16)
    assert outputs.dtype == jnp.complex64


def test_a_named_module_computes_in_the_dtype():
    functional = as_functional({"one": nn.Dense(2)})
    params, model_state, _ = functional.init(jax.random.key(0), {"one": ROWS})
    outputs, _ = functional.apply(params["one"], model_state, ROWS, training=True, make_key=key_maker(), module="one",
                                  compute_dtype=F16)
    assert outputs.dtype == F16
