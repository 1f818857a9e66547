"""Dtype policies and dynamic loss scaling: training in float16 or bfloat16 with weights and losses in float32.

Owns the boundary of a module: the casts of parameters, inputs and outputs, the scale of gradients inside the module,
and the updates of the scale. It knows neither the kind of the module nor the loss, so it works for every `compute_loss`
and `train_step`, for several losses, and for gradients that pass through several modules.

The boundary leaves most inputs to the layers, which cast them: a cast changes ids, years and seconds. Values that the
boundary does not see keep their dtypes:

- A layer with a `dtype` of its own computes in it, such as `nn.Dense(10, dtype=jnp.float32)`. This keeps a part of a
  model in float32.
- A layer without a dtype computes in the widest dtype of its inputs and parameters, so a float32 array that is neither
  parameter nor input, such as a constant table, makes it float32. Modules that receive a `compute_dtype` (see
  `modules`) pass it to their layers; operations outside of Flax's layers still promote.

Sources: Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740; the names of
`keras.DTypePolicy` and the schedule of `keras.optimizers.LossScaleOptimizer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import errors
from trainer.core.ambient.jax_options import jax_config
from trainer.core.tree_paths import restricted, updated
from trainer.core.types import PyTree

Apply = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(params, model_state, inputs) -> (outputs, new_model_state)`."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a module's parameters, computations and outputs.

    Args:
      name: name of the policy.
      param_dtype: floating dtype of parameters in storage and updates.
      compute_dtype: floating dtype of the module's computations.
      output_dtype: floating dtype of the module's outputs, which the loss and the metrics receive.
      scales_gradients: whether gradients need a loss scale, because of float16's narrow range.

    Raises:
      ValueError: a dtype is not a floating-point dtype.

    >>> get("mixed_float16").compute_dtype
    dtype('float16')
    """

    name: str
    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    output_dtype: Any = jnp.float32
    scales_gradients: bool = False

    def __post_init__(self) -> None:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = jnp.dtype(getattr(self, field))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"`{field}` of a policy must be a floating dtype, such as float32 or bfloat16. "
                                 f"Received: {dtype}.")
            object.__setattr__(self, field, dtype)  # "float16" and jnp.float16 make equal policies

    def cast_params(self, params: PyTree) -> Any:
        """Returns new parameters with floating leaves in `param_dtype`, and other leaves unchanged.

        Leaves with a narrower dtype than `param_dtype` keep it, because a layer's own `param_dtype` chose it.

        >>> get("bfloat16").cast_params({"kernel": jnp.ones((2, 3)), "ids": jnp.arange(3)})["kernel"].dtype
        dtype(bfloat16)
        """
        return _narrowed(params, self.param_dtype)


_OF_LIGHTNING = {  # and of PyTorch
    "16-mixed": "mixed_float16", "fp16": "mixed_float16", "float16": "mixed_float16", "16": "mixed_float16",
    "bf16-mixed": "mixed_bfloat16", "bf16": "mixed_bfloat16", "bf16-true": "bfloat16",
    "32": "float32", "32-true": "float32", "fp32": "float32",
}
POLICIES = {policy.name: policy for policy in (
    Policy("float32"),
    Policy("bfloat16", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16),
    Policy("mixed_bfloat16", compute_dtype=jnp.bfloat16),
    Policy("mixed_float16", compute_dtype=jnp.float16, scales_gradients=True),
)}


def get(precision: str | Policy | None) -> Policy | None:
    """Returns the policy of a name.

    Args:
      precision: "float32", "bfloat16", "mixed_bfloat16" or "mixed_float16", as in Keras; a `Policy`; or None, which
        keeps all dtypes of the module and the data.

    Raises:
      ValueError: the name is unknown.
      TypeError: `precision` is none of these.

    >>> get("mixed_bfloat16").param_dtype
    dtype('float32')
    """
    if precision is None or isinstance(precision, Policy):
        return precision
    if not isinstance(precision, str):
        raise errors.wrong_type("precision", precision, "a name such as 'mixed_bfloat16', a Policy or None")
    if precision not in POLICIES:
        if precision in _OF_LIGHTNING:
            raise ValueError(f"Unknown precision {precision!r}. Give {_OF_LIGHTNING[precision]!r}.")
        raise errors.unknown_name("precision", precision, POLICIES)
    return POLICIES[precision]


MATMUL_PRECISIONS = ("default", "high", "highest")


def check_matmul_precision(name: object) -> str | None:
    """Returns `name`, or raises ValueError if it is neither None nor in `MATMUL_PRECISIONS`."""
    if name is not None and name not in MATMUL_PRECISIONS:
        raise errors.unknown_name("matmul_precision", str(name), MATMUL_PRECISIONS)
    return name


def with_matmul_precision(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that sets the precision of traced float32 products, and of their gradients.

    Args:
      name: a name in `MATMUL_PRECISIONS`, see `jax.lax.Precision`; None leaves it to `jax.default_matmul_precision`.

    >>> with with_matmul_precision("highest"):
    ...     print(jax.make_jaxpr(jnp.dot)(jnp.ones(2), jnp.ones(2)).eqns[0].params["precision"][0].name)
    HIGHEST
    """
    return contextlib.nullcontext() if name is None else jax.default_matmul_precision(name)


def multiplies_float32(platform: str, name: str | None) -> bool:
    """Returns whether float32 products use unrounded operands, unlike TF32 on GPUs.

    Args:
      platform: platform of the devices, such as "cpu".
      name: argument of `with_matmul_precision`.

    >>> multiplies_float32("cpu", None), multiplies_float32("gpu", None), multiplies_float32("gpu", "highest")
    (True, False, True)
    """
    return platform == "cpu" or (name or jax_config.jax_default_matmul_precision) in ("highest", "float32")


# --- the boundary of a module --------------------------------------------------------------------------------------


def apply_with_policy(
    policy: Policy | None, apply: Apply, params: PyTree, model_state: PyTree, inputs: PyTree,
    scale: jax.Array | None = None, casts: PyTree = True,
) -> tuple[Any, Any]:
    """Returns the outputs and the new model state of a module that computes according to the policy.

    Gradients with respect to `params`, `inputs` and `model_state` have the dtypes of these arguments. With a `scale`,
    gradients inside of the module are `scale` times as large, and gradients outside of it are unchanged: derivatives of
    any order and through any number of modules are the true gradients. A scale that is too large makes them infinite or
    NaN.

    Args:
      policy: the policy; None applies the module unchanged.
      apply: the module as a function.
      params: its parameters. Floating leaves are cast to `compute_dtype`, except for narrower leaves.
      model_state: its state, which is not cast: running averages need float32.
      inputs: one batch.
      scale: factor of gradients inside of the module, a float32 scalar; None for no scaling.
      casts: whether to cast a floating leaf of `inputs` like parameters, for all leaves or as a tree of each. A cast
        changes whole numbers, of which bfloat16 represents all only up to 256; see `engine/step/input_casts.py`.

    Returns:
      `(outputs, new_model_state)`, with floating outputs in `output_dtype` and the state in the dtypes of
      `model_state`. With a `scale`, a finite number of the state keeps its value if its next value is infinite or NaN:
      a step that overflows is skipped, and must not spoil running averages that no later step can repair.

    >>> def dense(params, model_state, x):
    ...     return x @ params, model_state
    >>> outputs, _ = apply_with_policy(get("mixed_bfloat16"), dense, jnp.full((2, 1), 0.001), {}, jnp.ones((3, 2)))
    >>> outputs.dtype, float(outputs[0, 0])
    (dtype('float32'), 0.00199...)
    """
    if policy is None:
        return apply(params, model_state, inputs)
    if scale is not None:
        # Before the casts: in the backward pass the casts come first, and the division is in float32.
        params, model_state, inputs = _cotangents_times((params, model_state, inputs), 1 / scale)
    outputs, new_model_state = apply(
        _narrowed(params, policy.compute_dtype), model_state, _narrowed(inputs, policy.compute_dtype, casts))
    outputs = jax.tree.map(lambda leaf: _cast(leaf, policy.output_dtype), outputs)
    # The step reports a state of another structure; sown values are not part of it.
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(model_state)
    kept = restricted(new_model_state, model_state)
    if structure == jax.tree.structure(kept):
        kept = jax.tree.map(lambda new, old: _cast(new, old.dtype), kept, model_state)
        if scale is not None:
            kept = jax.tree.map(_kept_finite, kept, model_state)
        new_model_state = updated(new_model_state, kept)
    if scale is not None:
        # After the casts: the backward pass multiplies in float32, before a small gradient can become zero.
        outputs, new_model_state = _cotangents_times((outputs, new_model_state), scale)
    return outputs, new_model_state


def _is_floating(leaf: jax.Array) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _cast(leaf: jax.Array, dtype: DTypeLike) -> Any:
    return jnp.asarray(leaf, dtype) if _is_floating(leaf) and leaf.dtype != dtype else leaf


def _kept_finite(new: jax.Array, old: jax.Array) -> Any:
    return jnp.where(jnp.isfinite(new) | ~jnp.isfinite(old), new, old) if _is_floating(new) else new


def _narrowed(tree: PyTree, dtype: DTypeLike, casts: PyTree = True) -> Any:
    if isinstance(casts, bool):
        casts = jax.tree.map(lambda leaf: casts, tree)
    return jax.tree.map(
        lambda leaf, is_cast: _cast(leaf, dtype) if is_cast and is_narrowed(leaf, dtype) else leaf, tree, casts)


def is_narrowed(leaf: Any, dtype: DTypeLike) -> bool:
    """Returns whether a cast to a compute dtype narrows a leaf: a floating array of that width or more."""
    # Also for equal widths: JAX would promote float16 and bfloat16 to float32.
    return _is_floating(leaf) and leaf.dtype.itemsize >= jnp.dtype(dtype).itemsize


def _cotangents_times(tree: PyTree, factor: jax.Array) -> Any:
    """Returns `tree`; the backward pass multiplies the cotangents of its floating leaves by `factor`."""
    # Leaf by leaf, so that undifferentiated leaves get no cotangents.
    return jax.tree.map(lambda leaf: _value(leaf, factor) if _is_floating(leaf) else leaf, tree)


# A value is the same on both sides of the boundary; its cotangent is `factor` times as large on the other.
# Derivatives may be differentiated again, as in gradient penalties. So the rules consist of the same two
# functions: the cotangent of a cotangent crosses like a value, or second derivatives would lack a factor.


@jax.custom_vjp
def _value(value: jax.Array, factor: jax.Array) -> jax.Array:
    return value


@jax.custom_vjp
def _cotangent(cotangent: jax.Array, factor: jax.Array) -> jax.Array:
    return (cotangent.astype(jnp.float32) * factor).astype(cotangent.dtype)


# None: the factor is not differentiated.
_value.defvjp(lambda value, factor: (_value(value, factor), factor),
              lambda factor, received: (_cotangent(received, factor), None))
_cotangent.defvjp(lambda cotangent, factor: (_cotangent(cotangent, factor), factor),
                  lambda factor, received: (_value(received, factor), None))


# --- the loss scale ------------------------------------------------------------------------------------------------

INITIAL_SCALE = 2.0**15
GROWTH_STEPS = 2000
MIN_SCALE = 2.0**-15
MAX_SCALE = 2.0**100
"""The smallest float16, 2**-24, divided by this scale is still a normal float32."""


class LossScale(NamedTuple):
    """The state of dynamic loss scaling.

    Attributes:
      scale: factor of gradients inside of modules, a float32 scalar and a power of two.
      good_steps: number of steps with finite gradients since the last change of the scale, an int32 scalar.
    """

    scale: jax.Array
    good_steps: jax.Array


def initial_loss_scale(scale: float = INITIAL_SCALE) -> LossScale:
    """Returns the loss scale before the first step, by default Keras's 2**15.

    >>> float(initial_loss_scale().scale)
    32768.0
    """
    return LossScale(jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32))


def next_loss_scale(loss_scale: LossScale, is_finite: jax.Array, growth_steps: int = GROWTH_STEPS) -> LossScale:
    """Returns the loss scale after a step.

    The scale is halved if gradients are not finite, and doubled after 2000 steps with finite gradients. This is the
    schedule of Keras's `LossScaleOptimizer`, with bounds that Keras lacks. Without the lower bound, 2**-15, a model
    whose gradients are NaN for another reason would reach a scale of zero, and never recover. Without the upper bound,
    2**100, a model whose gradients are all zero would reach an infinite scale, and NaN.

    Args:
      loss_scale: the loss scale of the step.
      is_finite: whether all gradients of the step are finite, a boolean scalar that is equal on all replicas, such as
        `all_finite` of reduced gradients.
      growth_steps: number of such steps after which the scale is doubled.

    >>> float(next_loss_scale(initial_loss_scale(), jnp.array(False)).scale)
    16384.0
    """
    scale, good_steps = loss_scale
    good_steps = jnp.where(is_finite, good_steps + 1, 0)
    grows = good_steps >= growth_steps
    grown = jnp.where(grows, jnp.minimum(scale * 2, MAX_SCALE), scale)
    return LossScale(
        scale=jnp.where(is_finite, grown, jnp.maximum(scale / 2, MIN_SCALE)),
        good_steps=jnp.where(grows, 0, good_steps),
    )


# --- skipped updates -----------------------------------------------------------------------------------------------


class SkippedUpdates(NamedTuple):
    """Counts of updates that were skipped because of non-finite gradients.

    Attributes:
      total: number of all skipped updates, an int32 scalar.
      in_a_row: number of skipped updates since the last update, an int32 scalar.
    """

    total: jax.Array
    in_a_row: jax.Array


def no_skipped_updates() -> SkippedUpdates:
    """Returns the counts before the first update.

    >>> int(no_skipped_updates().total)
    0
    """
    return SkippedUpdates(*jax.device_put((np.int32(0), np.int32(0))))  # explicit transfer: allowed between steps


def next_skipped_updates(skipped: SkippedUpdates, is_finite: jax.Array) -> SkippedUpdates:
    """Returns the counts after an update, which is skipped unless `is_finite`.

    >>> skipped = next_skipped_updates(no_skipped_updates(), jnp.array(False))
    >>> [int(count) for count in next_skipped_updates(skipped, jnp.array(True))]
    [1, 0]
    """
    return SkippedUpdates(total=skipped.total + jnp.where(is_finite, 0, 1),
                          in_a_row=jnp.where(is_finite, 0, skipped.in_a_row + 1))


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether all numbers in a tree of arrays are finite, a boolean scalar.

    >>> bool(all_finite({"kernel": jnp.array([1.0, jnp.inf]), "count": jnp.array(3)}))
    False
    """
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack(finite).all() if finite else jnp.array(True)


def where_finite(is_finite: jax.Array, new: PyTree, old: PyTree) -> Any:
    """Returns the tree `new` if `is_finite`, a boolean scalar, else `old`, a tree of the same structure and dtypes.

    >>> where_finite(jnp.array(False), {"step": jnp.array(4)}, {"step": jnp.array(3)})
    {'step': Array(3, dtype=int32...)}
    """
    return jax.tree.map(lambda new_leaf, old_leaf: jnp.where(is_finite, new_leaf, old_leaf), new, old)
