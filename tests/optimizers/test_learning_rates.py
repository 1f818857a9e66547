"""The learning rate of every kind of optimizer: found, read and set, without compiling or changing anything else."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import optimizers
from trainer.optimizers import optax_learning_rate
from trainer.optimizers.attached_optimizer import AttachedOptimizer

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.float32(0.5)}
GRADS = {"w": jnp.array([0.1, 0.2, -0.3]), "b": jnp.float32(0.7)}


def halving(count):
    return 0.5 * 0.5**count


def quarter_over(count):
    return 0.25 / (1.0 + count)


def foreign(scale):
    """A transformation from outside of optax."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda grads, state, params=None: (jax.tree.map(lambda grad: scale * grad, grads), state))


def injected(**arguments):
    return optax.inject_hyperparams(optax.sgd)(**arguments)


FOUND = {
    "sgd": optax.sgd(0.25),
    "sgd with momentum": optax.sgd(0.25, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.25),
    "adam at a JAX scalar": optax.adam(jnp.float32(0.25)),
    "adamw": optax.adamw(0.25),
    "adamw with a mask": optax.adamw(0.25, mask={"w": True, "b": False}),
    "adagrad": optax.adagrad(0.25),
    "adadelta": optax.adadelta(0.25),
    "adamax": optax.adamax(0.25),
    "adafactor": optax.adafactor(0.25),
    "amsgrad": optax.amsgrad(0.25),
    "lamb": optax.lamb(0.25),
    "lars": optax.lars(0.25),
    "lion": optax.lion(0.25),
    "nadam": optax.nadam(0.25),
    "novograd": optax.novograd(0.25),
    "rmsprop": optax.rmsprop(0.25),
    "rmsprop with momentum": optax.rmsprop(0.25, momentum=0.9, centered=True),
    "sign_sgd": optax.sign_sgd(0.25),
    "yogi": optax.yogi(0.25),
    "behind clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.25)),
    "behind a scale that Adam undoes": optax.chain(optax.scale(8.0), optax.clip(1.0), optax.adam(0.25)),
    "behind a foreign stage that Adam undoes": optax.chain(foreign(2.0), optax.adam(0.25)),
    "a product of scales": optax.chain(optax.trace(0.9), optax.scale(0.5), optax.scale(-0.5)),
    "nested chains": optax.chain(optax.chain(optax.clip(1.0), optax.chain(optax.sgd(0.25))), optax.zero_nans()),
    "ascent": optax.sgd(-0.25),
    "a schedule": optax.adam(lambda count: 0.25 / (1.0 + count)),
    "an injected rate": injected(learning_rate=0.25),
    "an injected rate behind clipping": optax.chain(optax.clip(1.0), injected(learning_rate=0.25)),
    "an injected schedule": injected(learning_rate=lambda count: 0.25 / (1.0 + count)),
}
FOUND |= {
    "in a wrapper that may skip updates": optax.apply_if_finite(optax.sgd(0.25), 3),
    "in a wrapper behind clipping": optax.chain(optax.clip(1.0), optax.apply_if_finite(optax.adam(0.25), 3)),
    "in a wrapper that collects gradients": optax.MultiSteps(optax.sgd(0.25), 1).gradient_transformation(),
    "of groups with one rate": optax.partition(
        {"one": optax.adam(0.25), "two": optax.sgd(0.25), "fixed": optax.set_to_zero()}, {"w": "one", "b": "two"}),
    "of groups with one schedule": optax.partition(
        {"one": optax.adam(quarter_over), "two": optax.sgd(quarter_over)}, {"w": "one", "b": "two"}),
    "of groups with injected rates": optax.partition(
        {"one": injected(learning_rate=0.25), "two": injected(learning_rate=0.25)}, {"w": "one", "b": "two"}),
    "injected, in wrappers": optax.apply_if_finite(
        optax.masked(injected(learning_rate=0.25), {"w": True, "b": True}), 3),
    "behind which some parameters stay fixed": optax.chain(
        optax.sgd(0.25), optax.masked(optax.set_to_zero(), {"w": False, "b": True})),
}
FIXED = {  # rates that cannot be set, as they do not scale the whole update
    "a rate for some parameters": optax.masked(optax.sgd(0.25), {"w": True, "b": False}),
    "a rate of fast parameters": optax.lookahead(optax.sgd(0.25), 2, 0.5),
}
UNKNOWN = {
    "a foreign transformation": foreign(-0.25),
    "a foreign stage at the end": optax.chain(optax.adam(0.25), foreign(1.0)),
    "a foreign stage in front of a linear one": optax.chain(foreign(1.0), optax.sgd(0.25)),
    "a rate in front of clipping": optax.chain(optax.sgd(0.25), optax.clip(1.0), optax.scale(1.0)),
    "a rate in front of a decay": optax.fromage(0.25),
    "a rate for each group": optax.partition({"one": optax.sgd(0.25), "two": optax.sgd(0.5)}, {"w": "one", "b": "two"}),
    "groups without a rate": optax.partition({"all": optax.set_to_zero()}, {"w": "all", "b": "all"}),
    "a wrapper behind a scale": optax.chain(optax.apply_if_finite(optax.sgd(0.25), 3), optax.scale(0.5)),
    "an average that a rate enters": optax.contrib.schedule_free_sgd(0.25),
    "a plateau on top of a rate": optax.chain(optax.sgd(0.25), optax.contrib.reduce_on_plateau()),
    "an injected rate in front of a wrapped one": optax.chain(
        injected(learning_rate=0.25), optax.apply_if_finite(injected(learning_rate=0.25), 3)),
    "a scale for each element": optax.chain(optax.scale(jnp.ones(3))),
    "no rate at all": optax.scale_by_adam(),
    "two injected rates": optax.chain(injected(learning_rate=0.25), injected(learning_rate=0.25)),
    "an injected rate that is scaled": optax.chain(injected(learning_rate=0.25), optax.scale(0.5)),
    "another injected number": optax.inject_hyperparams(optax.scale)(step_size=-0.25),
    "the rate of a line search": optax.scale_by_backtracking_linesearch(max_backtracking_steps=2),
}


def named(table):
    return [pytest.param(value, id=name) for name, value in table.items()]


def same_bits(ours, theirs):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(),
                                     jax.tree.map(np.asarray, ours), jax.tree.map(np.asarray, theirs)))


@pytest.mark.parametrize("transformation", named(FOUND))
def test_the_rate_of_an_optax_transformation_is_found(transformation):
    optimizer = optimizers.get(transformation)
    assert float(optimizer.learning_rate) == 0.25
    assert float(optimizer.read_learning_rate(optimizer.init(PARAMS))) == 0.25


@pytest.mark.filterwarnings("ignore:.*has no learning rate")
@pytest.mark.parametrize("transformation", named(UNKNOWN))
def test_a_rate_that_is_not_certain_is_neither_read_nor_set(transformation):
    optimizer = optimizers.get(transformation)
    state = optimizer.init(PARAMS)
    attached = AttachedOptimizer(optimizer, lambda: state, lambda state: None)
    for read in (lambda: optimizer.learning_rate, lambda: attached.learning_rate):
        with pytest.raises(ValueError, match=r"rate of this optax .* is not known.* `optax.inject_hyperparams"):
            read()
    with pytest.raises(ValueError, match="is not known"):
        optimizer.with_learning_rate(state, 0.5)


@pytest.mark.parametrize(("transformation", "climbs"), [
    (optax.scale_by_adam(), True), (optax.chain(optax.clip(1.0), optax.trace(0.9)), True), (optax.set_to_zero(), False),
    (optax.chain(optax.scale_by_adam(), foreign(-0.25)), False),
    (optax.chain(optax.scale_by_adam(), optax.scale(-1.0)), False), (optax.adamw(0.25), False),
    (optax.apply_if_finite(optax.sgd(0.25), 3), False),
])
def test_a_transformation_without_a_rate_is_warned_of(transformation, climbs):
    with pytest.warns(UserWarning, match="has no learning rate") if climbs else contextlib.nullcontext():
        optimizers.get(transformation)


@pytest.mark.parametrize("transformation", named(FIXED))
def test_a_rate_that_does_not_scale_all_of_an_update_is_read_but_not_set(transformation):
    optimizer = optimizers.get(transformation)
    assert float(optimizer.learning_rate) == 0.25
    with pytest.raises(ValueError, match=r"\(.*scale\) cannot be set.* `optax.inject_hyperparams"):
        optimizer.learning_rate = 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "second_grad", "rates"), [
    (lambda inner: optax.MultiSteps(inner, 2), 1.0, [0.5, 0.5, 0.25, 0.25, 0.125]),
    (lambda inner: optax.apply_if_finite(inner, 3), np.inf, [0.5, 0.25, 0.25, 0.125, 0.0625]),
])
@pytest.mark.parametrize("make", [optax.sgd, lambda schedule: injected(learning_rate=schedule)])
def test_a_schedule_in_a_wrapper_stands_where_the_wrapper_has_made_updates(wrap, second_grad, rates, make):
    optimizer = optimizers.get(wrap(make(halving)))
    state, read = optimizer.init(PARAMS), []
    for count in range(5):
        read.append(float(optimizer.read_learning_rate(state)))
        grads = jax.tree.map(lambda grad, factor=second_grad if count == 1 else 1.0: factor * grad, GRADS)
        _, state = optimizer.update(grads, state, PARAMS)
    assert read == rates
    state = optimizer.with_learning_rate(state, 1.0)
    assert float(optimizer.read_learning_rate(state)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("makers", "factor"), [
    pytest.param(optax_learning_rate.LINEAR, 2.0, id="linear"),
    pytest.param(optax_learning_rate.NORMALIZING, 1.0, id="normalizing"),
])
def test_a_stage_does_to_a_doubled_gradient_what_its_table_says(makers, factor):
    def second_update(transformation, scale):
        params, grads = PARAMS["w"], 100 * scale * GRADS["w"]
        state = transformation.init(params)
        for _ in range(2):
            updates, state = transformation.update(grads, state, params)
        return updates

    for maker in sorted(makers):
        make = getattr(optax, maker, None) or getattr(optax.transforms, maker)
        transformation = make(0.9) if maker in ("ema", "trace") else make()
        np.testing.assert_allclose(
            second_update(transformation, 2.0), factor * second_update(transformation, 1.0), rtol=1e-3, err_msg=maker)


def test_every_stage_in_the_tables_is_optaxs():
    for maker in optax_learning_rate.LINEAR | optax_learning_rate.NORMALIZING | optax_learning_rate.OTHER:
        assert hasattr(optax, maker) or hasattr(optax.transforms, maker), maker


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no learning rate")
@pytest.mark.parametrize("transformation", named(FOUND | {
    name: unknown for name, unknown in UNKNOWN.items() if name not in (
        "the rate of a line search", "a scale for each element", "a plateau on top of a rate")}))
def test_updates_equal_optaxs_bit_for_bit_until_a_rate_is_set(transformation):
    optimizer = optimizers.get(transformation)
    ours, theirs = optimizer.init(PARAMS), transformation.init(PARAMS)
    for _ in range(3):
        our_updates, ours = optimizer.update(GRADS, ours, PARAMS)
        updates, theirs = transformation.update(GRADS, theirs, PARAMS)
        assert same_bits(our_updates, updates)
        assert same_bits(ours.inner, theirs)


@pytest.mark.slow
def test_updates_of_half_precision_stay_as_they_are_until_a_rate_is_set():
    params = jnp.asarray([1.0, 2.0], jnp.bfloat16)
    transformation = optax.adam(0.3)
    optimizer = optimizers.get(transformation)
    ours, _ = optimizer.update(params, optimizer.init(params), params)
    theirs, _ = transformation.update(params, transformation.init(params), params)
    assert same_bits(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("transformation", named(
    {name: found for name, found in FOUND.items() if name != "ascent"}))
def test_half_the_rate_gives_half_the_update(transformation):
    optimizer = optimizers.get(transformation)
    state = optimizer.init(PARAMS)
    halved = optimizer.with_learning_rate(state, optimizer.learning_rate / 2)
    updates, _ = optimizer.update(GRADS, state, PARAMS)
    half, _ = optimizer.update(GRADS, halved, PARAMS)
    assert any(np.any(update) for update in jax.tree.leaves(updates))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a / 2, b, rtol=1e-6), updates, half)


@pytest.mark.parametrize("optimizer", [
    optimizers.SGD(0.1), optimizers.Adam(), optimizers.get(optax.sgd(0.1)),
    optimizers.get(injected(learning_rate=0.1))])
@pytest.mark.parametrize("value", [0.0075, 1 / 3, 0.0, np.float32(0.1), jnp.float32(0.1), optimizers.LearningRate(0.7)])
def test_a_constant_rate_reads_back_as_the_float32_that_was_set(optimizer, value):
    state = optimizer.with_learning_rate(optimizer.init(PARAMS), value)
    _, state = optimizer.update(GRADS, state, PARAMS)
    read = optimizer.read_learning_rate(state)
    assert read.dtype == jnp.float32
    assert read.shape == ()
    assert np.asarray(read) == np.float32(value)


@pytest.mark.parametrize("optimizer", [
    optimizers.SGD(halving), optimizers.get(optax.sgd(halving)), optimizers.get(injected(learning_rate=halving))])
def test_a_rate_set_on_a_schedule_scales_the_rest_of_it(optimizer):
    state = optimizer.init(PARAMS)
    rates, steps = [], []
    for count in range(4):
        if count == 2:
            state = optimizer.with_learning_rate(state, 1.0)
        rates.append(float(optimizer.read_learning_rate(state)))
        updates, state = optimizer.update(GRADS, state, PARAMS)
        steps.append(float(-updates["b"] / GRADS["b"]))
    assert rates == [0.5, 0.25, 1.0, 0.5]
    np.testing.assert_allclose(steps, rates, rtol=1e-6)


def test_a_schedule_that_is_at_0_cannot_be_set():
    schedule = optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.0])
    optimizer = optimizers.SGD(schedule)
    _, state = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"cannot be set to 0.5: the optimizer's own rate is 0 after 1 updates"):
        optimizer.with_learning_rate(state, 0.5)


def test_a_transformation_built_with_a_rate_of_0_reads_0_and_cannot_be_set():
    optimizer = optimizers.get(optax.sgd(0.0))
    state = optimizer.init(PARAMS)
    assert float(optimizer.read_learning_rate(state)) == 0.0
    with pytest.raises(ValueError, match="the optimizer's own rate is 0"):
        optimizer.with_learning_rate(state, 0.5)


def test_setting_an_injected_rate_sets_the_hyperparameter():
    optimizer = optimizers.get(optax.chain(optax.clip(1.0), injected(learning_rate=0.1)))
    state = optimizer.with_learning_rate(optimizer.init(PARAMS), 0.025)
    _, state = optimizer.update(GRADS, state, PARAMS)
    assert np.asarray(state.inner[1].hyperparams["learning_rate"]) == np.float32(0.025)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("optimizer", [
    optimizers.Adam(), optimizers.SGD(halving), optimizers.get(optax.adam(0.1)),
    optimizers.get(injected(learning_rate=0.1))])
def test_setting_a_rate_traces_and_compiles_nothing(optimizer):
    traces = itertools.count()

    @jax.jit
    def step(params, state):
        next(traces)
        updates, state = optimizer.update(GRADS, state, params)
        return optax.apply_updates(params, updates), state

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params, state = jax.device_put((PARAMS, optimizer.init(PARAMS)), replicated)
    params, state = step(params, state)
    for value in (0.05, 0.025):
        state = optimizer.with_learning_rate(state, value)
        assert state.learning_rate.sharding == replicated
        params, state = step(params, state)
    assert next(traces) == 1
    assert step._cache_size() == 1


@pytest.mark.parametrize("optimizer", [
    optimizers.Adam(0.5), optimizers.SGD(halving), optimizers.get(optax.sgd(0.5)), optimizers.get(optax.sgd(halving)),
    optimizers.get(injected(learning_rate=0.5))])
def test_a_rate_set_before_there_is_a_state_is_what_the_state_starts_with(optimizer):
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    state = jax.jit(optimizer.init)(PARAMS)
    assert float(optimizer.read_learning_rate(state)) == 0.25
    if not isinstance(optimizer, optimizers.Adam):
        updates, _ = optimizer.update(GRADS, state, PARAMS)
        np.testing.assert_allclose(updates["w"], -0.25 * GRADS["w"], rtol=1e-6)


@pytest.mark.parametrize(("value", "error", "message"), [
    (-1.0, ValueError, "`learning_rate` must be a number of at least 0. Received: learning_rate=-1"),
    (float("inf"), ValueError, "`learning_rate` must be a number of at least 0"),
    ("0.1", TypeError, "`learning_rate` must be a number. Received: str"),
    (halving, TypeError, "`learning_rate` must be a number. Received: function"),
])
def test_what_is_no_rate_cannot_be_set(value, error, message):
    optimizer = optimizers.Adam()
    with pytest.raises(error, match=message):
        optimizer.with_learning_rate(optimizer.init(PARAMS), value)
    with pytest.raises(error, match=message):
        optimizer.learning_rate = value


def test_a_transformation_with_extra_arguments_needs_none_of_them():
    def update(grads, state, params=None, *, scale=1.0, **extra):
        return jax.tree.map(lambda grad: -scale * grad, grads), state

    optimizer = optimizers.get(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    updates, _ = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    assert same_bits(updates, jax.tree.map(jnp.negative, GRADS))


@pytest.mark.parametrize(("transformation", "missing"), [
    pytest.param(optax.contrib.reduce_on_plateau(), "'value'", id="a plateau"),
    pytest.param(optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()), "'value'", id="in a chain"),
    pytest.param(optax.inject_hyperparams(optax.polyak_sgd)(max_learning_rate=1.0), "'value'", id="injected"),
    pytest.param(optax.chain(injected(learning_rate=0.1), optax.contrib.reduce_on_plateau()), "'value'",
                 id="behind an injected rate"),
])
def test_a_transformation_that_needs_extra_arguments_is_refused_with_their_names(transformation, missing):
    optimizer = optimizers.get(transformation)
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=rf"also needs {missing}, .*`state.apply_gradients\(grads, value=") as error:
        jax.eval_shape(optimizer.update, GRADS, state, PARAMS)
    assert isinstance(error.value.__cause__, TypeError)


@pytest.mark.parametrize("update", [lambda grads, state, params=None: halving(),
                                    lambda grads, state, params=None: named(FOUND, unknown=1)])
def test_another_type_error_of_a_transformation_stays_what_it_is(update):
    optimizer = optimizers.get(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    with pytest.raises(TypeError, match=r"(halving|named)\(\)"):
        optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)


def test_a_transformation_of_ones_own_is_told_the_rate():
    def update(grads, state, params=None, *, learning_rate):
        return jax.tree.map(lambda grad: -learning_rate * grad, grads), state

    optimizer = optimizers.Optimizer(
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update), halving, "mine")
    _, state = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    updates, _ = optimizer.update(GRADS, state, PARAMS)
    assert same_bits(updates, jax.tree.map(lambda grad: -0.25 * grad, GRADS))
    assert optimizer.name == "mine"


@pytest.mark.parametrize(("name", "message"), [
    ("lr", "no attribute 'lr' to set. Its rate is set by `model.optimizer.learning_rate = value`"),
    ("weight_decay", "no attribute 'weight_decay' to set.* call `compile` again with another optimizer"),
    ("iterations", "no setter|can't set"),
    ("optimizer", "no setter|can't set"),
])
def test_nothing_but_the_rate_of_a_compiled_models_optimizer_can_be_set(name, message):
    optimizer = optimizers.Adam(0.5)
    attached = AttachedOptimizer(optimizer, lambda: None, lambda state: None)
    with pytest.raises(AttributeError, match=message):
        setattr(attached, name, 0.1)
    attached.learning_rate *= 0.5
    assert float(optimizer.learning_rate) == 0.25


def test_the_arguments_of_an_optimizer_are_read_and_not_set():
    optimizer = optimizers.SGD(0.5, 0.9, clipnorm=1.0)
    attached = AttachedOptimizer(optimizer, lambda: None, lambda state: None)
    for one in (optimizer, attached):
        assert (one.momentum, one.clipnorm, one.weight_decay) == (0.9, 1.0, None)
        with pytest.raises(AttributeError, match="no attribute 'beta_1'"):
            _ = one.beta_1
    with pytest.raises(AttributeError, match=r"`momentum` of SGD.* change no update.* `SGD\(..., momentum=0.5\)`"):
        optimizer.momentum = 0.5
    assert optimizer.get_config()["momentum"] == optimizer.momentum == 0.9


def test_an_optimizer_of_the_users_keeps_and_sets_its_arguments():
    class Own(optimizers.Optimizer):
        def __init__(self, strength=1.0):
            super().__init__(optax.sgd(0.5), 0.5)
            self.strength = 2 * strength

    own = Own(3.0)
    own.strength += 1
    assert own.strength == 7.0


class TestLearningRate:
    rate = optimizers.LearningRate(0.25)

    def test_it_holds_a_float32_array_scalar(self):
        assert self.rate.value.dtype == jnp.float32
        assert self.rate.value.shape == ()
        assert optimizers.Adam(0.0075).learning_rate.value == 0.0075  # which a Python float read from it would not be

    def test_it_converts_like_a_number(self):
        assert float(self.rate) == 0.25
        assert self.rate.numpy() == np.float32(0.25)
        assert isinstance(self.rate.numpy(), np.float32)
        assert np.asarray(self.rate).dtype == np.float32
        assert np.asarray(self.rate, np.float64).dtype == np.float64
        assert f"{self.rate:.3f}" == "0.250"
        assert repr(optimizers.LearningRate(0.01)) == "LearningRate(0.01)"
        assert self.rate
        assert not optimizers.LearningRate(0.0)

    @pytest.mark.parametrize("other", [0.5, np.float32(0.5), jnp.float32(0.5), optimizers.LearningRate(0.5)])
    def test_it_compares_like_a_number(self, other):
        assert self.rate < other
        assert self.rate <= other
        assert self.rate != other
        assert other > self.rate
        assert other >= self.rate
        assert not self.rate > other
        assert not self.rate >= other
        assert self.rate == 0.25
        assert optimizers.LearningRate(0.0075) == 0.0075

    @pytest.mark.parametrize("two", [2, 2.0, np.float32(2), jnp.float32(2), optimizers.LearningRate(2.0)])
    def test_it_computes_like_a_number(self, two):
        rate = self.rate
        results = [rate * two, two * rate, rate / two, two / rate, rate + two, two + rate, rate - two, two - rate,
                   rate**two, -rate, abs(rate)]
        assert [float(result) for result in results] == [
            0.5, 0.5, 0.125, 8.0, 2.25, 2.25, -1.75, 1.75, 0.0625, -0.25, 0.25]

    def test_it_cannot_be_assigned_to_since_it_is_a_copy(self):
        message = r"Received: assign\(float\). Set the optimizer's: `model.optimizer.learning_rate = value`"
        with pytest.raises(TypeError, match=message):
            self.rate.assign(0.1)

    def test_equal_rates_hash_alike(self):
        assert {self.rate, optimizers.LearningRate(0.25)} == {self.rate}

    def test_it_outlives_the_state_that_it_was_read_from(self):
        state = optimizers.Adam(0.25).init(PARAMS)
        rate = optimizers.LearningRate(state.learning_rate)
        state.learning_rate.delete()
        assert float(rate) == 0.25
