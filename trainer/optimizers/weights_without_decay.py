"""The weights that an optimizer's weight decay leaves alone, by path or by regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from trainer.core.errors import MAX_ITEMS, near_hint, wrong_type


class WeightsWithoutDecay(NamedTuple):
    """Weights to which weight decay does not apply.

    Attributes:
      paths: their paths, such as "Dense_0/bias".
      names: regular expressions, which are searched in paths.

    Example:
      >>> without = WeightsWithoutDecay.of(None, ["bias", "^head/"])
      >>> without.decays("Dense_0/kernel"), without.decays("Dense_0/bias"), without.decays("head/kernel")
      (True, False, False)
    """

    paths: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, var_list: Iterable[Any] | None, var_names: Sequence[str] | None) -> Self:
        """Checks the arguments of `Optimizer.exclude_from_weight_decay`."""
        expected = "a list of a model's variables, such as `model.layers[0].trainable_variables`, or None"
        if var_list is not None and (isinstance(var_list, str) or not isinstance(var_list, Iterable)):
            raise wrong_type("var_list", var_list, expected)
        paths = [getattr(variable, "path", None) for variable in var_list or ()]
        if not all(isinstance(path, str) for path in paths):
            raise TypeError(f"`var_list` must be {expected}. For weights by name, use `var_names`.")
        expected = 'a list of regular expressions, such as ["bias"], or None'
        if var_names is not None and (isinstance(var_names, str) or not isinstance(var_names, Iterable)):
            raise wrong_type("var_names", var_names, expected)
        names = list(var_names or ())
        for name in names:
            if not isinstance(name, str):
                raise wrong_type("var_names", name, expected)
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"`var_names` has {name!r}, which is no regular expression: {error}.") from None
        return cls(tuple(dict.fromkeys(paths)), tuple(dict.fromkeys(names)))  # type: ignore[arg-type]

    def decays(self, path: str) -> bool:
        """Returns whether weight decay applies to the weight at a path."""
        return path not in self.paths and not any(re.search(name, path) for name in self.names)

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError if a path of `self.paths` is missing here, or nothing here matches `names`."""
        known = list(paths)
        for path in self.paths:
            if path not in known:
                raise ValueError(f"`exclude_from_weight_decay` has the weight {path!r}, which the optimizer does not "
                                 f"update. {near_hint(path, known)}")
        if self.names and all(map(self.decays, known)):
            raise ValueError(f"`exclude_from_weight_decay(var_names={list(self.names)})` matches no weight of the "
                             f"model, whose weights are {', '.join(known[:MAX_ITEMS])}.")
