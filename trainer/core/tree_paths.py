"""Names of a tree's leaves, such as "block/up/kernel", and patterns over them.

Owns the form of a path and the rules of patterns, for all selections of parameters by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from trainer.core import errors
from trainer.core.types import PyTree

SEPARATOR = "/"
_ARGUMENTS = ("x", "y", "sample_weight")


def path_name(key_path: Sequence[Any]) -> str:
    """Returns the name of a leaf: the keys, indices and attributes that lead to it, joined by "/".

    Args:
      key_path: the path from `jax.tree_util`; empty for a tree that is itself a leaf.

    >>> path_name((jax.tree_util.DictKey("up"), jax.tree_util.SequenceKey(0), jax.tree_util.GetAttrKey("mu")))
    'up/0/mu'
    """
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator=SEPARATOR)


def argument_names(batch: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Returns a name for each leaf: `x`, `y`, `sample_weight` for a tuple of up to three, with the path inside each.

    >>> argument_names(({"image": 1, "text": 2}, 3))
    ["x['image']", "x['text']", 'y']
    """
    paths = [path for path, _ in jax.tree.flatten_with_path(batch, is_leaf=is_leaf)[0]]
    if type(batch) is not tuple:
        return ["x" + jax.tree_util.keystr(path) for path in paths]
    if len(batch) > len(_ARGUMENTS):
        return ["element" + jax.tree_util.keystr(path) for path in paths]
    return [_ARGUMENTS[path[0].idx] + jax.tree_util.keystr(path[1:]) for path in paths]


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their names, in the tree's order.

    Raises:
      ValueError: two leaves have the same name, as in `{"a/b": x, "a": {"b": y}}`.

    >>> named_leaves({"up": {"kernel": 1, "bias": 2}})
    {'up/bias': 2, 'up/kernel': 1}
    """
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(key_path)
        if name in leaves:
            raise ValueError(f"Two leaves have the path {name!r}. Rename one: keys are separated by {SEPARATOR!r}, so "
                             f"a key that has a {SEPARATOR!r} itself can look like a nested key.")
        leaves[name] = leaf
    return leaves


def with_leaves(tree: PyTree, leaves: Mapping[str, Any]) -> Any:
    """Returns the tree with new leaves, given by the names of the old leaves.

    >>> with_leaves({"up": {"kernel": 1, "bias": 2}}, {"up/bias": 4, "up/kernel": 3})
    {'up': {'bias': 4, 'kernel': 3}}
    """
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)])


def matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern matches a path.

    A pattern is a regular expression. It matches a path if it matches one or more consecutive whole segments of it,
    separated by slashes: "encoder" matches everything below "encoder", and "up/kernel" matches "block/up/kernel" but
    not "group/kernel". "^" and "$" stand for the ends of the path. A pattern that equals the path matches it, even with
    special characters of regular expressions. As in file names, a segment "*" stands for any segment, and "**" for any
    number of segments.

    Args:
      pattern: a valid regular expression.
      path: names joined by "/".

    >>> matches("bias", "bias"), matches(".*/bias", "bias"), matches(".*/bias", "block/up/bias")
    (True, False, True)
    >>> matches("**/bias", "bias"), matches("block/*/bias", "block/up/bias"), matches("block/*", "blocks/up")
    (True, True, False)
    """
    return pattern == path or _whole_segments(pattern).search(path) is not None


def restricted(tree: PyTree, like: PyTree) -> Any:
    """Returns the part of nested dicts that has the keys of other nested dicts.

    >>> restricted({"mean": 1, "losses": {"l2": 2}}, {"mean": 0})
    {'mean': 1}
    """
    if not isinstance(tree, Mapping) or not isinstance(like, Mapping):
        return tree
    return {name: restricted(value, like[name]) for name, value in tree.items() if name in like}


def kept(tree: PyTree, keeps: Callable[[str], bool], prefix: str = "") -> Any:
    """Returns the part of nested dicts whose paths are kept, without empty dicts.

    >>> kept({"up": {"kernel": 1, "bias": 2}, "down": {"bias": 3}}, lambda path: path == "up/bias")
    {'up': {'bias': 2}}
    """
    part = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            below = kept(value, keeps, path + SEPARATOR)
            if below:
                part[name] = below
        elif keeps(path):
            part[name] = value
    return part


def updated(tree: PyTree, part: PyTree) -> Any:
    """Returns nested dicts with leaves replaced by the leaves of `part`, which has some of their keys.

    >>> updated({"mean": 1, "losses": {"l2": 2}}, {"mean": 3})
    {'mean': 3, 'losses': {'l2': 2}}
    """
    if not isinstance(tree, Mapping):
        return part
    return {name: updated(value, part[name]) if name in part else value for name, value in tree.items()}


def matches_any(patterns: Sequence[str], path: str) -> bool:
    """Returns whether any of the patterns matches a path; see `matches`."""
    return any(matches(pattern, path) for pattern in patterns)


def is_left_out(excluded: Sequence[str], only: Sequence[str], path: str) -> bool:
    """Returns whether any excluded pattern matches a path, or there are other patterns and none of them matches it.

    >>> is_left_out(["bias"], [], "up/kernel"), is_left_out([], ["down"], "up/kernel")
    (False, True)
    """
    return matches_any(excluded, path) or (bool(only) and not matches_any(only, path))


def check_pattern(argument: str, pattern: object) -> None:
    """Checks that a pattern is a regular expression.

    Args:
      argument: argument of the pattern, such as "freeze".
      pattern: the pattern.

    Raises:
      TypeError: `pattern` is not a string.
      ValueError: `pattern` is not a valid regular expression.
    """
    if not isinstance(pattern, str):
        raise errors.wrong_type(argument, pattern, "a path pattern, a string such as 'encoder' or 'up/kernel'")
    try:
        _whole_segments(pattern)
    except re.error as error:
        raise ValueError(f"`{argument}` has the pattern {pattern!r}, which is not a valid regular expression: {error}. "
                         "Write '.*' for any characters, and a backslash before a character that is meant literally."
                         ) from None


def check_patterns(argument: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Checks that each pattern is a regular expression and matches a path.

    Args:
      argument: argument of the patterns, such as "freeze".
      patterns: patterns for `matches`.
      paths: all existing paths.

    Raises:
      TypeError: `patterns` is a single string, or has an item that is not a string.
      ValueError: a pattern is not a valid regular expression or matches no path.

    >>> check_patterns("freeze", ["upp/kernel"], ["block/up/bias", "block/up/kernel"])
    Traceback (most recent call last):
    ...
    ValueError: `freeze` has the pattern 'upp/kernel', which matches none of the 2 paths. Did you mean 'up/kernel'? ...
    """
    if isinstance(patterns, str):
        raise TypeError(f"`{argument}` must be a list of path patterns. Received: the string {patterns!r}. Write "
                        f"[{patterns!r}].")
    known = list(paths)
    for pattern in patterns:
        check_pattern(argument, pattern)
        if not any(matches(pattern, path) for path in known):
            raise ValueError(f"`{argument}` has the pattern {pattern!r}, which matches none of the {len(known)} paths. "
                             f"{_near_or_known(pattern, known)} A pattern matches whole segments between slashes, such "
                             f"as 'encoder', 'up/kernel' or 'dense.*/bias'.{_glob_hint(pattern)}")


@functools.lru_cache(maxsize=1024)
def _whole_segments(pattern: str) -> re.Pattern[str]:
    pattern = re.sub(r"(^|/)\*\*/", r"\1(?:.*/)?", pattern)
    pattern = re.sub(r"(^|/)\*\*$", r"\1.*", pattern)
    pattern = re.sub(r"(^|/)\*(?=/|$)", r"\1[^/]+", pattern)
    flags = re.compile(pattern).flags  # alone first: the parentheses below would hide the error in "a)|(b"
    body = re.sub(r"^\(\?[aiLmsux]+\)", "", pattern)  # flags such as "(?i)" may only stand at the very start
    return re.compile(rf"(?:^|(?<={SEPARATOR}))(?:{body})(?={SEPARATOR}|$)", flags)


def _glob_hint(pattern: str) -> str:
    meant = SEPARATOR.join(part if set(part) == {"*"} else re.sub(r"(?<![.\])\\])\*", ".*", part)
                           for part in pattern.split(SEPARATOR))
    return "" if meant == pattern else (
        f" In a segment, which is a regular expression, `*` repeats the character before it: did you mean {meant!r}?")


def _near_or_known(pattern: str, paths: Sequence[str]) -> str:
    near = _near_runs(pattern, paths)
    if near:
        return f"Did you mean {' or '.join(repr(run) for run in near)}?"
    if not paths:
        return "There is nothing to match."
    shown = ", ".join(repr(path) for path in paths[:errors.MAX_ITEMS])
    return f"Known paths: {shown}{', ...' if len(paths) > errors.MAX_ITEMS else ''}."


def _near_runs(pattern: str, paths: Sequence[str]) -> list[str]:
    """Returns runs of segments that are similar to the pattern, or else similar single segments."""
    segments = [path.split(SEPARATOR) for path in paths]
    length = pattern.count(SEPARATOR) + 1
    runs = list(dict.fromkeys(SEPARATOR.join(path[start:start + length])
                              for path in segments for start in range(len(path) - length + 1)))
    near = errors.near_names(pattern, runs)
    if near:
        return near
    # A part of a name, which the regular expressions of other libraries would match.
    containing = [run for run in runs if pattern and pattern in run]
    if containing:
        return containing[:3]
    names = list(dict.fromkeys(name for path in segments for name in path))
    unknown = [part for part in pattern.split(SEPARATOR) if part not in names]
    return [name for part in unknown for name in errors.near_names(part, names)][:3]
