"""Policies cast at a module's boundary, scaled gradients keep what is small, and nothing of it shows outside."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tests.support.module_cases import key_maker
from tests.support.networks import LinenMLP
from tests.support.simulated_replicas import run_replicas
from trainer.core import precision
from trainer.core.modules import as_functional
from trainer.core.precision import MAX_SCALE, Policy, apply_with_policy

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MIXED_F16, MIXED_BF16 = precision.get("mixed_float16"), precision.get("mixed_bfloat16")
SCALE = np.float32(2.0**10)


def nnx_cnn(batch_norm):
    rngs = nnx.Rngs(0)
    norm = [nnx.BatchNorm(4, rngs=rngs)] if batch_norm else []
    return [nnx.Conv(1, 4, (3, 3), rngs=rngs), *norm, nnx.relu, lambda x: x.reshape(x.shape[0], -1),
            nnx.Linear(64, 3, rngs=rngs)]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(8)(x))
        return nn.Dense(3)(x + nn.MultiHeadDotProductAttention(2)(x, x))


RANDOM = np.random.default_rng(0)
ROWS, SEQUENCES, IMAGES = (RANDOM.normal(size=shape).astype(np.float32) for shape in [(8, 6), (8, 5, 6), (8, 4, 4, 1)])
CASES = {
    "mlp": (lambda: LinenMLP(batch_norm=True, dropout=0.5), ROWS),
    "cnn": (lambda: nnx_cnn(batch_norm=False), IMAGES),
    "cnn with batch norm": (lambda: nnx_cnn(batch_norm=True), IMAGES),
    "embedding": (lambda: [nn.Embed(7, 8), nn.tanh, lambda x: x.mean(1), nn.Dense(3)], RANDOM.integers(0, 7, (8, 5))),
    "lstm": (lambda: [nn.RNN(nn.OptimizedLSTMCell(8)), lambda x: x[:, -1], nn.Dense(3)], SEQUENCES),
    "attention": (Attention, SEQUENCES),
}
# The others have float32 values within, as the module's docstring tells.
CASTING_WHOLLY = ["mlp", "cnn", "embedding", "attention"]


@functools.cache
def case(name):
    """Returns the module's apply in training, its parameters and state, and inputs."""
    make, inputs = CASES[name]
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), inputs)
    return functools.partial(functional.apply, training=True, make_key=key_maker()), params, model_state, inputs


def loss_and_rest(params, name, policy, scale):
    apply, _, model_state, inputs = case(name)
    outputs, new_state = apply_with_policy(policy, apply, params, model_state, inputs, scale)
    weights = jnp.cos(jnp.arange(outputs.size, dtype=jnp.float32)).reshape(outputs.shape)
    return jnp.mean(weights * jnp.square(outputs - 1)), (outputs, new_state)


gradients = jax.grad(loss_and_rest, has_aux=True)


@functools.cache
def results(name, policy, scale=None):
    """Returns gradients, outputs and new state of a case."""
    compute = jax.jit(lambda params, scale: gradients(params, name, policy, scale))
    grads, (outputs, new_state) = compute(case(name)[1], scale)
    return grads, outputs, new_state


def assert_near(received, expected, tolerance):
    """Compares trees, with an error relative to the largest number in the expected one."""
    largest = max((np.abs(leaf).max() for leaf in jax.tree.leaves(expected)), default=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        np.asarray(a, np.float32), b, rtol=0, atol=tolerance * largest), received, expected)


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


def equations(jaxpr):
    """Yields all equations of a jaxpr, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def operand_dtypes(function, *args):
    """Returns the dtypes of the operands of the matrix products and convolutions in a function."""
    return {operand.aval.dtype for equation in equations(jax.make_jaxpr(function)(*args).jaxpr)
            if equation.primitive.name in ("dot_general", "conv_general_dilated") for operand in equation.invars}


# --- policies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "param", "compute", "scales"), [
    ("float32", F32, F32, False), ("bfloat16", BF16, BF16, False),
    ("mixed_bfloat16", F32, BF16, False), ("mixed_float16", F32, F16, True)])
def test_policies_have_the_names_and_dtypes_of_keras(name, param, compute, scales):
    policy = precision.get(name)
    assert (policy.name, policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.scales_gradients) == (
        name, param, compute, F32, scales)


def test_a_policy_and_none_are_taken_as_they_are():
    policy = Policy("half", compute_dtype="float16")
    assert precision.get(policy) is policy and precision.get(None) is None


def test_policies_are_equal_however_their_dtypes_are_written():
    assert len({Policy("half", "float32", "float16"), Policy("half", np.float32, jnp.float16)}) == 1


def test_an_unknown_name_is_refused_with_the_near_ones():
    with pytest.raises(ValueError, match=r"Unknown precision 'mixed_float_16'. Did you mean 'mixed_float16'"):
        precision.get("mixed_float_16")


def test_another_type_is_refused():
    with pytest.raises(TypeError, match=r"`precision` must be a name .* a Policy or None. Received: .* type int"):
        precision.get(16)


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
def test_a_policy_of_integers_is_refused(field):
    with pytest.raises(ValueError, match=f"`{field}` of a policy must be a floating dtype.* Received: int8"):
        Policy("small", **{field: "int8"})


def test_parameters_are_stored_in_the_dtype_of_the_policy():
    params = {"kernel": jnp.ones(2), "count": jnp.arange(2), "scale": jnp.ones(2, jnp.float8_e4m3fn)}
    kept = {"count": jnp.int32, "scale": jnp.float8_e4m3fn}
    assert dtypes(precision.get("bfloat16").cast_params(params)) == {"kernel": BF16, **kept}
    assert dtypes(MIXED_F16.cast_params(params)) == {"kernel": F32, **kept}


# --- what a module computes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("policy", "scale", "tolerance"), [
    ("float32", None, 1e-6), ("mixed_float16", SCALE, 0.01), ("mixed_bfloat16", None, 0.06)])
def test_results_are_those_of_float32_up_to_the_precision_of_the_dtype(name, policy, scale, tolerance):
    for received, expected in zip(results(name, precision.get(policy), scale), results(name, None), strict=True):
        assert_near(received, expected, tolerance)
        assert dtypes(received) == dtypes(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASTING_WHOLLY)
@pytest.mark.parametrize(("policy", "scale"), [(MIXED_F16, SCALE), (MIXED_BF16, None)], ids=["float16", "bfloat16"])
def test_every_product_and_convolution_computes_in_the_low_dtype(name, policy, scale):
    assert operand_dtypes(lambda params: gradients(params, name, policy, scale), case(name)[1]) == {
        policy.compute_dtype}


def test_a_product_in_float32_would_be_seen():
    assert operand_dtypes(lambda params: gradients(params, "mlp", None, None), case("mlp")[1]) == {F32}


@pytest.mark.slow
def test_a_layer_with_a_dtype_of_its_own_keeps_it():
    functional = as_functional([nn.Dense(4), nn.Dense(2, dtype=jnp.float32)])
    params, model_state, _ = functional.init(jax.random.key(0), ROWS)
    apply = functools.partial(functional.apply, training=False, make_key=key_maker())
    assert operand_dtypes(lambda: apply_with_policy(MIXED_BF16, apply, params, model_state, ROWS)) == {BF16, F32}


@pytest.mark.slow
def test_parameters_stored_in_bfloat16_have_gradients_in_bfloat16():
    policy = precision.get("bfloat16")
    params = policy.cast_params(case("mlp")[1])
    grads, (outputs, _) = jax.jit(lambda params: gradients(params, "mlp", policy, None))(params)
    assert set(jax.tree.leaves(dtypes(grads))) == {BF16} and outputs.dtype == F32
    assert_near(grads, results("mlp", None)[0], 0.06)


def test_inputs_are_cast_but_for_what_is_narrower_or_no_number_with_a_fraction():
    inputs = {"double": np.ones(2), "half": np.ones(2, np.float16), "tokens": np.ones(2, np.int32),
              "mask": np.ones(2, bool), "narrow": np.ones(2, ml_dtypes.float8_e5m2), "key": jax.random.key(0),
              "wave": np.ones(2, np.complex64), "none": None}
    expected = {**dtypes(inputs), "double": BF16, "half": BF16}
    seen = []
    apply_with_policy(MIXED_BF16, lambda params, state, inputs: seen.append(dtypes(inputs)) or (0, state),
                      {}, {}, inputs, SCALE)
    assert seen == [expected]


def test_outputs_are_float32_but_for_integers():
    outputs = {"logits": jnp.ones(2, jnp.float16), "choice": jnp.ones(2, jnp.int32), "constant": 0.5, "nothing": None}
    received, _ = apply_with_policy(MIXED_F16, lambda params, state, inputs: (outputs, state), {}, {}, (), SCALE)
    assert dtypes((received["logits"], received["choice"])) == (F32, jnp.int32)
    assert received["constant"] == 0.5 and received["nothing"] is None


@pytest.mark.parametrize("scale", [None, SCALE])
def test_the_model_state_keeps_its_dtypes_inside_and_outside(scale):
    state = {"mean": jnp.ones(2), "count": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}
    seen = []

    def apply(params, state, inputs):
        seen.append(dtypes(state))
        return inputs, {**state, "mean": state["mean"].astype(inputs.dtype), "count": state["count"] + 1}

    _, new_state = apply_with_policy(MIXED_F16, apply, {}, state, jnp.ones(2), scale)
    assert seen == [dtypes(state)] and dtypes(new_state) == dtypes(state)
    assert new_state["count"] == 1


@pytest.mark.parametrize(("scale", "expected"), [(SCALE, [2, 1, -np.inf, 2]), (None, [2, np.inf, -np.inf, 2])])
def test_where_gradients_are_scaled_an_overflow_leaves_the_model_state_as_it_was(scale, expected):
    state = {"value": jnp.array([1, 1, -jnp.inf, -jnp.inf]), "count": jnp.arange(4)}
    new = {"value": jnp.array([2, jnp.inf, -jnp.inf, 2]), "count": jnp.arange(4) + 1}
    _, received = apply_with_policy(MIXED_F16, lambda *_: ((), new), {}, state, (), scale)
    np.testing.assert_array_equal(received["value"], expected)
    np.testing.assert_array_equal(received["count"], new["count"])


def test_a_state_of_another_structure_is_left_to_the_step():
    _, new_state = apply_with_policy(MIXED_F16, lambda *_: (0, {"other": jnp.ones(1, jnp.float16)}), {}, {}, ())
    assert new_state["other"].dtype == F16


def test_no_policy_applies_the_module_as_it_is():
    received, _ = apply_with_policy(None, lambda params, state, inputs: (inputs, state), {}, {}, jnp.ones(2, BF16))
    assert received.dtype == BF16


# --- scaled gradients ----------------------------------------------------------------------------------------------


def product(params, state, inputs):
    return inputs * params, state


def derivative(policy, scale, weight):
    """Returns the derivatives of `weight * output` by the parameter and the input of a product: both are `weight`.

    Not compiled: XLA may leave out a cast to float16 and back.
    """
    def loss(param, value):
        return weight * apply_with_policy(policy, product, param, {}, value, scale)[0]

    return np.asarray(jax.grad(loss, argnums=(0, 1))(jnp.float32(1), jnp.float32(1)))


def test_a_gradient_too_small_for_float16_is_lost_without_a_scale():
    assert (derivative(MIXED_F16, None, 1e-9) == 0).all()


def test_a_gradient_too_small_for_float16_survives_with_a_scale():
    np.testing.assert_allclose(derivative(MIXED_F16, np.float32(2.0**24), 1e-9), 1e-9, rtol=1e-3)


def test_a_scale_too_large_makes_gradients_infinite():
    assert np.isinf(derivative(MIXED_F16, np.float32(2.0**17), 1.0)).all()


def test_the_largest_scale_loses_no_float16():
    smallest = 2.0**-24 / MAX_SCALE
    np.testing.assert_array_equal(derivative(MIXED_F16, np.float32(MAX_SCALE), smallest), np.float32(smallest))


def test_the_factor_stays_inside():
    inside = []
    spy = jax.custom_vjp(lambda value: value)
    spy.defvjp(lambda value: (value, None), lambda _, received: (inside.append(received) or received,))
    apply = lambda params, state, inputs: (spy(params * inputs), state)
    loss = lambda param: apply_with_policy(MIXED_F16, apply, param, {}, jnp.ones(()), SCALE)[0]
    assert jax.grad(loss)(jnp.ones(())) == 1
    assert inside[0].dtype == F16 and inside[0] == SCALE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_gradients_do_not_depend_on_the_scale(name):
    # Powers of two: equal but for numbers that float16 holds as subnormals.
    one, other = (results(name, MIXED_F16, np.float32(scale))[0] for scale in (2.0**10, 2.0**13))
    assert_near(one, other, 1e-4)


def two_modules(policy, scale):
    """Returns the gradients of a loss of two modules in a row by the parameters of both and by the input."""
    params = {"generator": jnp.linspace(-1, 1, 12).reshape(4, 3), "discriminator": jnp.linspace(0.1, 1, 3)[:, None]}

    def dense(params, state, inputs):
        return jnp.tanh(inputs @ params), state

    def loss(params, noise):
        fake, _ = apply_with_policy(policy, dense, params["generator"], {}, noise, scale)
        verdict, _ = apply_with_policy(policy, dense, params["discriminator"], {}, fake, scale)
        return 1e-6 * (jnp.mean(verdict) + jnp.mean(fake ** 2))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, jnp.linspace(-1, 1, 8).reshape(2, 4))


@pytest.mark.slow
def test_gradients_through_two_modules_are_right_and_need_the_scale():
    assert_near(two_modules(MIXED_F16, np.float32(2.0**15)), two_modules(None, None), 5e-3)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_near(two_modules(MIXED_F16, None), two_modules(None, None), 5e-3)


def penalised(policy, scale):
    """Returns the gradient of a critic's loss with a penalty on its gradient by its inputs."""
    inputs = jnp.linspace(-1, 1, 8).reshape(2, 4)

    def critic(params, inputs):
        def apply(params, state, inputs):
            return jnp.tanh(inputs @ params["first"]) @ params["last"], state
        return jnp.sum(apply_with_policy(policy, apply, params, {}, inputs, scale)[0])

    def loss(params):
        slopes = jax.grad(critic, argnums=1)(params, inputs)
        return critic(params, inputs) / 2 + jnp.mean(jnp.square(jnp.linalg.norm(slopes, axis=-1) - 1))

    return jax.jit(jax.grad(loss))({"first": jnp.linspace(-1, 1, 12).reshape(4, 3), "last": jnp.linspace(-0.5, 1, 3)})


def test_second_derivatives_as_in_a_gradient_penalty_are_right():
    assert_near(penalised(MIXED_F16, SCALE), penalised(None, None), 0.01)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("order", "expected"), [(1, 4 * 0.5**3), (2, 12 * 0.5**2), (3, 24 * 0.5), (4, 24)])
def test_derivatives_of_any_order_are_right(order, expected):
    def function(value):
        return apply_with_policy(MIXED_F16, lambda params, state, x: (x * x * x * x, state), {}, {}, value, SCALE)[0]

    for _ in range(order):
        function = jax.grad(function)
    assert function(jnp.float32(0.5)) == expected


def test_gradients_through_the_model_state_are_right():
    def apply(params, state, inputs):
        return params * inputs, {"mean": state["mean"] + params * params}

    def loss(param):
        _, state = apply_with_policy(MIXED_F16, apply, param, {"mean": jnp.zeros(())}, jnp.float32(3), SCALE)
        outputs, state = apply_with_policy(MIXED_F16, apply, param, state, jnp.float32(3), SCALE)
        return outputs + state["mean"]

    assert jax.grad(loss)(jnp.float32(2)) == 3 + 2 * 2 * 2


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float16, jnp.bfloat16])
def test_gradients_are_scaled_in_float32_whatever_the_dtype_of_the_parameters(dtype):
    # In float16, 1 / 2**26 is zero.
    loss = lambda param: 2.0**-20 * apply_with_policy(
        MIXED_F16, product, param, {}, jnp.ones(()), jnp.float32(2.0**26))[0]
    with jax.enable_x64(True):
        gradient = jax.grad(loss)(jnp.ones((), dtype))
        assert gradient.dtype == dtype and gradient == 2.0**-20


def test_without_a_scale_the_module_can_be_differentiated_forward():
    function = lambda value: apply_with_policy(MIXED_F16, product, jnp.float32(3), {}, value)[0]
    assert jax.jvp(function, (jnp.float32(1),), (jnp.float32(2),)) == (3, 6)
    assert not any("custom" in equation.primitive.name for equation in equations(jax.make_jaxpr(function)(1.0).jaxpr))


LOOPS = {
    "checkpoint": lambda function: lambda params: jax.checkpoint(function)(params),
    "scan": lambda function: lambda params: jax.lax.scan(lambda _, x: (function(params), x), params, jnp.arange(2))[0],
    "fori_loop": lambda function: lambda params: jax.lax.fori_loop(0, 2, lambda _, carry: function(params), params),
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_the_same_inside_of(loop):
    step = lambda params: gradients(params, "mlp", MIXED_F16, jnp.float32(SCALE))[0]
    assert_near(jax.jit(LOOPS[loop](step))(case("mlp")[1]), results("mlp", MIXED_F16, SCALE)[0], 1e-5)


@pytest.mark.slow
def test_replicas_have_the_gradients_of_one_device():
    apply, params, model_state, inputs = case("cnn")

    def step(replicated, rows):
        def loss(params):
            outputs, _ = apply_with_policy(MIXED_F16, apply, params, model_state, rows, replicated["scale"])
            return jnp.mean(jnp.square(outputs)), outputs

        grads, outputs = jax.grad(loss, has_aux=True)(replicated["params"])
        return outputs, jax.lax.pmean(grads, "replica")

    replicated = {"params": params, "scale": SCALE}
    for one, four in zip(*(run_replicas(step, number, replicated, inputs) for number in (1, 4)), strict=True):
        assert_near(four, jax.tree.map(np.asarray, one), 2e-3)


@pytest.mark.parametrize(("received", "name"), [("16-mixed", "mixed_float16"), ("bf16", "mixed_bfloat16")])
def test_a_name_of_lightning_says_which_name_to_give(received, name):
    with pytest.raises(ValueError, match=f"Unknown precision '{received}'. Give '{name}'"):
        precision.get(received)
