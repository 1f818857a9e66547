"""Every optimizer and schedule beside Keras's: weights after several steps, rates, configurations, names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer
from tests.support import keras_comparison as compare
from tests.support.keras_cases import OPTIMIZERS, SCHEDULES
from trainer import optimizers
from trainer.core.precision import next_loss_scale
from trainer.optimizers.update_rule import UpdateRule

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")

# NumPy's, about Keras's variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
# Those of tests/support/keras_differences.py.
NOT_HERE = {"MultiOptimizer", "OptimizerMap"}
OURS_ALONE = {"CommonArguments", "LearningRate", "OptimizerState"}
CASES = [pytest.param(name, arguments, id="-".join([name, *map(str, arguments)]))
         for name, cases in OPTIMIZERS.items() for arguments in cases]
random = np.random.default_rng(0)
PARAMS = {"bias": random.normal(size=2).astype("float32"), "kernel": random.normal(size=(3, 2)).astype("float32")}
# Large and small gradients, and one of zeros.
GRADS = [{name: (scale * random.normal(size=value.shape)).astype("float32") for name, value in PARAMS.items()}
         for scale in (1, 10, 0.1, 0, 3)]


def made(library, name, arguments):
    arguments = dict(arguments)
    if arguments.get("learning_rate") == "schedule":
        arguments["learning_rate"] = library.schedules.ExponentialDecay(0.1, 2, 0.5)
    return getattr(library, name)(**arguments)


def weights_of_keras(optimizer):
    variables = [keras.Variable(value) for value in PARAMS.values()]
    optimizer.build(variables)
    for grads in GRADS:
        optimizer.apply(list(map(jnp.asarray, grads.values())), variables)
        yield list(map(np.asarray, variables))


def weights_of_ours(optimizer):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in GRADS:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        yield list(map(np.asarray, params.values()))


def compare_case(name, arguments):
    pairs = zip(weights_of_ours(made(optimizers, name, arguments)),
                weights_of_keras(made(keras.optimizers, name, arguments)), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        for one, other in zip(ours, theirs, strict=True):
            compare.check_equal("optimizers", one, other, f"{name}({arguments}) after step {number}", rtol=2e-5)


# Quick: the stored weights of tests/optimizers/test_optimizers.py.
@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_weights_are_those_of_keras(name):
    compare_case(name, {"weight_decay": 0.1, "clipvalue": 0.5, "gradient_accumulation_steps": 2})


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_weights_are_those_of_keras_with_all_arguments(name, arguments):
    compare_case(name, arguments)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_configurations_hold_what_kerass_hold_and_go_both_ways(name, arguments):
    ours, theirs = made(optimizers, name, arguments), made(keras.optimizers, name, arguments)
    config, kerass = ours.get_config(), theirs.get_config()
    compare.COUNTS["optimizers"] += 1
    assert config.keys() == kerass.keys()
    for key in kerass.keys() - {"name", "learning_rate"}:
        assert config[key] == (kerass[key] or config[key]), key
    if "schedule" in arguments.values():
        assert config["learning_rate"]["config"] == kerass["learning_rate"]["config"]
    else:
        assert np.float32(config["learning_rate"]) == np.float32(kerass["learning_rate"])
    plain = json.loads(json.dumps(optimizers.serialize(ours)))
    again = optimizers.deserialize(plain)
    assert type(again) is type(ours) and optimizers.serialize(again) == plain
    assert type(optimizers.get(keras.optimizers.serialize(theirs))) is type(ours)


def test_every_public_name_of_keras_is_here_and_compared():
    classes = compare.without(compare.public_names(keras.optimizers, compare.is_class), NOT_HERE)
    assert classes == {*OPTIMIZERS, "Optimizer", "LossScaleOptimizer"}
    assert set(optimizers.__all__) - OURS_ALONE == {*classes, "get", "serialize", "deserialize", "schedules"}
    schedules = compare.without(compare.public_names(keras.optimizers.schedules, compare.is_class),
                                {"LearningRateSchedule"})
    assert schedules == set(SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_rates_and_configurations_of_a_schedule_are_kerass(name):
    for arguments in SCHEDULES[name]:
        ours, theirs = (getattr(library.schedules, name)(**arguments) for library in (optimizers, keras.optimizers))
        for step in (0, 1, 2, 3, 4, 5, 6, 7, 12, 100):
            compare.check_equal("schedules", np.asarray(ours(step)), np.asarray(theirs(step)),
                                f"{name}({arguments}) at {step}")
        assert ours.get_config() == theirs.get_config()
        plain = json.loads(json.dumps(optimizers.schedules.serialize(ours)))
        assert optimizers.schedules.deserialize(plain).get_config() == ours.get_config()
        again = optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(theirs))
        assert float(again(3)) == float(ours(3))


def test_a_schedule_of_ones_own_says_that_it_has_no_configuration():
    class Half(optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5

    with pytest.raises(NotImplementedError, match=r"Half must define `get_config\(self\)`"):
        Half().get_config()


@pytest.mark.parametrize(("optimizer", "name"), [
    (lambda: optimizers.SGD(lambda count: 0.1), "learning_rate"),
    (lambda: optimizers.Optimizer(optax.identity(), 0.1), "transformation")])
def test_what_is_no_plain_data_is_refused(optimizer, name):
    with pytest.raises(TypeError, match=f"`{name}` of .* cannot be written as plain data"):
        optimizer().get_config()


def subclasses(optimizers):
    """Returns two classes of a user, of Keras's optimizers or of ours."""
    class TakesAny(optimizers.SGD):
        def __init__(self, learning_rate=0.5, damped=False, **kwargs):
            super().__init__(learning_rate, **kwargs)
            self.damped = damped

        def get_config(self):
            return {**super().get_config(), "damped": self.damped}

    class TakesFew(optimizers.SGD):
        def __init__(self, learning_rate=0.5):
            super().__init__(learning_rate, momentum=0.9, clipnorm=1.0)

        def get_config(self):
            return {"learning_rate": super().get_config()["learning_rate"]}

    return TakesAny, TakesFew


@pytest.mark.parametrize(("number", "arguments"), [
    (0, {}), (0, {"learning_rate": 0.25, "damped": True, "momentum": 0.9, "clipnorm": 2.0, "name": "mine"}),
    (1, {"learning_rate": 0.25})])
def test_a_users_subclass_comes_back_from_its_config(number, arguments):
    ours, theirs = subclasses(optimizers)[number], subclasses(keras.optimizers)[number]
    config = ours(**arguments).get_config()
    assert ours.from_config(config) == ours(**arguments)
    assert arguments.items() <= config.items()
    assert config.keys() <= theirs(**arguments).get_config().keys()
    assert theirs.from_config(theirs(**arguments).get_config()).get_config().items() >= config.items() - {
        ("name", "takesany")}  # see the table of differences


def test_a_users_subclass_needs_no_config_of_its_own():
    class Damped(optimizers.SGD):
        def __init__(self, learning_rate=0.5):
            super().__init__(learning_rate, momentum=0.9, clipnorm=1.0)

    assert Damped(0.25).get_config() == {"learning_rate": 0.25}
    assert Damped.from_config(Damped(0.25).get_config()) == Damped(0.25)


def test_what_a_subclass_fixes_itself_is_not_in_its_config():
    class Named(optimizers.SGD):
        def __init__(self, learning_rate=0.5, **kwargs):
            super().__init__(learning_rate, name="named", gradient_accumulation_steps=4, **kwargs)

    class Direct(optimizers.Optimizer):
        def __init__(self, learning_rate=0.5, **kwargs):
            super().__init__(optax.sgd(1.0), learning_rate, **kwargs)

    assert Named(0.25, momentum=0.9).get_config() == {"learning_rate": 0.25, "momentum": 0.9}
    for made in (Named(0.25, momentum=0.9), Direct(0.25), Direct(0.25, name="mine")):
        assert type(made).from_config(made.get_config()) == made
    assert Named().gradient_accumulation_steps == 4


def test_positional_arguments_without_names_are_no_plain_data():
    class Any(optimizers.SGD):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    with pytest.raises(TypeError, match=r"Any takes `\*args`, which have no names in a configuration"):
        Any(0.5, 0.9).get_config()
    assert Any.from_config(Any(learning_rate=0.5, momentum=0.9).get_config()) == Any(learning_rate=0.5, momentum=0.9)


def test_a_keyword_that_a_subclass_passes_on_is_checked():
    with pytest.raises(TypeError, match="The optimizer has no argument 'beta1'"):
        subclasses(optimizers)[0](0.5, beta1=0.5)


def test_an_optimizer_comes_back_equal_and_looks_the_same():
    made = optimizers.SGD(0.1, momentum=0.9)
    found = optimizers.deserialize(optimizers.serialize(made))
    assert found == made and repr(found) == "SGD(learning_rate=0.1, momentum=0.9, name='sgd')"


def test_nothing_gives_no_optimizer():
    assert optimizers.get(None) is None and keras.optimizers.get(None) is None


@pytest.mark.parametrize(("arguments", "message"), [
    ({"use_ema": True, "ema_momentum": 0.9}, r"compile\(\.\.\., ema_decay=0\.9\)"),
    ({"loss_scale_factor": 128.0}, r'precision="mixed_float16"'),
    ({"gradient_accumulation_steps": 1}, "`gradient_accumulation_steps` must be a whole number of at least 2"),
])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_what_the_trainer_has_elsewhere_is_refused_by_name(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(optimizers, name)(**arguments)
    defaults = {"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None, "loss_scale_factor": None,
                "gradient_accumulation_steps": None}
    assert getattr(optimizers, name)(**defaults).get_config() == getattr(optimizers, name)().get_config()


@pytest.mark.parametrize(("arguments", "words"), [
    ({"clipnorm": 1.0, "clipvalue": 1.0}, "Only one of `clipnorm`, `clipvalue` and `global_clipnorm`"),
    ({"gradient_accumulation_steps": 1}, "`gradient_accumulation_steps` must be"),
])
def test_errors_are_of_kerass_type_and_substance(arguments, words):
    for library in (optimizers, keras.optimizers):
        with pytest.raises(ValueError, match=words):
            library.Adam(**arguments)


def rows(number):
    draw = np.random.default_rng(0)
    return draw.normal(size=(number, 3)).astype("float32"), draw.normal(size=(number, 1)).astype("float32")


@pytest.mark.slow
def test_gradients_of_several_batches_make_one_update_in_fit(devices):
    from flax import linen as nn

    x, y = rows(24)

    def fitted(strategy, batch_size, **arguments):
        with strategy.scope():
            model = trainer.Model(nn.Dense(1), seed=0)
            model.compile(optimizers.Adam(0.1, **arguments), "mse")
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return model

    whole = fitted(trainer.distribute.OneDeviceStrategy(), 12)
    for strategy in (trainer.distribute.OneDeviceStrategy(), trainer.distribute.MirroredStrategy(devices[:4])):
        model = fitted(strategy, 4, gradient_accumulation_steps=3)
        assert model.optimizer.iterations == whole.optimizer.iterations == 4
        for one, other in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# LossScaleOptimizer


@pytest.mark.slow
def test_a_loss_scale_moves_as_kerass():
    theirs = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=2)
    variable = keras.Variable(np.ones(2, "float32"))
    theirs.build([variable])
    weights, kept = [variable.value], [each.value for each in theirs.variables]
    place = next(number for number, each in enumerate(theirs.variables) if each is theirs.dynamic_scale)
    ours = UpdateRule(optimizers.LossScaleOptimizer(optimizers.SGD(0.1), 64.0, 2), scales_gradients=True)
    params = {"w": jnp.ones(2)}
    state = ours.init(params)
    for grad in (1.0, 2.0, np.inf, 1.0, np.nan, 1.0, 1.0, 1.0):
        scale = np.asarray(kept[place])
        compare.check_equal("optimizers", np.asarray(state.loss_scale.scale), scale, "the scale")
        weights, kept = theirs.stateless_apply(kept, [jnp.full(2, grad * scale)], weights)
        params, state = ours.update({"w": jnp.full(2, grad)}, state, params)
        compare.check_equal("optimizers", np.asarray(params["w"]), np.asarray(weights[0]), "the weights")
    assert float(next_loss_scale(state.loss_scale, jnp.array(True), 1).scale) == 2 * float(state.loss_scale.scale)


def test_a_loss_scale_is_taken_with_the_precision_that_has_one():
    from flax import linen as nn

    x, y = rows(8)
    model = trainer.Model(nn.Dense(1), seed=0)
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=256.0, dynamic_growth_steps=2)
    model.compile(optimizer, "mse", precision="mixed_float16")
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    assert float(model.state.opt_state.loss_scale.scale) == 512.0
    assert model.optimizer.learning_rate == np.float32(0.1)
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    assert float(model.state.opt_state.loss_scale.scale) == 1024.0
    with pytest.raises(ValueError, match=r'`LossScaleOptimizer` sets how .* precision="mixed_float16"'):
        model.compile(optimizer, "mse")


def test_a_loss_scale_optimizer_has_a_configuration():
    ours = optimizers.LossScaleOptimizer(optimizers.SGD(0.5), initial_scale=4.0)
    plain = json.loads(json.dumps(optimizers.serialize(ours)))
    assert optimizers.deserialize(plain) == ours
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    assert optimizers.get(keras.optimizers.serialize(theirs)).get_config().keys() == theirs.get_config().keys()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("sgd",), TypeError, "`inner_optimizer` must be an optimizer"),
    ((optimizers.SGD(), 0.0), ValueError, "`initial_scale` must be a number above 0"),
    ((optimizers.SGD(), 1.0, 0), ValueError, "`dynamic_growth_steps` must be a whole number of at least 1"),
])
def test_a_loss_scale_optimizer_checks_its_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        optimizers.LossScaleOptimizer(*arguments)
