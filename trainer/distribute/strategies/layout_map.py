"""Rules for the split of parameters over the axes of a mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from trainer.core import errors, tree_paths
from trainer.core.types import Layout
from trainer.distribute.placement.placement import SHARD_AXIS


class LayoutMap(MutableMapping[str, Any]):
    """Layouts by patterns over the paths of parameters.

    A pattern is a regular expression over whole segments of a path such as "block/up/kernel": "up/kernel", ".*/bias"
    and "encoder" are patterns. A layout has one entry per dimension of the parameter: the name of the mesh axis that
    splits the dimension, or None. A tuple of names splits a dimension over several axes. Dimensions beyond the layout,
    and parameters without a rule, are replicated.

    As in Keras, `layout_map[path]` looks up a path: the rule equal to the path, else the single rule that matches it,
    else None. `in`, `del` and iteration use the rules themselves. A rule must be deleted before it is set again.

    Args:
      rules: a mapping from patterns to layouts: tuples, lists or `jax.sharding.PartitionSpec`s.

    Raises:
      TypeError: if a pattern is not a string, or a layout has another type.
      ValueError: if a pattern is not a valid regular expression or is set twice; when a path is looked up, if
        several rules match it and none is equal to it.

    Source: `keras.distribution.LayoutMap`, which also takes the mesh and matches parts of segments.

    Example:
      >>> layout_map = LayoutMap({"up/kernel": (None, "model"), "down/kernel": ("model", None)})
      >>> layout_map["block/up/kernel"]
      (None, 'model')
      >>> shapes = {"up/kernel": jax.ShapeDtypeStruct((4, 8), "float32"), "bias": jax.ShapeDtypeStruct((8,), "float32")}
      >>> LayoutMap({"up/kernel": (None, "model")}).specs(shapes, {"replica": 2, "model": 4}, "replica")
      {'up/kernel': P(None, 'model'), 'bias': P()}
    """

    def __init__(self, rules: Mapping[str, Any] | None = None):
        if rules is not None and not isinstance(rules, Mapping):
            raise errors.wrong_type("layout_map", rules, "a mapping from path patterns to layouts, such as "
                                    "{'up/kernel': (None, 'model')}")
        self._layouts: dict[str, Layout] = {}
        self.update(rules or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._layouts})"

    def __getitem__(self, path: str) -> Layout | None:
        rule = self._rule_for(path)
        return None if rule is None else self._layouts[rule]

    def __setitem__(self, pattern: str, layout: object) -> None:
        tree_paths.check_pattern("layout_map", pattern)
        if pattern in self._layouts:
            raise ValueError(f"`layout_map` already has the rule {pattern!r}: {self._layouts[pattern]}. Delete it "
                             "before you set another.")
        self._layouts[pattern] = _as_layout(pattern, layout)

    def __delitem__(self, pattern: str) -> None:
        del self._layouts[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    # The mixins expect `self[key]` to raise for a missing key, but a path without a layout returns None.

    def __contains__(self, pattern: object) -> bool:
        return pattern in self._layouts

    def get(self, path: str, default: Any = None) -> Any:
        """Returns the layout of a path, or `default` if no rule matches it."""
        layout = self[path]
        return default if layout is None else layout

    def pop(self, pattern: str, *default: Any) -> Any:
        """Deletes a rule and returns its layout, or `default` if given and the rule is missing."""
        return self._layouts.pop(pattern, *default)

    def setdefault(self, pattern: str, default: Layout | None = None) -> Any:
        """Returns the layout of a rule, after setting it to `default` if it is missing."""
        if pattern not in self:
            self[pattern] = default
        return self._layouts[pattern]

    def specs(self, shapes: Mapping[str, jax.ShapeDtypeStruct], mesh_shape: Mapping[str, int], replica_axis: str,
              annotated: Mapping[str, Layout] = MappingProxyType({})) -> dict[str, PartitionSpec]:
        """Returns the partition spec of each parameter.

        Args:
          shapes: shapes of all parameters by path.
          mesh_shape: the number of devices along each axis of the mesh, by the name of the axis.
          replica_axis: the axis that splits batches; parameters may not use it, nor "shard".
          annotated: layouts by path from the module's own annotations, for parameters without a rule.

        Returns:
          A spec per path, in the order of `shapes`; `PartitionSpec()` for parameters without a rule or annotation.

        Raises:
          ValueError: if a rule matches no parameter, or several match a parameter and none is equal to its path; if a
            layout or an annotation has more entries than the parameter has dimensions, names an axis twice, names the
            replica axis, "shard" or an axis that the mesh does not have, or does not divide the parameter evenly.
        """
        tree_paths.check_patterns("layout_map", self, shapes)
        specs = {}
        for path, value in shapes.items():
            rule = self._rule_for(path)
            layout = annotated.get(path, ()) if rule is None else self._layouts[rule]
            problem = _misfit(layout, value.shape, mesh_shape, replica_axis)
            if problem is not None:
                said_by, also = (
                    (f"The module's annotation {layout}", f" A rule {path!r} of `layout_map` goes before annotations.")
                    if rule is None else (f"The rule {rule!r}: {layout} of `layout_map`", ""))
                raise ValueError(f"{said_by} cannot split the parameter {path!r} of shape {tuple(value.shape)}: "
                                 f"{problem}{also}")
            specs[path] = PartitionSpec(*layout)
        return specs

    def _rule_for(self, path: str) -> str | None:
        if path in self._layouts:
            return path
        rules = [pattern for pattern in self._layouts if tree_paths.matches(pattern, path)]
        if len(rules) > 1:
            raise ValueError(f"Path {path!r} matches multiple layout rules of `layout_map`: "
                             f"{' and '.join(map(repr, rules))}. Make the patterns narrower, or add a rule {path!r}, "
                             "which goes before patterns.")
        return rules[0] if rules else None


def _as_layout(pattern: str, layout: object) -> Layout:
    argument = f"layout_map[{pattern!r}]"
    if isinstance(layout, str):
        raise TypeError(f"`{argument}` must have one entry per dimension. Received: the string {layout!r}. Write "
                        f"({layout!r},) to split the first dimension, or (None, {layout!r}) to split the second.")
    if not isinstance(layout, (tuple, list, PartitionSpec)):
        raise errors.wrong_type(argument, layout, "a tuple of mesh axis names and None, one per dimension, such as "
                                "(None, 'model')")
    if isinstance(layout, PartitionSpec) and (layout.unreduced or layout.reduced):
        raise ValueError(f"`{argument}` is {layout}. A layout says how a parameter is split: leave out `unreduced` and "
                         "`reduced`.")
    return tuple(_as_entry(argument, entry) for entry in layout)


def _as_entry(argument: str, entry: object) -> str | tuple[str, ...] | None:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)) and entry and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    raise errors.wrong_type(argument, entry, "a tuple whose entries are mesh axis names, tuples of them, or None")


def _misfit(layout: Layout, shape: tuple[int, ...], mesh_shape: Mapping[str, int], replica_axis: str) -> str | None:
    """Returns the reason why a layout cannot split an array, and the fix; None if it can."""
    axes_by_dimension = [(entry,) if isinstance(entry, str) else entry or () for entry in layout]
    counts = Counter(axis for axes in axes_by_dimension for axis in axes)
    usable = [axis for axis in mesh_shape if axis not in (replica_axis, SHARD_AXIS)]
    choice = f"Use {' or '.join(map(repr, usable))}." if usable else "Give the mesh another axis."
    for axis, count in counts.items():
        if axis == SHARD_AXIS:
            return (f"{axis!r} splits batches, and parameters by their shapes: along an axis that the layout leaves. "
                    f"{choice}")
        if axis == replica_axis:
            return f"{axis!r} is the axis that splits batches, and not parameters. {choice}"
        if axis not in mesh_shape:
            near = errors.near_names(axis, usable)
            return f"the mesh has no axis {axis!r}. {f'Did you mean {near[0]!r}?' if near else choice}"
        if count > 1:
            return f"it names the axis {axis!r} more than once. Keep it for one dimension and write None for others."
    if len(layout) > len(shape):
        return (f"it has more entries ({len(layout)}) than the parameter has dimensions ({len(shape)}). Give at most "
                "one per dimension.")
    for dimension, axes in enumerate(axes_by_dimension):
        parts = math.prod(mesh_shape[axis] for axis in axes)
        if shape[dimension] % parts:
            over = " and ".join(map(repr, axes))
            return (f"dimension {dimension}, of size {shape[dimension]}, does not divide by {parts}, the size of "
                    f"{over}. Make it a multiple of {parts}, split another dimension, or write None for this one.")
    return None
