"""What `compile` says about a step: precision, averages, frozen parameters, several optimizers, rematerialisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer.core.tree_paths import named_leaves
from trainer.engine.model.core.model_core import core_of


class Wide(nn.Module):
    """Two named parts, to freeze and to train apart."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.tanh(nn.Dense(8, name="encoder")(x)))


def model_of(module=Wide, replicas=1, optimizer=None, loss=None, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(module(), seed=3)
        model.compile(optimizer or optax.sgd(0.2, momentum=0.9), loss or logits_loss(), metrics=["accuracy"], **options)
    return model


def fitted(model, rows=22, epochs=2, batch_size=8):
    x, y, w = classification(rows)
    history = model.fit(x, y, sample_weight=w, batch_size=batch_size, epochs=epochs, verbose=0).history
    return history


def params_of(model):
    return {path: np.asarray(leaf) for path, leaf in named_leaves(model.state.params).items()}


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
@pytest.mark.parametrize(("precision", "tolerance"), [("mixed_bfloat16", 0.03), ("mixed_float16", 0.01)])
def test_mixed_precision_is_near_float32_with_float32_weights(module, precision, tolerance):
    plain, mixed = model_of(module), model_of(module, precision=precision, replicas=2)
    ours, theirs = fitted(mixed), fitted(plain)
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=tolerance)
    assert ours["loss"] != theirs["loss"]
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed.state.params)} == {jnp.dtype("float32")}
    assert mixed.predict(classification(4)[0], verbose=0).dtype == np.float32
    assert ("skipped_steps" in ours) == (precision == "mixed_float16")


def products_of(model):
    batch = classification(8)[:2]
    texts = [core_of(model).prepared_phase(kind, batch).lowered_text() for kind in ("train", "test", "predict")]
    return [line for text in texts for line in text.splitlines() if "dot_general" in line]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"precision": "float32"}, {"microbatches": 2}, {"remat": True}])
def test_products_of_steps_and_of_their_gradients_have_the_precision_asked_for(options):
    for name, expected in (("highest", "HIGHEST"), ("high", "HIGH")):
        products = products_of(model_of(matmul_precision=name, **options))
        assert len(products) > 6
        assert all(f"precision = [{expected}, {expected}]" in product for product in products)
    assert not any("HIGH" in product for product in products_of(model_of(**options)))


def test_a_loss_of_a_models_own_has_the_precision_asked_for():
    class Multiplies(trainer.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return jnp.mean(jnp.einsum("ij,ij->i", y_pred, y_pred))

    model = Multiplies(Wide(), seed=3)
    model.compile("sgd", matmul_precision="highest")
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products_of(model))


@pytest.mark.slow
def test_a_call_outside_of_steps_has_the_precision_asked_for():
    model = model_of(matmul_precision="highest")
    x = classification(8)[0]
    model.build(x)
    state = model.state
    text = str(jax.make_jaxpr(lambda params: model.apply(params, state, x)[0])(state.params))
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == text.count("dot_general") == 2
    np.testing.assert_array_equal(model(x), model_of()(x))  # CPUs multiply float32 in any case


def test_an_unknown_precision_of_products_is_refused():
    with pytest.raises(ValueError, match=r"Unknown matmul_precision 'higest'. Did you mean 'highest'"):
        model_of(matmul_precision="higest")


@pytest.mark.slow
def test_bfloat16_stores_weights_in_bfloat16():
    model = model_of(precision="bfloat16")
    history = fitted(model, epochs=4)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.state.params)} == {jnp.dtype("bfloat16")}
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.slow
def test_compiling_a_built_model_casts_its_weights():
    model = model_of()
    model.build(classification(4)[0])
    before = params_of(model)
    model.compile("sgd", logits_loss(), precision="bfloat16")
    for path, leaf in params_of(model).items():
        np.testing.assert_array_equal(leaf, before[path].astype(jnp.bfloat16))


@pytest.mark.slow
def test_steps_that_overflow_are_skipped_and_counted_and_lower_the_scale():
    def exploding(y_true, y_pred):
        # The second batch of each epoch has labels of 1: a cotangent of 1e30 overflows float16 at any scale.
        return jnp.where(y_true[:, 0] > 0, 1e30, 1.0) * y_pred[:, 0]

    x = np.ones((16, 6), np.float32)
    y = np.repeat([[0.0], [1.0]], 8, axis=0).astype(np.float32)
    model = model_of(loss=exploding, optimizer=optax.sgd(0.01), precision="mixed_float16", replicas=2)
    model.build(x)
    before, scale = params_of(model), float(model.state.loss_scale)
    history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    assert history["skipped_steps"] == [1.0, 1.0, 1.0]
    assert float(model.state.loss_scale) == scale / 8
    after = params_of(model)
    assert all(np.isfinite(leaf).all() for leaf in after.values())
    assert not np.array_equal(after["head/kernel"], before["head/kernel"]), "finite steps train"
    assert model.optimizer.iterations == 3
    assert int(model.state.step) == 6


@pytest.mark.slow
def test_a_gradient_that_float16_cannot_hold_trains():
    def tiny(y_true, y_pred):
        return 1e-7 * (y_pred ** 2).mean(-1)

    x, _, _ = classification(8)

    def change(precision):
        model = model_of(loss=tiny, optimizer=optax.sgd(1e6), precision=precision)
        model.build(x)
        before = params_of(model)["encoder/kernel"]
        model.fit(x, x[:, :3], batch_size=8, verbose=0)
        return params_of(model)["encoder/kernel"] - before

    np.testing.assert_allclose(change("mixed_float16"), change(None), rtol=0.05, atol=2e-4)


@pytest.mark.slow
def test_a_custom_step_is_scaled_too():
    class Custom(trainer.Model):
        def train_step(self, state, batch):
            x, _, _ = trainer.unpack_x_y_sample_weight(batch)

            def loss(params):
                return 1e-7 * (self.apply(params, state, x, training=True)[0] ** 2).mean()

            value, grads = jax.value_and_grad(loss)(state.params)
            return {"loss": value, "size": optax.tree.norm(grads)}, state.apply_gradients(grads)

    def size(precision):
        model = Custom(Wide(), seed=3)
        model.compile(optax.sgd(1.0), precision=precision)
        x, y, _ = classification(8)
        return model.fit(x, y, batch_size=8, verbose=0).history["size"][0]

    np.testing.assert_allclose(size("mixed_float16"), size(None), rtol=0.05)


# --- moving averages -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluate_and_predict_use_the_moving_average(replicas):
    x, y, _ = classification(16)
    model = model_of(ema_decay=0.8, replicas=replicas)
    weights = []

    class Record(trainer.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(params_of(self.model))

    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, callbacks=[Record()], verbose=0)
    average = weights[0]  # as in Keras, the first update sets it
    for step in weights[1:]:
        average = {path: 0.8 * average[path] + 0.2 * step[path] for path in step}
    for path, leaf in named_leaves(model.state.opt_state.average).items():
        np.testing.assert_allclose(leaf, average[path], rtol=1e-5, atol=1e-7)

    other = model_of()
    other.build(x)
    other.set_weights(list(jax.tree.leaves(model.state.averaged().params)))
    np.testing.assert_allclose(model.predict(x, verbose=0), other.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(other.evaluate(x, y, verbose=0), rel=1e-5)
    assert not np.allclose(model.predict(x, verbose=0), model(x), rtol=1e-4)


@pytest.mark.parametrize(("decay", "error"), [(1.0, ValueError), (-0.1, ValueError), ("0.9", TypeError),
                                              (True, TypeError)])
def test_a_decay_is_at_least_zero_and_below_one(decay, error):
    with pytest.raises(error, match="ema_decay"):
        trainer.Model(Wide()).compile("sgd", "mse", ema_decay=decay)


# --- frozen parameters -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_frozen_parameters_stay_and_have_no_optimizer_state(replicas):
    model = model_of(optimizer="adam", freeze=["encoder"], replicas=replicas)
    x, _, _ = classification(8)
    model.build(x)
    before = params_of(model)
    fitted(model)
    for path, leaf in params_of(model).items():
        assert np.array_equal(leaf, before[path]) == path.startswith("encoder"), path
    assert not any("encoder" in path for path in named_leaves(model.state.opt_state))


@pytest.mark.slow
def test_frozen_parameters_do_not_count_in_a_norm_over_all_gradients():
    """The same as training the head alone, on what the encoder gives."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.2))
    model = model_of(optimizer=optimizer, freeze="encoder")
    x, y, _ = classification(8)
    model.build(x)
    start = params_of(model)
    features = np.tanh(x @ start["encoder/kernel"] + start["encoder/bias"])
    head = trainer.Model(nn.Dense(3), seed=0)
    head.compile(optimizer, logits_loss())
    head.build(features)
    head.set_weights([start["head/bias"], start["head/kernel"]])
    for one, inputs in ((model, x), (head, features)):
        one.fit(inputs, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(params_of(model)["head/kernel"], params_of(head)["kernel"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_summary_counts_frozen_parameters_as_not_trained():
    model = model_of(freeze=["head/kernel"])
    model.build(classification(4)[0])
    lines = []
    model.summary(lines.append)
    assert "Trainable params: 59" in lines  # 6 * 8 + 8, and the head's bias of 3
    assert "Non-trainable params: 24" in lines
    layers = {line.split()[0]: line.split()[4:6] for line in lines if line.startswith(("encoder", "head"))}
    assert layers == {"encoder": ["56", "56"], "head": ["27", "3"]}


def test_the_summary_of_a_model_that_is_not_trainable_has_no_trained_layer():
    model = model_of()
    model.build(classification(4)[0])
    model.trainable = False
    lines = []
    model.summary(lines.append)
    assert "Trainable params: 0" in lines
    assert [line.split()[5] for line in lines if line.startswith(("encoder", "head"))] == ["0", "0"]


def test_a_pattern_that_matches_nothing_names_near_ones_and_changes_nothing():
    model = model_of(freeze="encodr")
    with pytest.raises(ValueError, match=r"'encodr'.*'encoder'"):
        model.build(classification(4)[0])
    built = model_of()
    built.build(classification(4)[0])
    optimizer = built.optimizer.optimizer
    with pytest.raises(ValueError, match=r"'encodr'.*'encoder'"):
        built.compile("adam", logits_loss(), freeze="encodr")
    assert built.optimizer.optimizer is optimizer


def test_freezing_every_parameter_is_a_warning():
    model = model_of(freeze=["(?!head).*"])  # also matches "kernel", below "head"
    with pytest.warns(UserWarning, match=r"matches every parameter.*`freeze=\['\^\(\?!head/\)\.\*'\]`") as found:
        fitted(model, epochs=1)
    assert found[0].filename == __file__


@pytest.mark.slow
def test_a_pattern_from_the_start_of_the_path_freezes_all_but_a_layer():
    model = model_of(freeze=["^(?!head/).*"])
    model.build(classification(4)[0])
    assert [weight.path.split("/")[0] for weight in model.trainable_weights] == ["head", "head"]


def test_a_glob_is_refused_with_the_regular_expression_for_it():
    with pytest.raises(ValueError, match=r"'\*norm', which is not a valid regular expression.*'\.\*' for any"):
        model_of(freeze=["*norm"])


@pytest.mark.parametrize("freeze", [3, [3], {"encoder": True}])
def test_patterns_are_strings(freeze):
    with pytest.raises(TypeError, match="freeze"):
        trainer.Model(Wide()).compile("sgd", "mse", freeze=freeze)


# --- several optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_of_one_model_have_optimizers_of_their_own():
    model = model_of(optimizer={"encoder": trainer.optimizers.SGD(0.0), "head": "adam"}, replicas=2)
    model.build(classification(8)[0])
    before = params_of(model)
    history = fitted(model, epochs=4)
    after = params_of(model)
    assert np.array_equal(after["encoder/kernel"], before["encoder/kernel"])
    assert not np.array_equal(after["head/kernel"], before["head/kernel"])
    assert history["loss"][-1] < history["loss"][0]
    model.optimizer["encoder"].learning_rate = 0.5
    fitted(model)
    assert not np.array_equal(params_of(model)["encoder/kernel"], before["encoder/kernel"])


@pytest.mark.slow
def test_equal_optimizers_by_name_give_the_numbers_of_one():
    one = model_of(optimizer=optax.sgd(0.1, momentum=0.9))
    several = model_of(optimizer={"encoder": optax.sgd(0.1, momentum=0.9), "head": optax.sgd(0.1, momentum=0.9)},
                       microbatches=2, replicas=2)
    np.testing.assert_allclose(fitted(one)["loss"], fitted(several)["loss"], rtol=1e-5)
    for path, leaf in params_of(one).items():
        np.testing.assert_allclose(leaf, params_of(several)[path], rtol=1e-4, atol=1e-5)


def test_names_that_are_not_the_models_are_refused_before_anything_compiles():
    model = model_of(optimizer={"encoder": "sgd", "haed": "sgd"})
    with pytest.raises(ValueError, match=r"top-level submodule.*haed.*head"):
        model.build(classification(4)[0])
    assert not model.built


# --- rematerialisation -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
def test_rematerialisation_gives_the_same_numbers(module):
    def fit(**options):
        model = model_of(lambda: module(batch_norm=True, dropout=0.2), **options)
        return fitted(model), model.get_weights()

    for ours, theirs in zip(jax.tree.leaves(fit(remat=True)), jax.tree.leaves(fit()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rematerialisation_is_in_the_compiled_step():
    batch = classification(8)[:2]
    barriers = []
    for remat in (False, True):
        model = model_of(remat=remat)
        lowered = core_of(model).prepared_phase("train", batch).lowered(batch)
        barriers.append(lowered.as_text().count("optimization_barrier"))
    assert barriers[0] == 1, "the one around the batch"
    assert barriers[1] > 1


@pytest.mark.parametrize(("remat", "error"), [(1, TypeError), ("blocks", ValueError), (None, TypeError)])
def test_remat_is_a_boolean_or_a_policy(remat, error):
    with pytest.raises(error, match="remat"):
        trainer.Model(Wide()).compile("sgd", "mse", remat=remat)


@pytest.mark.slow
def test_all_options_work_together():
    options = {"precision": "mixed_bfloat16", "remat": True, "ema_decay": 0.9, "freeze": "encoder/bias",
               "microbatches": 2, "optimizer": {"encoder": "adam", "head": "sgd"}}
    one, two = model_of(**options), model_of(replicas=2, **options)
    np.testing.assert_allclose(fitted(one)["loss"], fitted(two)["loss"], rtol=0.02)
    assert two.evaluate(*classification(9)[:2], verbose=0)["loss"] > 0
