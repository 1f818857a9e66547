"""Reductions over replicas: numpy's numbers, the same bits on all replicas and psum's derivatives, by any algorithm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.reductions import ALGORITHMS, AXIS, on_replicas
from trainer import distribute
from trainer.distribute.replica import collectives
from trainer.distribute.replica.collectives import (
    HierarchicalCopyAllReduce,
    MeshReplicaContext,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from trainer.distribute.replica.communication_options import CommunicationImplementation, CommunicationOptions
from trainer.distribute.replica.reductions import CrossDeviceOps

MORE_ALGORITHMS = {
    **ALGORITHMS,
    "nccl unpacked": NcclAllReduce(num_packs=0),
    "groups of one": HierarchicalCopyAllReduce(group_size=1),
    "to the last device": ReductionToOneDevice(reduce_to_device=2),
}


def values(number, shape, dtype=np.float32, seed=0):
    """Returns an array of each replica: whole numbers, so that every order of summation gives the same bits."""
    return np.random.default_rng(seed).integers(-8, 9, (number, *shape)).astype(dtype)


def assert_equal_on_replicas(stacked, expected, rtol=0.0):
    """Checks that all replicas have the same tree, bit by bit, and that it is the expected one."""
    for leaf, wanted in zip(jax.tree.leaves(stacked), jax.tree.leaves(expected), strict=True):
        for each in np.asarray(leaf):
            np.testing.assert_array_equal(each, leaf[0])
        np.testing.assert_allclose(leaf[0], wanted, rtol)


def primitives(function, *args, number=4):
    """Returns the names of the primitives that a replica's function traces to, of loops' bodies as well."""
    def names(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jaxprs_in_params(equation.params):
                yield from names(inner)

    return list(names(jax.make_jaxpr(function, axis_env=[(AXIS, number)])(*args).jaxpr))


# --- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_and_means_are_those_of_numpy_on_every_replica(name, number):
    tree = {"odd": values(number, (7, 3)), "scalar": values(number, ()), "nested": [values(number, (1,)), None],
            "empty": values(number, (0, 3))}

    def reduce(tree):
        ops = ALGORITHMS[name]
        return [ops.all_reduce(op, tree, AXIS, number) for op in ("sum", "mean")]

    sums, means = on_replicas(reduce, number)(tree)
    expected = jax.tree.map(lambda leaf: leaf.sum(0), tree)
    assert_equal_on_replicas(sums, expected)
    assert_equal_on_replicas(means, jax.tree.map(lambda leaf: leaf / number, expected), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ALGORITHMS)
def test_every_dtype_is_kept_by_sums_and_the_mean_of_whole_numbers_is_floating(name):
    dtypes = (np.float32, jnp.bfloat16, np.float16, np.int32, np.bool_)
    tree = [values(3, (5,), dtype) for dtype in dtypes]

    def reduce(tree):
        ops = MORE_ALGORITHMS[name]
        return ops.all_reduce("sum", tree, AXIS, 3), ops.all_reduce("mean", tree[3], AXIS, 3)

    sums, mean = on_replicas(reduce, 3)(tree)
    assert [leaf.dtype for leaf in sums] == [*dtypes[:4], np.int32]
    assert_equal_on_replicas(sums, [leaf.astype(np.float32).sum(0) for leaf in tree])
    assert_equal_on_replicas(mean, tree[3].mean(0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_replicas_have_the_same_bits_where_the_order_of_a_sum_matters(name):
    numbers = np.random.default_rng(0).normal(size=(8, 1001))
    tree = [numbers.astype(np.float32), numbers.astype(jnp.bfloat16)]
    reduce = on_replicas(lambda tree: ALGORITHMS[name].all_reduce("mean", tree, AXIS, 8), 8)
    results = [np.asarray(leaf) for leaf in reduce(tree)]
    for result, atol in zip(results, (1e-6, 2e-2), strict=True):
        assert (result == result[0]).all()
        np.testing.assert_allclose(result[0].astype(np.float64), numbers.mean(0), atol=atol)
    for _ in range(20):
        for again, result in zip(reduce(tree), results, strict=True):
            np.testing.assert_array_equal(again, result)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_empty_tree_and_empty_arrays_need_no_communication(name):
    reduce = lambda tree: ALGORITHMS[name].all_reduce("sum", tree, AXIS, 4)
    assert reduce({}) == {}
    assert not {"psum", "ppermute", "all_gather"} & set(primitives(reduce, [np.zeros((0, 2)), np.zeros(0)]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_replica_gets_its_tree_back(name):
    tree = {"a": np.ones(3, np.int32)}
    assert ALGORITHMS[name].all_reduce("mean", tree, AXIS, 1) is tree


# --- where reductions run: in loops, on meshes with another axis, under derivatives -----------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [
    ("nccl", 3), ("hierarchical", 3), ("hierarchical", 8), ("one_device", 3), ("ring", 3), ("groups of one", 3)])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_derivatives_are_those_of_psum(name, number, op):
    x, weights, tangent = (values(number, (4,), seed=seed) for seed in range(3))

    def differentiate(x, weights, tangent):
        def weighed(x):
            # Squared twice, so that derivatives depend on the values and on each other.
            return (weights * MORE_ALGORITHMS[name].all_reduce(op, x ** 2, AXIS, number) ** 2).sum()

        return jax.grad(weighed)(x), jax.jvp(jax.grad(weighed), (x,), (tangent,))[1]

    gradients, second = on_replicas(differentiate, number)(x, weights, tangent)
    share = 1 if op == "sum" else 1 / number
    total, total_weights = share * (x ** 2).sum(0), share * weights.sum(0)
    # The gradient of the sum of what all replicas compute.
    np.testing.assert_allclose(gradients, 4 * total_weights * total * x, rtol=1e-5)
    total_tangent = share * (2 * x * tangent).sum(0)
    np.testing.assert_allclose(
        second, 4 * total_weights * (total_tangent * x + total * tangent), rtol=1e-5, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_reductions_run_in_loops_of_unknown_length_on_a_mesh_with_an_axis_for_the_compiler(name):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    tree = jax.device_put({"split": values(4, (1, 6)), "small": values(4, (3,))}, {
        "split": NamedSharding(mesh, PartitionSpec(AXIS, None, "model")),
        "small": NamedSharding(mesh, PartitionSpec(AXIS))})

    def run(tree, count):
        reduce = lambda index, tree: ALGORITHMS[name].all_reduce("mean", jax.tree.map(lambda leaf: 2 * leaf, tree),
                                                                AXIS, 4, packs=False)
        return jax.lax.fori_loop(0, count, reduce, tree)

    spec = PartitionSpec(AXIS)
    run_on_mesh = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec,
                                        axis_names={AXIS}, check_vma=False))
    result = run_on_mesh(tree, 3)
    assert_equal_on_replicas(result, jax.tree.map(lambda leaf: 8 * np.asarray(leaf).mean(0), tree))
    if name == "nccl":
        assert result["split"].sharding.spec == PartitionSpec(AXIS, None, "model")


def test_a_ring_is_as_long_a_program_for_a_thousand_replicas_as_for_four():
    reduce = lambda number: lambda x: RingAllReduce().all_reduce("sum", x, AXIS, number)
    few, many = (primitives(reduce(number), np.zeros(4096), number=number) for number in (4, 1024))
    assert few == many


# --- what is asked of an algorithm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "size"), [(2, 2), (4, 2), (5, 5), (6, 3), (8, 4), (12, 4), (32, 8)])
def test_groups_are_near_the_square_root_of_the_replicas_and_a_prime_number_is_one_group(number, size):
    groups = HierarchicalCopyAllReduce().groups(number)
    assert [len(group) for group in groups] == [size] * (number // size)
    assert [replica for group in groups for replica in group] == list(range(number))


def test_the_size_of_groups_can_be_chosen():
    assert HierarchicalCopyAllReduce(group_size=2).groups(6) == [[0, 1], [2, 3], [4, 5]]


def test_a_function_of_ones_own_can_take_the_place_of_the_sum():
    largest = ReductionToOneDevice(accumulation_fn=lambda pair: jnp.maximum(*pair))
    x = values(5, (6,))
    result = on_replicas(lambda x: largest.all_reduce("sum", x, AXIS, 5), 5)(x)
    assert_equal_on_replicas(result, x.max(0))


class TwiceTheSum(CrossDeviceOps):
    def sum_over_replicas(self, vector, axis_name, num_replicas):
        assert vector.ndim == 1
        return 2 * jax.lax.psum(vector, axis_name)


@pytest.mark.slow
def test_a_context_reduces_through_its_ops_but_sums_statistics_without_them():
    x = {"a": values(2, (3, 2)), "b": values(2, ())}

    def run(x):
        context = MeshReplicaContext(AXIS, 2, True, None, None, TwiceTheSum())
        return context.all_reduce("sum", x), context.sum(x), context.all_gather(x["a"])

    reduced, summed, gathered = on_replicas(run, 2)(x)
    assert_equal_on_replicas(summed, jax.tree.map(lambda leaf: leaf.sum(0), x))
    assert_equal_on_replicas(reduced, jax.tree.map(lambda leaf: 2 * leaf.sum(0), x))
    assert_equal_on_replicas(gathered, x["a"].reshape(6, 2))


def test_the_context_of_one_replica_returns_values_as_they_are():
    value = {"a": np.arange(3)}
    context = MeshReplicaContext(AXIS, 1, True, None, None)
    assert context.all_reduce("mean", value) is context.sum(value) is context.all_gather(value) is value


def test_a_context_uses_the_backends_all_reduce_unless_told_otherwise():
    def used(options=None, ops=None):
        context = MeshReplicaContext(AXIS, 4, True, None, None, ops)
        names = primitives(lambda x: context.all_reduce("sum", x, options), np.zeros(3))
        return "ring" if "ppermute" in names else "nccl"

    ring, nccl = (CommunicationOptions(implementation=name) for name in ("ring", "nccl"))
    assert used() == used(nccl) == used(CommunicationOptions()) == "nccl"
    assert used(ring) == used(ops=NcclAllReduce(options=ring)) == "ring"
    # What one reduction is told goes before what the op was told.
    assert used(nccl, RingAllReduce()) == used(CommunicationOptions(), NcclAllReduce(options=ring)) == "nccl"


def test_strategies_that_leave_reductions_to_the_compiler_take_no_implementation():
    makers = [functools.partial(distribute.FullyShardedStrategy, ["cpu:0"]),
              functools.partial(distribute.ModelParallelStrategy, {"model": 1}, ["cpu:0"])]
    for make in makers:
        assert make(communication_options=CommunicationOptions(timeout_seconds=5)).is_chief
        options = make(communication_options=CommunicationOptions(bytes_per_pack=64))._cross_device_ops.options
        assert options.bytes_per_pack == 64
        with pytest.raises(ValueError, match=r"give no `implementation`\. Received: .*RING"):
            make(communication_options=CommunicationOptions(implementation="ring"))
        with pytest.raises(TypeError, match="CommunicationOptions or None"):
            make(communication_options=5)


def test_the_implementation_asked_for_is_the_op_itself_if_it_is_of_that_kind():
    class Ring(RingAllReduce):
        def sum_over_replicas(self, vector, axis_name, num_replicas):
            return vector + 1

    ring = CommunicationOptions(implementation="ring")
    assert Ring().all_reduce("sum", np.zeros(2), AXIS, 4, options=ring).tolist() == [1, 1]


@pytest.mark.parametrize(("ops", "packs", "options", "expected"), [
    (NcclAllReduce(), True, None, 2),  # one for each dtype
    (NcclAllReduce(), False, None, 7),
    (NcclAllReduce(), True, CommunicationOptions(bytes_per_pack=32), 4),
    (NcclAllReduce(), False, CommunicationOptions(bytes_per_pack=32), 4),
    (NcclAllReduce(options=CommunicationOptions(bytes_per_pack=32)), True, None, 4),
    (NcclAllReduce(options=CommunicationOptions(bytes_per_pack=32)), False, None, 7),  # the compiler joins them
    (HierarchicalCopyAllReduce(group_size=1, options=CommunicationOptions(bytes_per_pack=32)), False, None, 4),
    (NcclAllReduce(), True, CommunicationOptions(bytes_per_pack=1), 7),
    (NcclAllReduce(num_packs=0), True, None, 7),
    (NcclAllReduce(num_packs=3), False, None, 4),  # two of them for the larger dtype
    (HierarchicalCopyAllReduce(group_size=1), False, None, 2),
    (HierarchicalCopyAllReduce(0, group_size=1), True, None, 7),
])
def test_trees_are_reduced_in_as_many_packs_as_asked_for(ops, packs, options, expected):
    tree = [np.zeros(4, np.float32)] * 6 + [np.zeros(4, np.int32)]
    reduce = lambda tree: ops.all_reduce("sum", tree, AXIS, 4, packs, options)
    assert primitives(reduce, tree).count("psum") == expected


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: CommunicationOptions(bytes_per_pack=-1), ValueError, ".* at least 0. Received: .*=-1"),
    (lambda: CommunicationOptions(bytes_per_pack=1.5), TypeError, "`bytes_per_pack` must be a whole number.*float"),
    (lambda: CommunicationOptions(timeout_seconds=0), ValueError, "must be a number above 0.*Received: .*=0"),
    (lambda: CommunicationOptions(timeout_seconds=float("inf")), ValueError, "timeout_seconds.*Received: .*inf"),
    (lambda: CommunicationOptions(timeout_seconds="9"), TypeError, "`timeout_seconds` must be a number above 0"),
    (lambda: CommunicationOptions(implementation="RNIG"), ValueError,
     "Unknown implementation 'RNIG'. Did you mean 'RING'"),
    (lambda: CommunicationOptions(implementation=1), TypeError, "`implementation` must be a CommunicationImpl.*int"),
    (lambda: NcclAllReduce(num_packs=-1), ValueError, "`num_packs` must be .* at least 0. Received: .*=-1"),
    (lambda: NcclAllReduce(num_packs=True), TypeError, "`num_packs` must be a whole number.*bool"),
    (lambda: NcclAllReduce(options={"bytes_per_pack": 1}), TypeError,
     "`options` must be CommunicationOptions or None.*dict"),
    (lambda: NcclAllReduce().all_reduce("sum", (), AXIS, 2, options=3), TypeError, "`options` must be.*int"),
    (lambda: NcclAllReduce().all_reduce("max", (), AXIS, 2), ValueError, 'A reduction must be "sum" or "mean"'),
    (lambda: HierarchicalCopyAllReduce(group_size=0), ValueError, "`group_size` must be .* at least 1. Received: .*=0"),
    (lambda: HierarchicalCopyAllReduce(group_size=3).check_replicas(8), ValueError,
     "`group_size` 3 does not divide the 8 replicas. Give a divisor, or None"),
    (lambda: ReductionToOneDevice("/gpu:0"), TypeError,
     "`reduce_to_device` must be the number of a replica.*Received: the name '/gpu:0'"),
    (lambda: ReductionToOneDevice(-1), ValueError, "`reduce_to_device` must be .* at least 0. Received: .*=-1"),
    (lambda: ReductionToOneDevice(8).check_replicas(8), ValueError,
     "`reduce_to_device` is 8, but there are 8 replicas, numbered from 0"),
    (lambda: ReductionToOneDevice(accumulation_fn=3), TypeError, "`accumulation_fn` must be a function.*int"),
    (lambda: RingAllReduce().check_replicas(0), ValueError, "`num_replicas` must be .* at least 1. Received: .*=0"),
    (lambda: collectives.gather_shards([np.ones(2)], [0, 1], AXIS), ValueError,
     "`axes` must have an axis for each array. Received: 2 axes for 1 arrays"),
    (lambda: collectives.take_shards([np.ones((2, 6))], [1], AXIS, 4), ValueError,
     r"Axis 1 of an array of shape \(2, 6\).* does not divide by 4 replicas. Keep that array whole, with axis -1"),
    (lambda: collectives.reduce_to_shards("sum", [np.ones(6)], [0], AXIS, 4, True), ValueError,
     r"Axis 0 of an array of shape \(6,\).* does not divide by 4"),
])
def test_wrong_arguments_are_refused_with_what_was_expected(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_implementation_may_be_named_in_any_case():
    assert CommunicationOptions(implementation="Nccl").implementation is CommunicationImplementation.NCCL
    assert CommunicationOptions() == CommunicationOptions(0, None, "auto")


# --- state that is split over replicas --------------------------------------------------------------------------------

WHOLE_TREE = {"rows": (8, 3), "columns": (2, 4), "middle": (3, 4, 2), "whole": (3,), "scalar": (), "empty": (0, 4),
              "no rows": (0, 3)}
AXES = {"rows": 0, "columns": 1, "middle": 1, "whole": -1, "scalar": -1, "empty": 1, "no rows": 0}


def whole_tree(number, dtype=np.float32):
    return {name: values(number, shape, dtype) for name, shape in WHOLE_TREE.items()}


def parts_of(whole, number):
    """Returns a tree of whole arrays split by numpy, the replicas' parts stacked."""
    return {name: np.stack([leaf] * number) if AXES[name] < 0 else np.stack(np.split(leaf, number, AXES[name]))
            for name, leaf in whole.items()}


def assert_trees_equal(tree, expected):
    assert tree.keys() == expected.keys()
    for name, leaf in tree.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("number", [1, 4])
def test_shards_are_taken_gathered_and_reduced_as_numpy_does(number, packs):
    tree = whole_tree(number)

    def run(tree):
        context = AXIS, number
        same = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS)[0], tree)
        taken = collectives.take_shards(same, AXES, *context)
        gathered = collectives.gather_shards(taken, AXES, AXIS)
        reduced = [collectives.reduce_to_shards(op, tree, AXES, *context, packs) for op in ("sum", "mean")]
        return taken, gathered, *reduced

    taken, gathered, sums, means = on_replicas(run, number)(tree)
    first = {name: leaf[0] for name, leaf in tree.items()}
    assert_trees_equal(taken, parts_of(first, number))
    assert_equal_on_replicas(gathered, first)
    totals = {name: leaf.sum(0) for name, leaf in tree.items()}
    assert_trees_equal(sums, parts_of(totals, number))
    assert_trees_equal(means, parts_of({name: leaf / np.float32(number) for name, leaf in totals.items()}, number))


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_axes_may_be_a_list_and_dtypes_may_be_mixed(packs):
    tree = [values(2, (4,), dtype) for dtype in (np.float32, np.int32, jnp.bfloat16)] + [values(2, (3,), np.int32)]
    axes = [0, 0, 0, -1]

    def run(tree):
        parts = collectives.reduce_to_shards("sum", tree, axes, AXIS, 2, packs)
        return parts, collectives.gather_shards(parts, axes, AXIS)

    parts, gathered = on_replicas(run, 2)(tree)
    assert [leaf.dtype for leaf in gathered] == [leaf.dtype for leaf in tree]
    assert [leaf.shape for leaf in parts] == [(2, 2), (2, 2), (2, 2), (2, 3)]
    assert_equal_on_replicas(gathered, [leaf.astype(np.float32).sum(0) for leaf in tree])


def test_the_gradient_of_gathered_shards_is_their_part_of_the_sum_of_gradients():
    shards, weights = [values(4, (2, 3)), values(4, (1,))], [values(4, (8, 3), seed=1), values(4, (1,), seed=2)]

    def differentiate(shards, weights):
        def weighed(shards):
            whole = collectives.gather_shards(shards, [0, -1], AXIS)
            return sum((weight * leaf).sum() for weight, leaf in zip(weights, whole, strict=True))

        return jax.grad(weighed)(shards)

    split, whole = on_replicas(differentiate, 4)(shards, weights)
    np.testing.assert_array_equal(split, weights[0].sum(0).reshape(4, 2, 3))
    np.testing.assert_array_equal(whole, weights[1], "a gradient of each replica's own, still to be summed")


@pytest.mark.parametrize(("packs", "scatters", "sums"), [(False, 3, 2), (True, 1, 1)])
def test_shards_are_reduced_one_by_one_unless_packed(packs, scatters, sums):
    tree = {name: np.zeros(shape, np.float32) for name, shape in WHOLE_TREE.items() if 0 not in shape}
    axes = {name: AXES[name] for name in tree}
    reduce = functools.partial(collectives.reduce_to_shards, "mean", axes=axes, axis_name=AXIS, num_replicas=4,
                               packs=packs)
    names = primitives(lambda tree: reduce(tree), tree)
    assert (names.count("reduce_scatter"), names.count("psum")) == (scatters, sums)
