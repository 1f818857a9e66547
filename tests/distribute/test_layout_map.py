"""Which rule a parameter gets, and what is refused about it."""

import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.distribute.strategies.layout_map import LayoutMap

MESH = {"replica": 2, "model": 4, "stage": 2}
SHAPES = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in {
    "block/down/kernel": (8, 6), "block/up/bias": (8,), "block/up/kernel": (6, 8), "scale": ()}.items()}


def specs(rules):
    return LayoutMap(rules).specs(SHAPES, MESH, "replica")


# --- rules and look-ups, as in Keras -------------------------------------------------------------------------------

def test_a_look_up_finds_the_equal_rule_then_the_one_that_matches_then_none():
    layout_map = LayoutMap({"dense/kernel": (None, "model"), "dense.*kernel": ("model", None),
                            "dense.*bias": ("model",), "bias": (None,)})
    assert layout_map["dense/kernel"] == (None, "model")
    assert layout_map["dense_2/kernel"] == ("model", None)
    assert layout_map["bias"] == (None,)
    assert layout_map["conv2d/kernel"] is None
    with pytest.raises(ValueError, match=r"Path 'dense_2/bias' matches multiple layout rules of `layout_map`: "
                                         r"'dense\.\*bias' and 'bias'\. Make the patterns narrower, or add a rule "
                                         "'dense_2/bias', which goes before patterns"):
        layout_map["dense_2/bias"]


def test_iteration_length_and_membership_are_about_rules():
    layout_map = LayoutMap({"up.*": ("model",)})
    layout_map["down"] = (None,)
    assert list(layout_map) == ["up.*", "down"] and len(layout_map) == 2
    assert "up.*" in layout_map and "up/kernel" not in layout_map
    assert dict(layout_map) == {"up.*": ("model",), "down": (None,)}
    del layout_map["down"]
    assert layout_map["down"] is None
    with pytest.raises(KeyError):
        del layout_map["down"]


def test_the_methods_of_a_mapping_tell_a_missing_rule_from_a_path_without_one():
    layout_map = LayoutMap({"up": ("model",)})
    assert layout_map.get("up/bias") == ("model",) and layout_map.get("down") is None
    assert layout_map.get("down", ()) == ()
    assert layout_map.setdefault("up", (None,)) == ("model",)
    assert layout_map.setdefault("up/bias", [None]) == (None,) == layout_map["up/bias"]
    assert layout_map.pop("down", "missing") == "missing"
    assert layout_map.pop("up") == ("model",)
    assert layout_map == {"up/bias": (None,)} == LayoutMap(layout_map)
    with pytest.raises(KeyError):
        layout_map.pop("up")


def test_a_rule_is_not_replaced_in_silence():
    layout_map = LayoutMap({"up": ("model",)})
    with pytest.raises(ValueError, match=r"`layout_map` already has the rule 'up': \('model',\)\. Delete it before"):
        layout_map["up"] = (None,)
    assert layout_map["up"] == ("model",)


@pytest.mark.parametrize(("layout", "expected"), [
    ((), ()),
    ([None, "model"], (None, "model")),
    (P(None, "model"), (None, "model")),
    (P(("stage", "model")), (("stage", "model"),)),
    ([["stage", "model"], None], (("stage", "model"), None)),
])
def test_a_layout_may_be_a_tuple_a_list_or_a_partition_spec(layout, expected):
    assert LayoutMap({"up": layout})["up"] == expected


def test_a_copy_does_not_follow_the_rules_it_was_made_of():
    rules = {"up": ["model"]}
    layout_map = LayoutMap(rules)
    rules["down"] = rules["up"]
    rules["up"].append("stage")
    assert repr(layout_map) == "LayoutMap({'up': ('model',)})"


@pytest.mark.parametrize(("layout", "message"), [
    ("model", r"`layout_map\['up'\]` must have one entry per dimension\. Received: the string 'model'\. Write "
              r"\('model',\) to split the first dimension, or \(None, 'model'\) to split the second\."),
    (None, r"`layout_map\['up'\]` must be a tuple of mesh axis names and None, .*\. Received: .* NoneType"),
    ({"model": 0}, r"`layout_map\['up'\]` must be a tuple of .* type dict"),
    ((0, None), r"`layout_map\['up'\]` must be a tuple whose entries are mesh axis names, .* type int"),
    (((),), r"`layout_map\['up'\]` must be a tuple whose entries are .* type tuple"),
    (((None, "model"),), r"`layout_map\['up'\]` must be a tuple whose entries are .* type tuple"),
    (P(P.UNCONSTRAINED), r"`layout_map\['up'\]` must be a tuple whose entries are .* type UnconstrainedSingleton"),
])
def test_what_is_no_layout_is_refused_with_the_fix(layout, message):
    with pytest.raises(TypeError, match=message):
        LayoutMap({"up": layout})


def test_a_partition_spec_of_pending_sums_is_refused():
    with pytest.raises(ValueError, match=r"`layout_map\['up'\]` is P.*: leave out `unreduced` and `reduced`"):
        LayoutMap({"up": P(unreduced={"model"})})


def test_rules_that_are_no_mapping_are_refused():
    with pytest.raises(TypeError, match=r"`layout_map` must be a mapping from path patterns to layouts, .* type list"):
        LayoutMap([("up", ("model",))])


@pytest.mark.parametrize(("pattern", "error", "message"), [
    ("up/(", ValueError, "`layout_map` has the pattern 'up/\\(', which is not a valid regular expression"),
    (3, TypeError, "`layout_map` must be a path pattern, a string .* type int"),
])
def test_what_is_no_pattern_is_refused_when_the_rule_is_set(pattern, error, message):
    with pytest.raises(error, match=message):
        LayoutMap({pattern: ("model",)})


# --- specs ---------------------------------------------------------------------------------------------------------

def test_parameters_without_a_rule_are_replicated():
    expected = dict.fromkeys(SHAPES, P())
    assert specs({}) == expected == specs(None)
    assert specs({"up": ("model",)} | {"up/kernel": (None, "model"), "block/up/kernel": ()}) == expected | {
        "block/up/bias": P("model")}


def test_each_parameter_gets_its_rule_in_the_order_of_the_parameters():
    found = specs({"up/kernel": (None, "model"), "down/kernel": [("stage", "model"), None], "bias": P("stage")})
    assert found == {"block/down/kernel": P(("stage", "model"), None), "block/up/bias": P("stage"),
                     "block/up/kernel": P(None, "model"), "scale": P()}
    assert list(found) == list(SHAPES)


def test_one_rule_may_place_many_parameters_and_leave_dimensions_out():
    assert specs({"block": ("stage",)}) == {path: P("stage") if path != "scale" else P() for path in SHAPES}
    assert specs({"scale": ()})["scale"] == P()


def test_the_rule_equal_to_a_path_goes_before_patterns():
    found = specs({".*kernel": ("stage",), "block/up/kernel": (None, "model")})
    assert found["block/up/kernel"] == P(None, "model") and found["block/down/kernel"] == P("stage")


def test_two_rules_for_one_parameter_are_refused():
    with pytest.raises(ValueError, match=r"Path 'block/up/kernel' matches multiple layout rules of `layout_map`: "
                                         r"'up/kernel' and 'kernel'\."):
        specs({"up/kernel": (None, "model"), "kernel": ("stage",)})


def test_a_rule_that_matches_nothing_is_refused_with_near_paths():
    with pytest.raises(ValueError, match=r"`layout_map` has the pattern 'upp/kernel', which matches none of the 4 paths"
                                         r"\. Did you mean 'up/kernel' or 'down/kernel'\?"):
        specs({"bias": ("model",), "upp/kernel": (None, "model")})


CANNOT_SPLIT = r"^The rule {} of `layout_map` cannot split the parameter {} of shape {}: {}$"


@pytest.mark.parametrize(("rule", "layout", "path", "problem"), [
    ("up/kernel", (None, "modle"), "block/up/kernel", "the mesh has no axis 'modle'. Did you mean 'model'?"),
    ("up/kernel", (None, "zzz"), "block/up/kernel", "the mesh has no axis 'zzz'. Use 'model' or 'stage'."),
    ("bias", (("zzz", "stage"),), "block/up/bias", "the mesh has no axis 'zzz'. Use 'model' or 'stage'."),
    ("up/kernel", ("replica", None), "block/up/kernel",
     "'replica' is the axis that splits batches, and not parameters. Use 'model' or 'stage'."),
    ("up/kernel", ("model", "model"), "block/up/kernel",
     "it names the axis 'model' more than once. Keep it for one dimension and write None for others."),
    ("up/kernel", (("stage", "model"), "stage"), "block/up/kernel",
     "it names the axis 'stage' more than once. Keep it for one dimension and write None for others."),
    ("bias", (None, "model"), "block/up/bias",
     "it has more entries (2) than the parameter has dimensions (1). Give at most one per dimension."),
    ("scale", (None,), "scale",
     "it has more entries (1) than the parameter has dimensions (0). Give at most one per dimension."),
    ("up/kernel", ("model", None), "block/up/kernel",
     "dimension 0, of size 6, does not divide by 4, the size of 'model'. Make it a multiple of 4, split another "
     "dimension, or write None for this one."),
    ("kernel", (None, ("stage", "model")), "block/down/kernel",
     "dimension 1, of size 6, does not divide by 8, the size of 'stage' and 'model'. Make it a multiple of 8, split "
     "another dimension, or write None for this one."),
])
def test_a_layout_that_does_not_fit_is_refused_with_rule_parameter_shape_and_fix(rule, layout, path, problem):
    parts = (f"{rule!r}: {layout}", repr(path), str(SHAPES[path].shape), problem)
    message = CANNOT_SPLIT.format(*map(re.escape, parts))
    with pytest.raises(ValueError, match=message):
        specs({rule: layout})


@pytest.mark.parametrize("axis", ["replica", "model"])
def test_a_mesh_without_axes_for_parameters_says_so(axis):
    with pytest.raises(ValueError, match=r"'(replica' is the axis that splits batches|model'\.).* Give the mesh "
                                         r"another axis\.$"):
        LayoutMap({"bias": (axis,)}).specs(SHAPES, {"replica": 8}, "replica")


@given(st.lists(st.integers(1, 24), max_size=3), st.permutations([None, "model", "stage", ("model", "stage")]),
       st.integers(0, 3))
def test_every_spec_that_is_given_out_is_one_that_jax_can_place(shape, entries, length):
    layout, sizes = tuple(entries[:length]), {None: 1, "model": 4, "stage": 2, ("model", "stage"): 8}
    used_twice = ("model", "stage") in layout and len(set(layout) - {None}) > 1
    fits = len(layout) <= len(shape) and not used_twice and all(
        size % sizes[entry] == 0 for size, entry in zip(shape, layout, strict=False))
    shapes = {"kernel": jax.ShapeDtypeStruct(tuple(shape), "float32")}
    if not fits:
        with pytest.raises(ValueError, match="cannot split the parameter 'kernel'"):
            LayoutMap({"kernel": layout}).specs(shapes, MESH, "replica")
        return
    spec = LayoutMap({"kernel": layout}).specs(shapes, MESH, "replica")["kernel"]
    parts = [sizes[entry] for entry in layout] + [1] * (len(shape) - len(layout))
    placed = NamedSharding(AbstractMesh(tuple(MESH.values()), tuple(MESH)), spec).shard_shape(tuple(shape))
    assert placed == tuple(size // part for size, part in zip(shape, parts, strict=True))
