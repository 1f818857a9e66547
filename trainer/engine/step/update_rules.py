"""The conversion of the optimizer of `compile` to the update rules of a model's parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.core import configs, tree_paths
from trainer.engine.step.compile_options import CompileOptions
from trainer.optimizers.named import NamedRules
from trainer.optimizers.registry import as_optimizer
from trainer.optimizers.update_rule import UpdateRule


def make_update_rules(
    optimizer: Any, options: CompileOptions, variables: Mapping[tuple[Any, ...], Any] | None = None
) -> UpdateRule | NamedRules | None:
    """Returns the rule for all parameters, or a rule per name for a dict of optimizers; None without an optimizer.

    Args:
      optimizer: as in `Model.compile`.
      options: all other arguments of it.
      variables: the parameters of an NNX module by their paths, as in `FunctionalModule.param_variables`.

    Raises:
      ValueError: for unknown names, or an empty dict.
      TypeError: for an object that is not an optimizer.
    """
    # Depends on the patterns only, so that rules of equal options are equal.
    is_frozen = (functools.partial(tree_paths.is_left_out, options.freeze, options.trained_only)
                 if options.freeze or options.trained_only else None)

    def rule(part: Any, prefix: str) -> UpdateRule:
        below = tuple(prefix.split(tree_paths.SEPARATOR)[:-1])
        trained = {path[len(below):]: variable for path, variable in (variables or {}).items()
                   if tuple(map(str, path[:len(below)])) == below
                   and not options.is_frozen(tree_paths.SEPARATOR.join(map(str, path)))}
        return UpdateRule(as_optimizer(part, trained), prefix=prefix, is_frozen=is_frozen,
                          ema_decay=options.ema_decay, scales_gradients=options.scales_gradients,
                          skips_non_finite=options.skip_non_finite, keeps_norms=options.log_norms,
                          spike_rule=options.spike_rule)

    if optimizer is None:
        return None
    if not isinstance(optimizer, Mapping) or configs.is_config(optimizer):
        return rule(optimizer, "")
    return NamedRules({name: rule(part, f"{name}{tree_paths.SEPARATOR}") for name, part in optimizer.items()})


def with_options(rules: UpdateRule | NamedRules | None, options: CompileOptions) -> UpdateRule | NamedRules | None:
    """Returns rules of the same optimizers for other options."""
    optimizers_of = rules.given if isinstance(rules, UpdateRule) else (
        None if rules is None else {name: rule.given for name, rule in rules.items()})
    return make_update_rules(optimizers_of, options)


def check_asynchronous(rules: UpdateRule | NamedRules | None) -> None:
    """Raises ValueError for an optimizer that steps on workers of parameter servers do not support."""
    for rule in rules.values() if isinstance(rules, NamedRules) else () if rules is None else (rules,):
        if rule.optimizer.gradient_accumulation_steps > 1:
            raise ValueError("`gradient_accumulation_steps` cannot be used under ParameterServerStrategy, where each "
                             "worker's gradients come on their own: use larger batches, or fewer workers.")


def check_names(rules: object, names: Iterable[str], what: str) -> None:
    """Raises ValueError unless a dict of optimizers has exactly these names, which are of the kind `what`."""
    names = sorted(names)
    if isinstance(rules, NamedRules) and sorted(map(str, rules)) != names:
        untrained = next((name for name in names if name not in rules), None)
        fix = "" if untrained is None else f" One that is not to be trained has `optax.set_to_zero()`: {untrained!r}?"
        raise ValueError(f"`optimizer` is a dict, so it must have one optimizer per {what}. "
                         f"Received: {sorted(map(str, rules))}; the model's are {names or 'not named'}.{fix}")
