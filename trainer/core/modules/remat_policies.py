"""The policies of rematerialization, by JAX's names: which values inside of a layer are kept for the backward pass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax

from trainer.core import errors

_DEVICE, _HOST = "device", "pinned_host"


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """A policy of `jax.checkpoint`.

    Attributes:
      name: its name, the same text in every process.
      saves: the policy, a function of a primitive, its inputs and parameters.
      memory: the kind of memory that it moves values to; None if it is not known to move any.
    """

    name: str
    saves: Callable[..., Any] = dataclasses.field(compare=False)
    memory: str | None = None

    def __str__(self) -> str:
        return self.name

    def keeping(self, name: str) -> Callable[..., Any]:
        """Returns the policy that also keeps values that `checkpoint_name` has given a name."""
        def saves(primitive: Any, *args: Any, **params: Any) -> Any:
            if primitive.name == "name" and params["name"] == name:
                return True
            return self.saves(primitive, *args, **params)

        return saves

    def check_memories(self, devices: Iterable[Any]) -> None:
        """Raises ValueError if a device lacks the memory that the policy moves values to."""
        if self.memory is None:
            return
        for device in devices:
            kinds = sorted(memory.kind for memory in device.addressable_memories())
            if self.memory not in kinds:
                raise ValueError(f"`remat={self.name!r}` keeps values in the memory {self.memory!r}, which the device "
                                 f"{device} lacks. It has: {', '.join(kinds)}. Use a policy that keeps or recomputes "
                                 "them, such as 'dots_with_no_batch_dims_saveable'.")


Remat = RematPolicy | bool
"""Whether to rematerialize, by a policy or, for True, keeping nothing."""

NOTHING = RematPolicy("nothing_saveable", jax.checkpoint_policies.nothing_saveable)


def get(remat: object) -> RematPolicy | None:
    """Returns the policy for the argument `remat` of `compile`; None for no rematerialization.

    Args:
      remat: False, True, a name in `jax.checkpoint_policies`, or a policy.

    Raises:
      ValueError: for an unknown name, or the name of a function that makes policies from names.
      TypeError: for a value of another type, or a function that JAX cannot call as a policy.

    >>> get("dots_saveable").name, get(True).name, get(False)
    ('dots_saveable', 'nothing_saveable', None)
    """
    if isinstance(remat, RematPolicy):
        return remat
    if isinstance(remat, bool):
        return NOTHING if remat else None
    known = _policies()
    if isinstance(remat, str):
        if remat in known:
            return known[remat]
        if remat in vars(jax.checkpoint_policies):
            raise ValueError(f"`remat={remat!r}` is the name of a function that makes a policy. {_call_of(remat)}")
        near = errors.near_names(remat, known)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"Unknown remat {remat!r}.{hint} JAX's policies: {', '.join(sorted(known))}.")
    if callable(remat):
        policy: Any = remat
        _check_is_policy(policy)
        name = getattr(policy, "__qualname__", None) or repr(policy)  # JAX's are dataclasses without addresses
        return next((each for each in known.values() if each.saves is policy), RematPolicy(name, policy))
    raise errors.wrong_type("remat", remat, "True, False, a name in `jax.checkpoint_policies`, or such a policy")


def _check_is_policy(policy: Any) -> None:
    """Checks that JAX can call a policy: `policy(primitive, *inputs, **parameters)`."""
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):
        return  # a built-in function may have no signature
    try:
        signature.bind(None, None, any_parameter=None)
    except TypeError:
        name = next((name for name, made in vars(jax.checkpoint_policies).items() if made is policy), None)
        if name is not None:
            raise TypeError(f"`remat={name}` is a function that makes a policy. {_call_of(name)}") from None
        raise TypeError("`remat` must be a policy that JAX calls as `policy(primitive, *inputs, **parameters)`. "
                        f"Received: a function of {signature}. Write such a function, or take one of "
                        "`jax.checkpoint_policies`.") from None


def _call_of(name: str) -> str:
    return (f"Call it: `remat=jax.checkpoint_policies.{name}(...)`, with the names that layers give by "
            "`jax.ad_checkpoint.checkpoint_name`.")


def _policies() -> dict[str, RematPolicy]:
    policies = jax.checkpoint_policies
    plain = ("everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots",
             "dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims")
    offloading = policies.offload_dot_with_no_batch_dims(_DEVICE, _HOST)
    return {**{name: RematPolicy(name, getattr(policies, name)) for name in plain},
            "offload_dot_with_no_batch_dims": RematPolicy("offload_dot_with_no_batch_dims", offloading, _HOST)}
