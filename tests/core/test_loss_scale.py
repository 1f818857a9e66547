"""The loss scale follows Keras's schedule within bounds, and steps that are not finite are left out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.module_cases import key_maker
from tests.support.networks import LinenMLP, classification
from trainer.core import precision
from trainer.core.modules import as_functional
from trainer.core.precision import GROWTH_STEPS, MAX_SCALE, MIN_SCALE, LossScale, apply_with_policy


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


def scale_after(steps, scale=2.0**15, good_steps=0):
    """Returns the loss scale after steps that were finite or not: the schedule in plain Python."""
    for is_finite in steps:
        if not is_finite:
            scale, good_steps = max(scale / 2, MIN_SCALE), 0
        elif good_steps == GROWTH_STEPS - 1:
            scale, good_steps = min(scale * 2, MAX_SCALE), 0
        else:
            good_steps += 1
    return scale, good_steps


@jax.jit
def scanned(loss_scale, steps):
    return jax.lax.scan(lambda carry, is_finite: (precision.next_loss_scale(carry, is_finite), None),
                        loss_scale, steps)[0]


@settings(max_examples=25)
@given(bad=st.sets(st.integers(0, 9999), max_size=12), scale=st.sampled_from([2.0**15, MIN_SCALE, MAX_SCALE, 1.0]))
def test_the_loss_scale_follows_the_schedule(bad, scale):
    steps = np.ones(10000, bool)
    steps[list(bad)] = False
    start = precision.initial_loss_scale()._replace(scale=jnp.float32(scale))
    after = scanned(start, steps)
    assert dtypes(after) == dtypes(start) == LossScale(jnp.float32, jnp.int32)
    assert tuple(map(float, after)) == scale_after(steps, scale)


def test_the_loss_scale_starts_grows_and_shrinks_as_in_keras():
    steps = [True] * GROWTH_STEPS + [False, False]
    scales = [float(scanned(precision.initial_loss_scale(), np.array(steps[:count])).scale)
              for count in (GROWTH_STEPS - 1, GROWTH_STEPS, GROWTH_STEPS + 1, GROWTH_STEPS + 2)]
    assert scales == [2.0**15, 2.0**16, 2.0**15, 2.0**14]


@pytest.mark.parametrize(("is_finite", "bound"), [(True, MAX_SCALE), (False, MIN_SCALE)])
def test_the_loss_scale_stays_within_its_bounds(is_finite, bound):
    after = scanned(precision.initial_loss_scale(), np.full(100 * GROWTH_STEPS, is_finite))
    assert after.scale == bound


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_are_found(dtype, value):
    tree = {"good": jnp.ones(3, dtype), "count": jnp.arange(2), "bad": jnp.array([1, value, 2], dtype)}
    assert not precision.all_finite(tree)
    assert precision.all_finite({**tree, "bad": jnp.finfo(dtype).max})


def test_a_tree_without_floats_is_finite():
    found = precision.all_finite({"count": jnp.arange(2), "nothing": None})
    assert found and found.dtype == bool and found.shape == ()


@pytest.mark.parametrize("is_finite", [True, False])
def test_one_of_two_trees_is_selected(is_finite):
    new = {"kernel": jnp.full(2, jnp.nan), "step": jnp.array(4), "key": jax.random.key(1), "empty": None}
    old = {"kernel": jnp.ones(2, jnp.float32), "step": jnp.array(3), "key": jax.random.key(2), "empty": None}
    selected, expected = precision.where_finite(jnp.array(is_finite), new, old), new if is_finite else old
    assert dtypes(selected) == dtypes(expected) and (selected["key"] == expected["key"]).all()
    np.testing.assert_array_equal(selected["kernel"], expected["kernel"])
    assert selected["step"] == expected["step"]


@pytest.mark.slow
def test_training_recovers_from_a_scale_too_large_and_learns_as_in_float32():
    x, labels, _ = classification(32)
    functional = as_functional(LinenMLP())
    params, model_state, _ = functional.init(jax.random.key(0), x)
    apply = functools.partial(functional.apply, training=True, make_key=key_maker())

    def step(policy, carry):
        params, loss_scale, skipped, _ = carry

        def loss(params):
            logits, _ = apply_with_policy(policy, apply, params, model_state, x, loss_scale.scale if policy else None)
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))

        value, grads = jax.value_and_grad(loss)(params)
        is_finite = precision.all_finite(grads)
        updated = jax.tree.map(lambda param, grad: param - 0.5 * grad, params, grads)
        return (precision.where_finite(is_finite, updated, params),
                precision.next_loss_scale(loss_scale, is_finite),
                precision.next_skipped_updates(skipped, is_finite), value)

    def train(policy, steps):
        start = precision.initial_loss_scale()._replace(scale=jnp.float32(2.0**30))
        return jax.jit(lambda carry: jax.lax.fori_loop(0, steps, lambda _, carry: step(policy, carry), carry))(
            (params, start, precision.no_skipped_updates(), jnp.float32(0)))

    trained, loss_scale, skipped_updates, value = train(precision.get("mixed_float16"), 60)
    skipped = int(skipped_updates.total)
    assert 8 < skipped < 20 and loss_scale.scale == 2.0**30 / 2**skipped
    expected, _, _, expected_value = train(None, 60 - skipped)
    np.testing.assert_allclose(value, expected_value, rtol=0.01)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=0.02), trained, expected)
