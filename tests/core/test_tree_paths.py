"""What a tree's leaves are called, and what a pattern over those names matches."""

import collections
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.train_state import TrainState
from trainer.core.tree_paths import check_pattern, check_patterns, matches, named_leaves, path_name

PATHS = ["block/down/kernel", "block/up/bias", "block/up/kernel", "head/kernel"]

NAMES = st.text("ab.", min_size=1, max_size=3)
PATH = st.lists(NAMES, min_size=1, max_size=4)


# --- names ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("key_path", "name"), [
    ((), ""),
    ((jax.tree_util.DictKey("up"), jax.tree_util.DictKey("kernel")), "up/kernel"),
    ((jax.tree_util.DictKey(3), jax.tree_util.SequenceKey(1)), "3/1"),
    ((jax.tree_util.GetAttrKey("mu"), jax.tree_util.FlattenedIndexKey(2)), "mu/2"),
])
def test_a_name_joins_keys_indices_and_attributes_by_slashes(key_path, name):
    assert path_name(key_path) == name


def test_leaves_of_an_optimizer_state_are_named_through_its_tuples_and_fields():
    state = optax.adam(0.1).init({"up": {"kernel": jnp.zeros(2)}})
    assert list(named_leaves(state)) == ["0/count", "0/mu/up/kernel", "0/nu/up/kernel"]


def test_leaves_of_a_train_state_are_named_by_its_fields():
    state = TrainState(step=0, params={"bias": 1}, model_state={}, opt_state=(2,), seed=3)
    assert named_leaves(state) == {"step": 0, "params/bias": 1, "opt_state/0": 2, "seed": 3}


def test_leaves_keep_the_order_of_the_tree_and_none_is_no_leaf():
    tree = collections.OrderedDict(b=1, a=[2, None, 3])
    assert list(named_leaves(tree).items()) == [("b", 1), ("a/0", 2), ("a/2", 3)]


@pytest.mark.slow
@given(st.recursive(st.integers(), lambda children: st.dictionaries(NAMES, children, min_size=1, max_size=3)).filter(
    lambda tree: isinstance(tree, dict)))
def test_leaves_of_nested_dicts_are_named_as_flax_flattens_them(tree):
    assert named_leaves(tree) == flatten_dict(tree, sep="/")
    assert list(named_leaves(tree).values()) == jax.tree.leaves(tree)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"Two leaves have the path 'a/b'\. Rename one: keys are separated by '/'"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


# --- patterns ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("pattern", "path"), [
    ("up/kernel", "up/kernel"),
    ("up/kernel", "block/up/kernel"),
    ("up", "block/up/kernel"),
    ("encoder", "encoder/layer_0/kernel"),
    ("encoder/.*", "model/encoder/layer_0/kernel"),
    (".*/bias", "up/bias"),
    ("bias", "bias"),
    ("kernel|bias", "up/bias"),
    ("dense.*kernel", "net/dense_1/kernel"),
    ("layer_[0-3]", "encoder/layer_2/bias"),
    ("^block", "block/kernel"),
    ("kernel$", "block/kernel"),
    ("(?i)KERNEL", "block/kernel"),
    ("(?i:KERNEL)", "block/kernel"),
    (r"(\w)\1/kernel", "net/aa/kernel"),
    ("", ""),
    ("gate(1)/kernel", "gate(1)/kernel"),
    ("a+b", "a+b"),
])
def test_a_pattern_matches_runs_of_whole_segments(pattern, path):
    assert matches(pattern, path)


@pytest.mark.parametrize(("pattern", "path"), [
    ("up/kernel", "group/kernel"),
    ("up/kernel", "up/kernel_scale"),
    ("up/kernel", "up/dense/kernel"),
    ("encoder", "encoder_1/kernel"),
    ("encoder/.*", "encoder"),
    (".*/bias", "bias"),
    ("bias|rne", "up/kernel"),
    ("^up", "block/up/kernel"),
    ("block$", "block/kernel"),
    ("KERNEL", "block/kernel"),
    ("/kernel", "up/kernel"),
    ("up/", "up/kernel"),
    ("", "up/kernel"),
    ("gate(1)/kernel", "net/gate(1)/kernel"),
])
def test_a_pattern_does_not_match_parts_of_segments(pattern, path):
    assert not matches(pattern, path)


@pytest.mark.slow
@given(PATH, PATH)
def test_literal_names_match_exactly_where_they_stand_side_by_side(pattern, path):
    runs = [path[start:start + len(pattern)] for start in range(len(path))]
    assert matches(re.escape("/".join(pattern)), "/".join(path)) == (pattern in runs)


@given(PATH)
def test_every_path_matches_itself_and_the_pattern_for_anything(path):
    assert matches("/".join(path), "/".join(path)) and matches(".*", "/".join(path))


# --- checks --------------------------------------------------------------------------------------------------------

def test_patterns_that_each_match_something_are_accepted():
    check_patterns("freeze", ["block", "head/.*", ".*/bias"], PATHS)
    check_patterns("freeze", [], [])
    check_patterns("freeze", iter(["block"]), iter(PATHS))


@pytest.mark.parametrize(("pattern", "near"), [
    ("upp/kernel", r"'up/kernel' or .*"),
    ("Head/Kernel", r"'head/kernel' or .*"),
    ("block/up/kernal", r"'block/up/kernel' or .*"),
    ("kernels", r"'kernel'"),
    ("own/ker", r"'down/kernel'"),      # a part of a name, as Keras would search for
    ("do", r"'down'"),
    ("blok/.*/.*", r"'block'"),          # a run of three looks unlike any, one segment does not
    ("hea/x/y/z/kernel", r"'head'"),     # longer than any path
    ("/up/kernel", r"'.*up/kernel'.*"),
])
def test_a_pattern_that_matches_nothing_lists_near_paths(pattern, near):
    message = rf"^`freeze` has the pattern {re.escape(repr(pattern))}, which matches none of the 4 paths\. Did you mean"
    with pytest.raises(ValueError, match=rf"{message} {near}\? A pattern matches whole segments between slashes"):
        check_patterns("freeze", ["block", pattern], PATHS)


def test_near_paths_match_something_themselves():
    with pytest.raises(ValueError, match=r"Did you mean '(\w+/\w+)'") as caught:
        check_patterns("freeze", ["upp/kernel"], PATHS)
    check_patterns("freeze", re.findall(r"mean '(\w+/\w+)'", str(caught.value)), PATHS)


@pytest.mark.parametrize("pattern", ["zzz", "", ".*/zzz"])
def test_a_pattern_that_looks_like_no_path_lists_what_there_is(pattern):
    with pytest.raises(ValueError, match=r"of the 4 paths\. Known paths: 'block/down/kernel', .*, 'head/kernel'\. "):
        check_patterns("freeze", [pattern], PATHS)


def test_only_the_first_of_many_paths_are_listed():
    paths = [f"layer_{index}/kernel" for index in range(50)]
    with pytest.raises(ValueError, match=r"none of the 50 paths\..*'layer_7/kernel', \.\.\.\. A pattern") as caught:
        check_patterns("freeze", ["zzz"], paths)
    assert "layer_8" not in str(caught.value)


def test_a_pattern_over_no_paths_says_that_there_is_nothing():
    with pytest.raises(ValueError, match=r"none of the 0 paths\. There is nothing to match\."):
        check_patterns("freeze", ["up"], [])


@pytest.mark.parametrize("pattern", ["up/(kernel", "+/bias", "up)|(down", "[a-"])
def test_an_invalid_regular_expression_is_refused(pattern):
    with pytest.raises(ValueError, match=rf"`freeze` has the pattern {re.escape(repr(pattern))}, which is not a valid "
                                         "regular expression: .*position"):
        check_patterns("freeze", [pattern], PATHS)
    with pytest.raises(ValueError, match="not a valid regular expression"):
        check_pattern("freeze", pattern)


def test_one_string_instead_of_a_list_is_refused():
    with pytest.raises(TypeError, match=r"`freeze` must be a list of path patterns\. Received: the string 'block'\. "
                                        r"Write \['block'\]\."):
        check_patterns("freeze", "block", PATHS)


def test_a_pattern_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match=r"`freeze` must be a path pattern, a string such as .*type Pattern"):
        check_patterns("freeze", [re.compile("block")], PATHS)


@pytest.mark.parametrize(("pattern", "meant"), [("layers_*", "layers_.*"), ("block*/bias", "block.*/bias")])
def test_a_glob_in_a_segment_is_told_from_a_regular_expression(pattern, meant):
    message = rf"`\*` repeats the character before it: did you mean {re.escape(repr(meant))}"
    with pytest.raises(ValueError, match=message):
        check_patterns("freeze", [pattern], PATHS)
    with pytest.raises(ValueError, match=r"'up/kernel' or 'dense\.\*/bias'\.$"):
        check_patterns("freeze", ["**/nothing.*"], PATHS)
