"""The options of `compile` for the computation of a step, apart from its loss, metrics and optimizer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer import regularizers
from trainer.core import arguments, errors, precision, tree_paths
from trainer.core.compile import recompilation_guard
from trainer.core.modules import FunctionalModule, remat_policies
from trainer.core.modules.remat_policies import Remat
from trainer.core.types import PyTree
from trainer.core.updates.spikes import SpikeRule

BATCH_NORM_POLICIES = ("global", "per_replica")


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """The checked options of `Model.compile`, which documents them.

    Attributes:
      eager: whether steps run uncompiled.
      policy: the dtype policy of `precision`, if any.
      spike_rule: the rule of `SpikeGuard`, which `compile` does not set.
      trained_only: as in `FunctionalModule`.
    """

    steps_per_execution: int | str = "auto"
    eager: bool = False
    microbatches: int = 1
    policy: precision.Policy | None = None
    batch_norm: str = "global"
    remat: Remat = False
    ema_decay: float | None = None
    freeze: tuple[str, ...] = ()
    trained_only: tuple[str, ...] = ()
    data_on_device: bool | str = "auto"
    compile_guard: str | int = "warn"
    skip_non_finite: bool = False
    log_norms: bool = False
    spike_rule: SpikeRule | None = None
    regularizers: tuple[tuple[str, regularizers.Penalty], ...] = ()
    deterministic: bool = False
    matmul_precision: str | None = None

    @classmethod
    def checked(
        cls, *, steps_per_execution: Any, run_eagerly: Any, jit_compile: Any, microbatches: Any, precision_name: Any,
        batch_norm: Any, remat: Any, ema_decay: Any, freeze: Any,
        module: FunctionalModule, data_on_device: Any, guard_mode: Any, skip_non_finite: Any,
        log_norms: Any, penalties: Any, deterministic: Any, matmul_precision: Any,
    ) -> CompileOptions:
        """Returns the options for the arguments of `compile`.

        In `freeze`, filters of NNX become the paths of the parameters that they select among the `param_variables` of
        the module.

        Raises:
          ValueError: for invalid values.
          TypeError: for arguments of a wrong type.
        """
        if batch_norm not in BATCH_NORM_POLICIES:
            raise errors.unknown_name("batch_norm", str(batch_norm), BATCH_NORM_POLICIES)
        steps_per_execution = arguments.as_count_or_word("steps_per_execution", steps_per_execution, ["auto"])
        if jit_compile not in (True, False, "auto"):
            raise ValueError(f"`jit_compile` must be True, False or 'auto'. Received: {jit_compile!r}.")
        arguments.check_count("microbatches", microbatches, 1)
        arguments.require_bool(run_eagerly=run_eagerly, skip_non_finite=skip_non_finite,
                               log_norms=log_norms, deterministic=deterministic)
        is_eager = bool(run_eagerly) or jit_compile is False
        check_eager(is_eager, deterministic)
        if not isinstance(data_on_device, bool) and data_on_device != "auto":
            raise ValueError(f"`data_on_device` must be True, False or 'auto'. Received: {data_on_device!r}.")
        return cls(
            steps_per_execution=steps_per_execution,
            eager=is_eager,
            microbatches=microbatches,
            policy=precision.get(precision_name),
            batch_norm=batch_norm,
            remat=remat_policies.get(remat) or False,
            ema_decay=_checked_decay(ema_decay),
            freeze=_frozen_patterns(freeze, module.param_variables),
            trained_only=module.trained_only,
            data_on_device=data_on_device,
            compile_guard=recompilation_guard.check_mode(guard_mode),
            skip_non_finite=skip_non_finite,
            log_norms=log_norms,
            regularizers=tuple((pattern, penalty) for pattern, identifier in _by_pattern(
                "regularizers", penalties, "penalties, such as {'**/kernel': trainer.regularizers.L2(1e-4)}")
                if (penalty := regularizers.get(identifier)) is not None),
            deterministic=deterministic,
            matmul_precision=precision.check_matmul_precision(matmul_precision),
        )

    def penalty_of(self, params: PyTree) -> jax.Array | None:
        """Returns the penalties of the regularizers, a float32 scalar; None without regularizers."""
        if not self.regularizers:
            return None
        total = jnp.zeros((), jnp.float32)
        for pattern, penalty in self.regularizers:
            for path, leaf in tree_paths.named_leaves(params).items():
                if tree_paths.matches(pattern, path):
                    value = jnp.asarray(penalty(leaf), jnp.float32)
                    if value.ndim:
                        raise ValueError(f"The penalty of `regularizers` for {pattern!r} must be a scalar. Received: "
                                         f"an array of shape {value.shape} for {path!r}. Sum it: `jnp.sum(...)`.")
                    total += value
        return total

    def stored(self, params: PyTree) -> Any:
        """Returns parameters in their stored dtypes."""
        return params if self.policy is None else self.policy.cast_params(params)

    def is_frozen(self, path: str) -> bool:
        """Returns whether the parameter of a path is frozen."""
        return tree_paths.is_left_out(self.freeze, self.trained_only, path)

    def freezes_all(self, paths: Iterable[str]) -> bool:
        """Returns whether `freeze` covers all given paths of parameters."""
        return bool(self.freeze or self.trained_only) and all(self.is_frozen(path) for path in paths)

    @property
    def scales_gradients(self) -> bool:
        """Whether there is a dynamic loss scale."""
        return self.policy is not None and self.policy.scales_gradients

    def check_asynchronous(self) -> None:
        """Raises ValueError for options that steps on workers of parameter servers do not support."""
        fixes = {
            "run_eagerly=True": (self.eager, "debug under `OneDeviceStrategy`"),
            "deterministic=True": (self.deterministic, "train under a synchronous strategy, as workers' gradients come "
                                   "in an order that changes"),
            "log_norms=True": (self.log_norms, "train under a synchronous strategy"),
            "callbacks.SpikeGuard": (self.spike_rule is not None, "use `TerminateOnNaN`"),
            "skip_non_finite=True": (self.skip_non_finite, "use `TerminateOnNaN`"),
            'precision="mixed_float16"': (self.scales_gradients, 'use "mixed_bfloat16", which needs no loss scale'),
        }
        for given, (is_given, fix) in fixes.items():
            if is_given:
                raise ValueError(f"`compile({given})` cannot be used under ParameterServerStrategy: {fix}.")


def check_eager(eager: bool, deterministic: bool) -> None:
    """Raises ValueError for uncompiled steps with an option about compilation."""
    if deterministic and eager:
        raise ValueError("`deterministic=True` is about how steps are compiled, and `run_eagerly=True` does not "
                         "compile them. Give one of them.")


def _checked_decay(ema_decay: Any) -> float | None:
    if ema_decay is None:
        return None
    arguments.require_decay_rate(ema_decay=ema_decay)
    return float(ema_decay)


def _by_pattern(argument: str, given: object, values: str) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise errors.wrong_type(argument, given, f"a dict from path patterns to {values}")
    for pattern in given:
        tree_paths.check_pattern(argument, pattern)
    return list(given.items())


def _frozen_patterns(freeze: object, variables: Mapping[tuple[Any, ...], Any]) -> tuple[str, ...]:
    if freeze is None:
        return ()
    given = freeze if isinstance(freeze, Sequence) and not isinstance(freeze, str) else (freeze,)
    patterns = []
    for item in given:
        if callable(item):
            patterns += _paths_of(item, variables)
        elif isinstance(item, str):
            tree_paths.check_pattern("freeze", item)
            patterns.append(item)
        else:
            raise errors.wrong_type("freeze", item, "a list of path patterns, such as ['encoder'], or of filters of "
                                    "NNX, such as nnx.Not(nnx.LoRAParam)")
    return tuple(patterns)


def _paths_of(nnx_filter: Any, variables: Mapping[tuple[Any, ...], Any]) -> list[str]:
    if not variables:
        raise TypeError(f"`freeze` has the filter {_shown(nnx_filter)}, which selects parameters of NNX modules, and "
                        "this model has none. Give path patterns, such as ['encoder'].")
    from flax import nnx  # slow to import, and a module of Linen needs none

    selects = nnx.filterlib.to_predicate(nnx_filter)
    paths = [tree_paths.SEPARATOR.join(map(str, path)) for path, value in variables.items() if selects(path, value)]
    if not paths:
        known = [tree_paths.SEPARATOR.join(map(str, path)) for path in variables]
        more = ", ..." if len(known) > errors.MAX_ITEMS else ""
        raise ValueError(f"`freeze` has the filter {_shown(nnx_filter)}, which selects none of the {len(known)} "
                         f"parameters: {', '.join(known[:errors.MAX_ITEMS])}{more}.")
    return [f"^{re.escape(path)}$" for path in paths]


def _shown(nnx_filter: Any) -> str:
    return nnx_filter.__name__ if hasattr(nnx_filter, "__name__") else repr(nnx_filter)
