"""Update rules by the name of the parameters that they update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.optimizers.update_rule import UpdateRule


def optimizer_kinds(rules: Any) -> Any:
    """Returns the kind of the rule's optimizer, a dict of kinds by name for `NamedRules`, or None without rules."""
    if isinstance(rules, NamedRules):
        return {name: rule.optimizer.kind for name, rule in rules.items()}
    return None if rules is None else rules.optimizer.kind


class NamedRules(Mapping[str, UpdateRule]):
    """A mapping from names to update rules. It compares by its rules, so it can be static metadata of a pytree.

    Example:
      >>> from trainer import optimizers
      >>> list(NamedRules({"generator": UpdateRule(optimizers.get("adam"))}))
      ['generator']
    """

    def __init__(self, rules: Mapping[str, UpdateRule]):
        self._rules = dict(rules)

    def __getitem__(self, name: str) -> UpdateRule:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(tuple(self._rules))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, NamedRules) and list(self.items()) == list(other.items()))
