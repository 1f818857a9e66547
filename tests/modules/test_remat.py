"""Rematerialisation changes what is kept for the backward pass, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import trainer
from tests.support.module_cases import key_maker, no_keys
from tests.support.networks import mirrored
from tests.support.simulated_replicas import run_replicas
from trainer.core import replica_context
from trainer.core.modules import as_functional, remat_policies
from trainer.core.modules.remat import take_out
from trainer.core.replica_context import get_replica_context
from trainer.distribute import FullyShardedStrategy
from trainer.testing import assert_strategies_equal

WIDTH = 4
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
# XLA:CPU of jax 0.10 removes the barriers of `jax.checkpoint` before it eliminates common subexpressions.
KEEP_BARRIERS = {} if jax.__version_info__ >= (0, 12) else {"xla_disable_hlo_passes": "cse_barrier_expander"}


# Nets with all that a call of a layer can have: BatchNorm and dropout, arguments that are no arrays, several outputs
# of which some are no arrays, layers called twice, layers given to layers, scans.

class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, scale=None, *, mode="add", repeats=1):
        assert isinstance(repeats, int)
        h = nn.BatchNorm(epsilon=0.1)(nn.Dense(WIDTH)(x))
        h = nn.Dropout(0.5)(nn.gelu(h))
        for _ in range(repeats):
            h = nn.Dense(WIDTH)(h)
        h = h if scale is None else h * scale
        return x + h if mode == "add" else h


class LinenPair(nn.Module):
    @nn.compact
    def __call__(self, x, layer):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        h = nn.Dense(WIDTH)(layer(x))
        return h, {"mean": h.mean(-1, keepdims=True), "unit": "metres", "none": None, "count": 2, "table": np.ones(2)}


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return LinenBlock()(x), None


def linen_scan(length):
    return nn.scan(LinenScanned, variable_axes={"params": 0, "batch_stats": 0},
                   split_rngs={"params": True, "dropout": True}, length=length)()


class LinenNet(nn.Module):
    def setup(self):
        self.blocks = [LinenBlock(), LinenBlock()]
        self.pair = LinenPair()
        self.shared = nn.Dense(WIDTH)

    @nn.compact
    def __call__(self, x, training):
        assert training in (True, False)
        x = self.blocks[0](x, mode="replace", repeats=2)
        x = self.blocks[1](self.blocks[1](x), x.mean())
        h, extras = self.pair(x, self.shared)
        assert extras["unit"] == "metres"
        assert type(extras["count"]) is int
        assert isinstance(extras["table"], np.ndarray)
        x = x + self.shared(h) * extras["mean"]
        x, _ = linen_scan(2)(x, None)
        return nn.RNN(nn.SimpleCell(3))(x.reshape(len(x), 2, -1))[:, -1]


class NNXBlock(nnx.Module):
    def __init__(self, rngs, width=WIDTH):
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, epsilon=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x, scale=None, *, mode="add", repeats=1):
        assert isinstance(repeats, int)
        h = self.dropout(nnx.gelu(self.norm(self.first(x))))
        for _ in range(repeats):
            h = self.last(h)
        h = h if scale is None else h * scale
        return x + h if mode == "add" else h


class NNXPair(nnx.Module):
    def __init__(self, rngs):
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, layer, rngs):
        self.calls[...] += 1
        h = self.last(layer(x)) + jax.random.normal(rngs.noise(), x.shape)
        return h, {"mean": h.mean(-1, keepdims=True), "unit": "metres", "none": None, "count": 2, "table": np.ones(2)}


class NNXNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([NNXBlock(rngs), NNXBlock(rngs)])
        # A layer that two blocks have in common.
        self.blocks[1].last = self.blocks[0].last
        self.by_name = nnx.Dict(pair=NNXPair(rngs))
        self.shared = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.noise = nnx.Rngs(noise=1)
        self.stacked = nnx.split_rngs(splits=2)(nnx.vmap(NNXBlock, in_axes=0, out_axes=0))(rngs)
        self.rnn = nnx.RNN(nnx.SimpleCell(2, 3, rngs=rngs))

    def __call__(self, x, training):
        assert training in (True, False)
        x = self.blocks[0](x, mode="replace", repeats=2)
        x = self.blocks[1](self.blocks[1](x), x.mean())
        h, extras = self.by_name["pair"](x, self.shared, rngs=self.noise)
        assert extras["unit"] == "metres"
        assert type(extras["count"]) is int
        assert isinstance(extras["table"], np.ndarray)
        x = x + self.shared(h) * extras["mean"]
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stacked)
        return self.rnn(x.reshape(len(x), 2, -1))[:, -1]


def linen_stack():
    return [LinenBlock(), nn.gelu, lambda x: (x, "metres"), lambda x, unit: x, LinenBlock(), nn.Dense(3)]


def nnx_stack():
    return [NNXBlock(nnx.Rngs(0)), nnx.gelu, NNXBlock(nnx.Rngs(1)), nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(2))]


def initial(functional):
    return jax.jit(functional.init)(jax.random.key(0), X, functional.initial_values)[:2]


def train(functional, values, number, real_rows, policy, **options):
    """Returns the outputs per row, and (gradients, state) of the mean over real rows, as a step computes them."""
    def step(replicated, batch):
        params, model_state = replicated
        context = get_replica_context()

        def loss(params):
            outputs, new_state = functional.apply(
                params, model_state, batch, training=True, batch_norm=policy,
                make_key=key_maker(replica=context.replica_id_in_sync_group), **options)
            rows = jnp.square(outputs).sum(-1) * context.row_mask
            return rows.sum() * context.num_replicas_in_sync / context.global_rows, (outputs, new_state)

        gradients, (outputs, new_state) = jax.grad(loss, has_aux=True)(params)
        return outputs, context.all_reduce("mean", (gradients, new_state))

    return run_replicas(step, number, values, X, real_rows)


def assert_same(first, second):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), first, second)
    assert [leaf.dtype for leaf in jax.tree.leaves(first)] == [leaf.dtype for leaf in jax.tree.leaves(second)]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "policy"), [(LinenNet, "global"), (NNXNet, "global"), (linen_stack, "per_replica"),
                                              (nnx_stack, "per_replica")])
def test_outputs_gradients_state_and_masks_are_those_of_a_plain_call(make, policy):
    functional = as_functional(make())
    values = initial(functional)
    plain = train(functional, values, 8, 13, policy)
    assert_same(train(functional, values, 8, 13, policy, remat=True), plain)
    assert not any((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(plain)), "a part took no part"


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: [nn.Dense(3), nn.BatchNorm(), nn.gelu], lambda: [
    nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nn.gelu]], ids=["linen", "nnx"])
def test_eager_gradients_are_those_of_a_plain_call(make):
    functional = as_functional(make())
    params, model_state = initial(functional)

    def loss(params, remat):
        outputs, new_state = functional.apply(params, model_state, X, training=True, make_key=key_maker(), remat=remat)
        return jnp.square(outputs).mean(), new_state

    assert_same(*(jax.grad(loss, has_aux=True)(params, remat) for remat in (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [linen_stack, nnx_stack])
def test_replicas_exchange_nothing_twice(make):
    class Counting(replica_context.ReplicaContext):
        num_replicas_in_sync = 2

        def sum(self, value):
            return jax.lax.psum(value, "replica")

        def all_reduce(self, reduce_op, value, options=None):
            return self.sum(value)

    functional = as_functional(make())
    params, model_state = initial(functional)

    def exchanges(remat):
        def loss(params):
            return functional.apply(params, model_state, X, training=True, make_key=key_maker(), remat=remat)[0].sum()

        with replica_context.enter(Counting(rows=len(X))):
            return str(jax.make_jaxpr(jax.grad(loss), axis_env=[("replica", 2)])(params)).count(" psum")

    # One for each of the two BatchNorms, and one for its gradient.
    assert exchanges(remat=False) == exchanges(remat=True) == 4


# Which layers are chosen.

def chosen_layers(functional, inputs=X, training=True, remat=True, **options):
    """Returns how many calls are rematerialised, at the top of the program and within its loops."""
    params, model_state, _ = jax.eval_shape(functional.init, jax.random.key(0), inputs)
    params = params if not options else params[options["module"]]
    inputs = inputs if not options else inputs[options["module"]]
    program = jax.make_jaxpr(lambda *values: functional.apply(
        *values, inputs, training=training, make_key=key_maker(), remat=remat, **options)[0])(params, model_state)

    def count(program, loops):
        checkpoints = 0
        for equation in program.eqns:
            checkpoints += equation.primitive.name in ("checkpoint", "remat2") and not loops
            if equation.primitive.name == "scan":
                checkpoints += count(equation.params["jaxpr"], False) if loops else 0
        return checkpoints

    return count(program, False), count(program, True)


class LinenPile(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = LinenBlock()(x)
        return x


class LinenAround(nn.Module):
    inner: tuple
    head: bool = True

    @nn.compact
    def __call__(self, x):
        for layer in self.inner:
            x = layer(x)
        return nn.Dense(2)(x) if self.head else x


class NNXPile(nnx.Module):
    def __init__(self, layers):
        self.blocks = nnx.List([NNXBlock(nnx.Rngs(index)) for index in range(layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NNXAround(nnx.Module):
    def __init__(self, inner, head=True):
        self.inner = nnx.List(inner)
        self.head = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0)) if head else None

    def __call__(self, x):
        for layer in self.inner:
            x = layer(x)
        return self.head(x) if self.head else x


class LinenOverLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, _ = linen_scan(6)(x, None)
        return nn.Dense(2)(x)


class NNXOverLayers(nnx.Module):
    def __init__(self):
        self.stacked = nnx.split_rngs(splits=6)(nnx.vmap(NNXBlock, in_axes=0, out_axes=0))(nnx.Rngs(0))
        self.head = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.stacked))


class LinenWithoutLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (WIDTH,))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "expected"), [
    (lambda: LinenPile(3), (3, 0)),
    (lambda: NNXPile(3), (3, 0)),
    (lambda: [LinenBlock() for _ in range(3)], (3, 0)),
    (lambda: [*(LinenBlock() for _ in range(3)), nn.gelu], (4, 0)),
    (lambda: nn.Sequential([LinenBlock() for _ in range(3)]), (3, 0)),
    (lambda: nnx.Sequential(*(NNXBlock(nnx.Rngs(index)) for index in range(3))), (3, 0)),
    # A wrapper, with and without a head, and wrappers around a wrapper.
    (lambda: LinenAround((LinenPile(3),), head=False), (3, 0)),
    (lambda: LinenAround((LinenPile(3),)), (4, 0)),
    (lambda: NNXAround([NNXPile(3)], head=False), (3, 0)),
    (lambda: NNXAround([NNXPile(3)]), (4, 0)),
    (lambda: LinenAround((LinenAround((LinenAround((LinenPile(3),)),), head=False),), head=False), (4, 0)),
    (lambda: [LinenPile(3), nn.Dense(2)], (4, 0)),
    # An encoder and a decoder.
    (lambda: LinenAround((LinenPile(3), LinenPile(3)), head=False), (6, 0)),
    pytest.param(lambda: NNXAround([NNXPile(3), NNXPile(3)], head=False), (6, 0), marks=pytest.mark.exhaustive),
    # A scan over layers.
    (LinenOverLayers, (1, 1)),
    (NNXOverLayers, (1, 1)),
    # Without layers there is nothing to choose from.
    (LinenWithoutLayers, (0, 0)),
    (lambda: nn.Dense(2), (0, 0)),
])
def test_layers_are_chosen_so_that_least_is_kept(make, expected):
    assert chosen_layers(as_functional(make())) == expected


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: LinenPile(2), lambda: NNXPile(2), linen_stack, nnx_stack])
@pytest.mark.parametrize("options", [{"training": False}, {"remat": False}])
def test_nothing_is_rematerialised_unless_asked_for_in_training(make, options):
    assert chosen_layers(as_functional(make()), **options) == (0, 0)


@pytest.mark.slow
def test_modules_of_a_dict_are_rematerialised():
    functional = as_functional({"linen": LinenPile(3), "nnx": NNXPile(2)})
    inputs = {"linen": X, "nnx": X}
    assert chosen_layers(functional, inputs, module="linen") == (3, 0)
    assert chosen_layers(functional, inputs, module="nnx") == (2, 0)


@pytest.mark.slow
def test_the_choice_depends_on_the_shapes_of_the_inputs():
    class ByShape(nn.Module):
        @nn.compact
        def __call__(self, x):
            for block in [LinenBlock(name=f"block_{index}") for index in range(4)][:len(x)]:
                x = block(x)
            return x

    functional = as_functional(ByShape())
    params, model_state, _ = jax.eval_shape(functional.init, jax.random.key(0), X[:4])
    for rows in (4, 3, 4):
        program = jax.make_jaxpr(lambda *values: functional.apply(
            *values, training=True, make_key=key_maker(), remat=True)[0])(params, model_state, X[:rows])
        assert sum(equation.primitive.name in ("checkpoint", "remat2") for equation in program.eqns) == rows


class Refusing(nn.Module):
    def __call__(self, x):
        raise RuntimeError("no training today")


def test_an_error_in_a_layer_is_passed_on_and_leaves_nothing_behind():
    functional = as_functional([nn.Dense(WIDTH), Refusing()])
    with pytest.raises(RuntimeError, match="no training today"):
        functional.apply({"layers_0": {"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}}, {}, X,
                         training=True, make_key=no_keys, remat=True)
    assert chosen_layers(as_functional(LinenPile(2)), remat=False) == (0, 0)


@pytest.mark.slow
def test_keys_are_only_asked_for_by_the_call_itself():
    functional = as_functional(LinenPile(2))
    params, model_state, _ = functional.init(jax.random.key(0), X)
    seen = []
    functional.apply(params, model_state, X, training=True, make_key=key_maker(seen=seen), remat=True)
    assert seen == ["dropout"]


def test_leaves_are_taken_out_and_put_back():
    layer = nn.Dense(2)
    taken, put_back = take_out(((X, layer), {"mode": None}), lambda leaf: isinstance(leaf, nn.Module))
    assert taken == [layer]
    assert put_back("other") == ((X, "other"), {"mode": None})


# The effect.

WIDE = 32


class LinenWide(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = x
        for _ in range(3):
            h = nn.gelu(nn.Dense(4 * WIDE)(h))
        return x + nn.Dense(WIDE)(h)


class NNXWide(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        sizes = [WIDE, 4 * WIDE, 4 * WIDE, 4 * WIDE]
        self.hidden = nnx.List([nnx.Linear(size, 4 * WIDE, rngs=rngs) for size in sizes[:3]])
        self.last = nnx.Linear(4 * WIDE, WIDE, rngs=rngs)

    def __call__(self, x):
        h = x
        for layer in self.hidden:
            h = nnx.gelu(layer(h))
        return x + self.last(h)


@pytest.mark.slow
@pytest.mark.parametrize("in_loop", [False, True], ids=["step", "steps_in_a_loop"])
@pytest.mark.parametrize("make", [
    lambda: LinenAround(tuple(LinenWide() for _ in range(8))),
    lambda: [NNXWide(seed) for seed in range(8)],
], ids=["linen", "nnx"])
def test_a_step_needs_less_memory(make, in_loop):
    functional = as_functional(make())
    batch = jnp.ones((1024, WIDE))
    params, model_state, _ = jax.eval_shape(functional.init, jax.random.key(0), batch, functional.initial_values)

    def temporary_bytes(remat):
        def gradients(params, batch):
            return jax.grad(lambda params: jnp.square(functional.apply(
                params, model_state, batch, training=True, make_key=no_keys, remat=remat)[0]).mean())(params)

        def steps(params, batch, count):
            def step(_, params):
                return jax.tree.map(lambda value, slope: value - 0.1 * slope, params, gradients(params, batch))
            return jax.lax.fori_loop(0, count, step, params)

        lowered = jax.jit(steps).lower(params, batch, 3) if in_loop else jax.jit(gradients).lower(params, batch)
        return lowered.compile(KEEP_BARRIERS).memory_analysis().temp_size_in_bytes

    assert temporary_bytes(remat=True) < 0.35 * temporary_bytes(remat=False)


# Policies.

POLICIES = [True, "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable",
            "offload_dot_with_no_batch_dims", jax.checkpoint_policies.save_only_these_names("hidden")]


class LinenNamed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = LinenNamedBlock()(x)
        return x


class LinenNamedBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = checkpoint_name(nn.Dense(3 * WIDTH)(x), "hidden")
        return x + nn.Dense(WIDTH)(jnp.tanh(h))


class NNXNamed(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([NNXNamedBlock(seed) for seed in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NNXNamedBlock(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first, self.last = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.last(jnp.tanh(checkpoint_name(self.first(x), "hidden")))


@pytest.mark.sampled(2)
@pytest.mark.every_case
@pytest.mark.parametrize("make", [LinenNamed, NNXNamed], ids=["linen", "nnx"])
def test_a_policy_says_what_is_kept_and_gradients_are_those_of_a_plain_call(make):
    functional = as_functional(make())
    params, model_state = initial(functional)

    def gradients(params, remat):
        return jax.grad(lambda params: jnp.square(functional.apply(
            params, model_state, X, training=True, make_key=no_keys, remat=remat_policies.get(remat) or False)[0]
            ).mean())(params)

    plain = jax.jit(gradients, static_argnums=1)(params, False)
    counts = {}
    for policy in POLICIES:
        program = jax.make_jaxpr(gradients, static_argnums=1)(params, policy)
        text = str(program)
        counts[str(policy)] = (text.count(" dot_general["), text.count(" tanh "), text.count(" device_put["))
        if policy in (True, "offload_dot_with_no_batch_dims"):
            assert_same(jax.jit(gradients, static_argnums=1)(params, policy), plain)
    recomputed = counts["True"]
    assert counts["nothing_saveable"] == recomputed
    assert counts["dots_saveable"] == counts["dots_with_no_batch_dims_saveable"]
    assert counts["dots_saveable"][0] < recomputed[0] and counts["dots_saveable"][1] == recomputed[1]
    assert counts["everything_saveable"][:2] == (counts["dots_saveable"][0], recomputed[1] // 2)
    assert counts[str(POLICIES[-1])] == counts["dots_saveable"]
    # Each product with weights goes to the host, and comes back.
    assert recomputed[2] == 0 and counts["offload_dot_with_no_batch_dims"][2] > 0


def test_a_memory_that_devices_lack_is_refused_by_name():
    class Device:
        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})()]

        def __str__(self):
            return "gpu:0"

    with pytest.raises(ValueError, match=r"`remat='offload_dot_with_no_batch_dims'` keeps values in the memory "
                                         r"'pinned_host', which the device gpu:0 lacks. It has: device"):
        remat_policies.get("offload_dot_with_no_batch_dims").check_memories([Device()])
    remat_policies.get("dots_saveable").check_memories([Device()])


@pytest.mark.parametrize(("remat", "error", "says"), [
    ("dots_savable", ValueError, "Unknown remat 'dots_savable'. Did you mean 'dots_saveable'.*JAX's policies: check"),
    ("save_only_these_names", ValueError, r"Call it: `remat=jax.checkpoint_policies.save_only_these_names\(...\)`"),
    (jax.checkpoint_policies.save_only_these_names, TypeError,
     "`remat=save_only_these_names` is a function that makes a policy. Call it"),
    (lambda: True, TypeError, r"as `policy\(primitive, \*inputs, \*\*parameters\)`\. Received: a function of \(\)"),
    (3, TypeError, "`remat` must be True, False, a name in")])
def test_other_policies_are_refused(remat, error, says):
    with pytest.raises(error, match=says):
        trainer.Model(nn.Dense(1)).compile("sgd", "mse", remat=remat)


@pytest.mark.slow
def test_policies_give_the_same_training_on_two_devices_and_a_text_that_processes_agree_on():
    def build(remat):
        model = trainer.Model(LinenNamed(), seed=0)
        model.compile("sgd", "mse", remat=remat, microbatches=2)
        return model

    x = np.tile(X, (2, 1))[:27]
    for policy in ("dots_saveable", POLICIES[-1]):
        assert_strategies_equal(lambda policy=policy: build(policy), (x, x), [mirrored(2), FullyShardedStrategy(
            ["cpu:0", "cpu:1"], min_shard_bytes=0)], batch_size=8)
        assert " at 0x" not in str(remat_policies.get(policy))
    kept, plain = build("dots_saveable"), build(False)
    for model in (kept, plain):
        model.fit(x, x, batch_size=8, verbose=0)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
                 kept.state.params, plain.state.params)
