"""Optimizers with Keras's names: Keras's arguments and numbers, their own errors, and a state that loops can carry."""

import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import optimizers

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "optimizers.json").read_text())
NAMES = sorted(REFERENCE["optimizer_arguments"])
VARIANTS = [
    (name, options) for name in NAMES
    for options in ({}, {"weight_decay": 0.1, "clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 1.0})
] + [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("RMSprop", {"momentum": 0.9, "centered": True})]


def built(case):
    arguments = dict(case["arguments"])
    if isinstance(arguments.get("learning_rate"), dict):
        schedule = arguments["learning_rate"]
        arguments["learning_rate"] = getattr(optimizers.schedules, schedule["class"])(**schedule["arguments"])
    return getattr(optimizers, case["class"])(**arguments)


def arrays(tree):
    return {name: jnp.asarray(value, jnp.float32) for name, value in tree.items()}


def avals(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


def step(optimizer, grads, state, params):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case['class']}-{i}") for i, case in enumerate(REFERENCE["optimizers"])])
def test_ten_steps_give_kerass_weights(case):
    optimizer, params = built(case), arrays(REFERENCE["params"])
    state = optimizer.init(params)
    jitted_step = jax.jit(step, static_argnums=0)
    after = []
    for grads in REFERENCE["grads"]:
        params, state = jitted_step(optimizer, arrays(grads), state, params)
        after.append(params)
    for ours, kerass in zip((after[0], after[-1]), case["weights"], strict=True):
        for name in ours:
            np.testing.assert_allclose(ours[name], kerass[name], rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_takes_kerass_arguments_in_order_with_their_defaults(name):
    parameters = inspect.signature(getattr(optimizers, name)).parameters.values()
    assert [[parameter.name, parameter.default] for parameter in parameters] == REFERENCE["optimizer_arguments"][name]
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_all_arguments_can_be_given_by_position():
    by_name = optimizers.Muon(0.5, clipnorm=2.0, gradient_accumulation_steps=3, name="mine", exclude_layers=["head"])
    arguments = [0.5, 0.9, 0.999, 0.004, 1e-7, 0.004, 2.0, None, None, False, 0.99, None, None, 3, "mine", ["head"]]
    assert optimizers.Muon(*arguments).get_config() == by_name.get_config()
    assert optimizers.AdamW(0.5, 0.25).get_config()["weight_decay"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_the_state_keeps_its_structure_and_dtypes_in_a_loop_over_mixed_dtypes(name, options):
    optimizer = getattr(optimizers, name)(learning_rate=0.1, **options)
    params = {"half": jnp.ones(3, jnp.bfloat16), "nested": [jnp.ones((2, 2), jnp.float32)]}
    grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, jnp.float32), params)
    state = optimizer.init(params)

    def body(_, carry):
        return step(optimizer, grads, carry[1], carry[0])

    new_params, new_state = jax.jit(lambda *carry: jax.lax.fori_loop(0, 3, body, carry))(params, state)
    assert avals((new_params, new_state)) == avals((params, state))
    assert int(new_state.count) == 3
    assert (new_params["nested"][0] < params["nested"][0]).all()


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_an_empty_tree_is_updated_to_an_empty_tree(name, options):
    optimizer = getattr(optimizers, name)(**options)
    updates, state = optimizer.update({}, optimizer.init({}), {})
    assert updates == {}
    assert int(state.count) == 1


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 1.0}])
def test_a_gradient_of_zero_is_clipped_to_zero(name, options):
    own = {"adam_weight_decay": 0.0} if name == "Muon" else {}
    optimizer = getattr(optimizers, name)(**({"weight_decay": 0.0} | own | options))
    params = {"w": jnp.zeros(3) if name == "Ftrl" else jnp.ones(3)}  # Ftrl moves other weights without a gradient
    updates, _ = optimizer.update({"w": jnp.zeros(3)}, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["w"], np.zeros(3))


def test_a_rate_set_later_leaves_accumulated_momentum_as_it_was():
    optimizer = optimizers.SGD(1.0, momentum=0.5)
    params = jnp.zeros(())
    _, state = optimizer.update(jnp.ones(()), optimizer.init(params), params)
    updates, _ = optimizer.update(jnp.ones(()), optimizer.with_learning_rate(state, 0.0), params)
    assert float(updates) == -0.5


@pytest.mark.parametrize("options", [{"learning_rate": 0.0}, {"initial_accumulator_value": 0.0}])
def test_ftrl_changes_nothing_where_it_would_divide_by_zero(options):
    optimizer, params = optimizers.Ftrl(**options), jnp.array([0.5, -0.5])
    grads = jnp.zeros(2) if "initial_accumulator_value" in options else jnp.ones(2)
    state = optimizer.init(params)
    updates, after = optimizer.update(grads, state, params)
    assert updates.tolist() == [0, 0]
    assert [leaf.tolist() for leaf in jax.tree.leaves(after.inner)] == [
        leaf.tolist() for leaf in jax.tree.leaves(state.inner)]


@pytest.mark.parametrize(("build", "message"), [
    (lambda: optimizers.Ftrl(learning_rate_power=0.1),
     "`learning_rate_power` must be a finite number of at most 0. Received: learning_rate_power=0.1"),
    (lambda: optimizers.Ftrl(initial_accumulator_value=-0.1), "`initial_accumulator_value` must be"),
    (lambda: optimizers.Ftrl(l1_regularization_strength=-0.1), "`l1_regularization_strength` must be"),
    (lambda: optimizers.Ftrl(beta=-0.1), "`beta` must be"),
    (lambda: optimizers.SGD(-0.1), "`learning_rate` must be a number of at least 0. Received: learning_rate=-0.1"),
    (lambda: optimizers.SGD(float("nan")), "`learning_rate` must be a number of at least 0"),
    (lambda: optimizers.SGD(momentum=1.5), r"`momentum` must be a number in \[0, 1\]. Received: momentum=1.5"),
    (lambda: optimizers.Adam(beta_1=1.0), r"`beta_1` must be a number in \[0, 1\)"),
    (lambda: optimizers.Adam(beta_2=-0.1), r"`beta_2` must be a number in \[0, 1\)"),
    (lambda: optimizers.Adam(epsilon=0.0), "`epsilon` must be a number above 0"),
    (lambda: optimizers.AdamW(weight_decay=-1.0), "`weight_decay` must be a number of at least 0"),
    (lambda: optimizers.Adamax(beta_2=1.0), "`beta_2` must be"),
    (lambda: optimizers.Nadam(epsilon=-1.0), "`epsilon` must be"),
    (lambda: optimizers.Lamb(beta_1=2.0), "`beta_1` must be"),
    (lambda: optimizers.Lion(beta_1=0.0), "`beta_1` must be a number above 0"),
    (lambda: optimizers.Adagrad(initial_accumulator_value=-0.1), "`initial_accumulator_value` must be"),
    (lambda: optimizers.RMSprop(rho=1.0), "`rho` must be"),
    (lambda: optimizers.RMSprop(momentum=-0.5), "`momentum` must be"),
    (lambda: optimizers.Adadelta(rho=-0.5), "`rho` must be"),
    (lambda: optimizers.SGD(clipnorm=0.0), "`clipnorm` must be a number above 0"),
    (lambda: optimizers.SGD(weight_decay=-0.1), "`weight_decay` must be"),
    (lambda: optimizers.Adam(clipnorm=1.0, clipvalue=0.5),
     "Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. Received: clipnorm=1.0, clipvalue=0.5"),
])
def test_an_impossible_number_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(("build", "message"), [
    (lambda: optimizers.SGD("0.1"), r"`learning_rate` must be a number or a schedule, such as `.*`. Received: str"),
    (lambda: optimizers.SGD(jnp.ones(2)), r"Received: array of shape \(2,\) and dtype float32"),
    (lambda: optimizers.SGD(momentum=True), r"`momentum` must be a number in \[0, 1\]. Received: bool"),
    (lambda: optimizers.AdamW(weight_decay=None), "`weight_decay` must be a number of at least 0. Received: NoneType"),
])
def test_what_is_no_number_is_refused(build, message):
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spelled", [str.lower, str.upper, str])
def test_get_knows_kerass_names_in_any_case(name, spelled):
    optimizer = optimizers.get(spelled(name))
    assert type(optimizer) is getattr(optimizers, name)
    assert optimizer.name == name.lower()


def test_get_returns_an_optimizer_as_it_is():
    optimizer = optimizers.Adam(name="mine")
    assert optimizers.get(optimizer) is optimizer
    assert optimizer.name == "mine"


def test_get_suggests_near_names():
    with pytest.raises(ValueError, match=r"Unknown optimizer 'adamm'. Did you mean 'adam'"):
        optimizers.get("adamm")


@pytest.mark.parametrize(("identifier", "received"), [
    (3, "a value of type int"), ({"a": "adam"}, "a value of type dict"),
    (optimizers.Adam, "Adam itself"), (optax.adam, "adam itself")])
def test_get_refuses_what_is_no_optimizer(identifier, received):
    with pytest.raises(TypeError, match=rf"`optimizer` must be .* Received: {received}\."):
        optimizers.get(identifier)
