"""The user's own classes and functions in configurations: registered, in a scope, and handed over."""

import json
import threading

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import losses, metrics, optimizers, regularizers, utils
from trainer.core import configs

schedules = optimizers.schedules
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch):
    monkeypatch.setattr(configs, "_registered", {})


class Scaled(losses.Loss):
    def __init__(self, scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, y_true, y_pred):
        return self.scale * abs(y_true - y_pred).mean(-1)

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}


class Doubled(metrics.MeanSquaredError):
    pass


class Slow(optimizers.SGD):
    def __init__(self, learning_rate=1e-4, **kwargs):
        super().__init__(learning_rate, **kwargs)


class Flat(schedules.ExponentialDecay):
    pass


class Ridge(regularizers.L2):
    pass


def cubed(y_true, y_pred):
    return abs(y_true - y_pred).mean(-1) ** 3


OBJECTS = {
    "loss": (losses, lambda: Scaled(3.0), lambda loss: loss.scale),
    "metric": (metrics, lambda: Doubled(name="doubled"), lambda metric: metric.name),
    "optimizer": (optimizers, lambda: Slow(0.5, momentum=0.9), lambda optimizer: optimizer.get_config()["momentum"]),
    "schedule": (schedules, lambda: Flat(0.5, 10, 0.9), lambda schedule: schedule.decay_steps),
    "regularizer": (regularizers, lambda: Ridge(0.25), lambda penalty: penalty.l2),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_registered_class_comes_back_from_what_it_was_serialized_to(kind):
    module, make, argument_of = OBJECTS[kind]
    made = make()
    utils.register_keras_serializable("mine")(type(made))
    written = json.loads(json.dumps(module.serialize(made)))
    assert (written["module"], written["registered_name"]) == (None, f"mine>{type(made).__name__}")
    found = module.deserialize(written)
    assert type(found) is type(made) and argument_of(found) == argument_of(made)


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_class_that_is_not_registered_is_unknown_until_it_is_handed_over(kind):
    module, make, argument_of = OBJECTS[kind]
    made = make()
    written, cls = module.serialize(made), type(made)
    with pytest.raises(ValueError, match=f"Unknown {kind} '{cls.__name__}'"):
        module.deserialize(written)
    assert argument_of(module.deserialize(written, custom_objects={cls.__name__: cls})) == argument_of(made)
    with utils.custom_object_scope({cls.__name__: cls}):
        assert type(module.deserialize(written)) is cls


def test_what_is_registered_is_serialized_as_by_keras():
    def made(losses, register):
        @register("mine", name="scaled")
        class Scaled(losses.Loss):
            def __init__(self, scale=1.0, name="scaled_loss", reduction="sum"):
                super().__init__(name=name, reduction=reduction)
                self.scale = scale

            def call(self, y_true, y_pred):
                return self.scale * abs(y_true - y_pred)

            def get_config(self):
                return {**super().get_config(), "scale": self.scale}

        class Other(Scaled):
            pass

        # Keras writes the module too, and imports it; nothing is imported here.
        return [losses.serialize(value) | {"module": None}
                for value in (Scaled(2.0), Other(3.0), register("mine")(cubed))]

    assert made(losses, utils.register_keras_serializable) == made(keras.losses,
                                                                  keras.saving.register_keras_serializable)


def test_the_name_that_is_registered_counts_before_the_class_name():
    utils.register_keras_serializable("mine", name="MeanSquaredError")(Scaled)
    written = losses.serialize(Scaled(2.0)) | {"class_name": "MeanSquaredError"}
    assert losses.deserialize(written).scale == 2.0
    assert isinstance(losses.get("MeanSquaredError"), losses.MeanSquaredError)


def test_a_registered_function_may_be_a_metrics():
    utils.register_keras_serializable("mine")(cubed)
    written = json.loads(json.dumps(metrics.serialize(metrics.MeanMetricWrapper(cubed))))
    assert float(metrics.deserialize(written)([[0.0]], [[2.0]])) == 8.0
    assert losses.deserialize(losses.serialize(cubed)) is cubed


def test_an_optimizer_of_the_users_may_have_the_name_of_one_of_ours():
    class Adam(optimizers.Adam):
        pass

    written = optimizers.serialize(Adam(0.5))
    with pytest.raises(ValueError, match=r"Unknown optimizer 'Adam', of a class of yours.*=\{'Adam': Adam\}"):
        optimizers.deserialize(written)
    assert type(optimizers.deserialize(written, custom_objects={"Adam": Adam})) is Adam
    assert type(optimizers.get("Adam")) is optimizers.Adam


@pytest.mark.parametrize(("module", "name"), [(optimizers, "Adam"), (losses, "Huber"), (metrics, "AUC")])
def test_a_class_of_the_users_is_not_taken_for_one_of_ours(module, name):
    written = {"module": None, "class_name": name, "config": {}, "registered_name": f"mine>{name}"}
    with pytest.raises(ValueError, match=f"Unknown .* 'mine>{name}', of a class of yours.*register_keras_serializable"):
        module.deserialize(written)
    for package in ("keras.optimizers", "trainer.optimizers"):  # older files name ours there, too
        assert type(module.deserialize(written | {"module": package})) is getattr(module, name)


def test_objects_within_others_are_found_too():
    written = optimizers.serialize(Slow(Flat(0.5, 10, 0.9)))
    found = optimizers.deserialize(written, custom_objects={"Slow": Slow, "Flat": Flat})
    assert isinstance(found.schedule, Flat)
    metric = metrics.serialize(metrics.get(Scaled(2.0)))
    assert metrics.deserialize(metric).loss.scale == 2.0
    utils.register_keras_serializable("mine")(Scaled)
    metric = json.loads(json.dumps(metrics.serialize(metrics.get(Scaled(2.0)))))
    assert metrics.deserialize(metric).loss.scale == 2.0


@pytest.mark.parametrize(("module", "kind", "value"), [
    (losses, "a loss", Doubled), (regularizers, "a regularizer", Doubled), (optimizers, "an optimizer", Doubled),
    (metrics, "a metric", Slow), (schedules, "a schedule", Slow)])
def test_an_object_of_another_kind_is_refused(module, kind, value):
    utils.register_keras_serializable("mine")(value)
    expected = f"`config` must be the configuration of {kind}. Received: a value of type {value.__name__}"
    with pytest.raises(TypeError, match=expected):
        module.deserialize({"class_name": value.__name__, "config": {}, "registered_name": f"mine>{value.__name__}"})


@pytest.mark.parametrize("name", ["adam", "Adam", {"class_name": "Adam"}, {"class_name": "adam", "config": {}}])
def test_names_of_optimizers_are_deserialized_in_any_case(name):
    assert optimizers.deserialize(name) == optimizers.Adam()


@pytest.mark.parametrize("config", [3, None, []])
def test_what_is_no_configuration_of_an_optimizer_is_a_type_error(config):
    with pytest.raises(TypeError, match="`config` must be the configuration of an optimizer"):
        optimizers.deserialize(config)


@pytest.mark.slow
def test_compile_finds_names_of_a_scope_and_of_the_registry():
    utils.register_keras_serializable("mine")(Slow)
    model = trainer.Model(nn.Dense(1))
    with utils.custom_object_scope({"cubed": cubed}):
        model.compile("mine>Slow", loss="cubed", metrics=["cubed"])
        history = model.fit(np.ones((4, 2), "float32"), np.zeros((4, 1), "float32"), verbose=0)
    assert isinstance(model.optimizer.optimizer, Slow)
    assert history.history["cubed"] == pytest.approx(history.history["loss"])


def test_scopes_add_up_and_end():
    with utils.CustomObjectScope({"cubed": cubed}):
        with utils.custom_object_scope({"mean": Scaled}):
            assert losses.get("cubed") is cubed and losses.get("mean").scale == 1.0
        with pytest.raises(ValueError, match="Unknown loss 'mean'"):
            losses.get("mean")
        assert losses.get("cubed") is cubed
    again = utils.custom_object_scope({"cubed": cubed})
    with again, again, utils.custom_object_scope(None):
        assert losses.get("cubed") is cubed
    with pytest.raises(ValueError, match="Unknown loss 'cubed'"):
        losses.get("cubed")
    with pytest.raises(ValueError, match="Unknown metric 'cubed'"):
        metrics.get("cubed")


def test_a_scope_ends_with_an_error_and_is_of_its_thread_alone():
    found = []

    def look_elsewhere():
        other = threading.Thread(target=lambda: found.append(utils.get_registered_object("cubed")))
        other.start()
        other.join()
        raise KeyError

    with pytest.raises(KeyError), utils.custom_object_scope({"cubed": cubed}):
        look_elsewhere()
    assert found == [None] and utils.get_registered_object("cubed") is None


def test_registered_objects_are_found_by_name():
    utils.register_keras_serializable()(cubed)
    assert utils.get_registered_name(cubed) == "Custom>cubed" and utils.get_registered_name(max) == "max"
    assert utils.get_registered_object("Custom>cubed") is cubed
    assert utils.get_registered_object("max", module_objects={"max": max}) is max
    assert utils.get_registered_object("max", {"max": min}, {"max": max}) is min
    utils.get_custom_objects()["direct"] = cubed
    assert losses.get("direct") is cubed
    utils.get_custom_objects().clear()
    assert utils.get_registered_object("Custom>cubed") is None


def test_a_name_that_is_registered_twice_means_the_later_one():
    # A cell of a notebook that runs again defines the class again.
    utils.register_keras_serializable("mine", name="loss")(Scaled)
    utils.register_keras_serializable("mine", name="loss")(cubed)
    assert losses.deserialize("mine>loss") is cubed
    assert utils.get_registered_name(Scaled) == "Scaled"


def test_a_class_without_its_arguments_cannot_be_registered():
    class Plain:
        pass

    with pytest.raises(ValueError, match=r"needs `get_config` to be registered.*Received: Plain"):
        utils.register_keras_serializable("mine")(Plain)


@pytest.mark.parametrize("arguments", [(cubed,), ("mine", 3), (None,)])
def test_names_are_strings(arguments):
    with pytest.raises(TypeError, match=r"`package` must be a string, as in `@re|`name` must be a string or None"):
        utils.register_keras_serializable(*arguments)


@pytest.mark.parametrize("value", [3, Scaled.call.__get__, None])
def test_only_what_has_a_name_can_be_registered(value):
    if not hasattr(value, "__name__"):
        with pytest.raises(TypeError, match="`value` must be a class, or a function with a name"):
            utils.register_keras_serializable("mine")(value)
    else:
        assert utils.register_keras_serializable("mine")(value) is value


def test_a_scope_takes_a_dict():
    expected = "`custom_objects` must be a dict of classes and functions by name"
    with pytest.raises(TypeError, match=expected), utils.custom_object_scope([cubed]):
        pass
