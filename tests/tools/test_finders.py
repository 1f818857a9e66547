"""The finders of learning rates and batch sizes find what they should, and leave a model exactly as it was."""

import sys
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer import tools
from trainer.engine.model.core.model_core import core_of
from trainer.tools import finders

X, Y, _ = classification(64)


def compiled(module=None, **options):
    model = trainer.Model(module or LinenMLP(batch_norm=True, dropout=0.5))
    model.compile(**{"optimizer": "adam", "loss": logits_loss(), "metrics": ["accuracy"], **options})
    return model


def assert_same_state(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def search(model, **options):
    return tools.find_learning_rate(model, X, Y, **{"batch_size": 16, "steps": 20, **options})


# --- the learning rate -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_rates_grow_by_a_factor_and_the_losses_are_those_of_single_batches():
    model = compiled(LinenMLP())
    found = search(model, min_rate=1e-9, max_rate=1e-8, steps=6)
    np.testing.assert_allclose(found.learning_rates, np.geomspace(1e-9, 1e-8, 6))
    # At such rates the weights stay as they are. So the losses of the first four batches have the mean of all rows.
    assert found.losses[:4].mean() == pytest.approx(model.evaluate(X, Y, verbose=0)["loss"], rel=1e-5)
    assert len(set(found.losses[:4])) == 4 and not found.diverged
    averages, average = [], 0.0
    for step, loss in enumerate(found.losses, start=1):
        average = 0.9 * average + 0.1 * loss
        averages.append(average / (1 - 0.9 ** step))
    np.testing.assert_allclose(found.smoothed, averages)


def test_the_search_ends_where_the_loss_diverges_and_suggests_a_rate_below():
    found = search(compiled(LinenMLP(), optimizer="sgd"), max_rate=1e4, steps=80)
    assert found.diverged and len(found.losses) < 80
    assert found.learning_rates[0] < found.suggestion < found.learning_rates[int(found.smoothed.argmin())]


@pytest.mark.slow
def test_a_model_that_is_trained_at_the_suggestion_learns():
    model = compiled(LinenMLP())
    before = model.evaluate(X, Y, verbose=0) if model.built else None
    assert before is None
    model.optimizer.learning_rate = search(model, steps=60).suggestion
    losses = model.fit(X, Y, epochs=10, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {}, {"ema_decay": 0.9}, {"precision": "mixed_float16"}, {"optimizer": optax.adamw(1e-3)}, {"microbatches": 2},
    {"optimizer": trainer.optimizers.SGD(trainer.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9), momentum=0.9)},
], ids=lambda options: next(iter(options), "plain"))
def test_nothing_of_a_trained_model_is_changed(options):
    model = compiled(**options)
    history = model.fit(X, Y, epochs=1, batch_size=16, verbose=0)
    before, seed, rate = model.state, core_of(model).state.seed, float(model.optimizer.learning_rate)
    search(model)
    assert_same_state(model.state, before)
    assert (core_of(model).state.seed, float(model.optimizer.learning_rate)) == (seed, rate)
    assert model.history is history and model.stop_training is False


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_fit_after_a_search_is_the_fit_without_it(is_trained):
    """Also with dropout and shuffled rows, whose random streams are part of what is put back."""
    models = [compiled(), compiled()]
    if is_trained:
        for model in models:
            model.fit(X, Y, epochs=1, batch_size=16, verbose=0)
    search(models[1])
    histories = [model.fit(X, Y, epochs=2, batch_size=16, verbose=0).history for model in models]
    assert histories[0] == histories[1]
    assert_same_state(models[1].state, models[0].state)


@pytest.mark.slow
def test_an_nnx_object_of_the_users_has_its_weights_again():
    module = NNXMLP()
    model = compiled(module)
    model.fit(X, Y, epochs=1, batch_size=16, verbose=0)
    before = jax.tree.map(np.asarray, nnx.state(module, nnx.Param))
    search(model)
    for one, two in zip(jax.tree.leaves(before), jax.tree.leaves(nnx.state(module, nnx.Param)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_a_search_on_replicas_is_the_search_on_one_device():
    one = search(compiled(LinenMLP()))
    with mirrored(4).scope():
        model = compiled(LinenMLP())
    np.testing.assert_allclose(search(model).losses, one.losses, rtol=1e-4)


@pytest.mark.slow
def test_what_was_changed_is_put_back_after_an_error_too():
    model = compiled()
    model.fit(X, Y, epochs=1, batch_size=16, verbose=0)
    before = model.state

    def batches():
        yield X[:16], Y[:16]
        yield X[:16], Y[:16]
        raise OSError("The disk is gone.")

    with pytest.raises(RuntimeError, match="The disk is gone"):
        tools.find_learning_rate(model, batches(), steps=20)
    assert_same_state(model.state, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_datasets_are_read_on_and_a_generator_until_its_end():
    dataset = trainer.data.Dataset.from_arrays((X, Y)).batch(16)
    assert len(tools.find_learning_rate(compiled(), dataset, steps=9).losses) == 9
    generator = ((X[:16], Y[:16]) for _ in range(5))
    assert len(tools.find_learning_rate(compiled(), generator, steps=9).losses) == 5


def test_a_loss_that_never_falls_has_no_suggestion():
    rising = tools.LearningRateSearch(np.geomspace(1e-4, 1, 40), np.arange(40.0), np.arange(40.0), False)
    with pytest.raises(ValueError, match=r"did not fall at any learning rate from 0.0001 to 1. Search lower rates"):
        _ = rising.suggestion
    assert repr(rising) == "LearningRateSearch(no suggestion, as the loss never fell, 40 rates from 0.0001 to 1)"


def test_the_suggestion_is_where_the_loss_falls_fastest():
    rates = np.geomspace(1e-5, 1, 101)
    losses = 1 - 1 / (1 + np.exp(-3 * (np.log(rates) - np.log(1e-2))))
    assert tools.LearningRateSearch(rates, losses, losses, False).suggestion == pytest.approx(1e-2)
    assert repr(tools.LearningRateSearch(rates, losses, losses, True)) == (
        "LearningRateSearch(suggestion=0.01, 101 rates from 1e-05 to 1, where the loss grew)")


def test_the_noise_of_batches_is_not_taken_for_a_fall_of_the_loss():
    rates = np.geomspace(1e-7, 10, 100)
    fall = 1 - 1 / (1 + np.exp(-2 * (np.log(rates) - np.log(1e-2))))
    for seed in range(10):
        losses = 2 * fall + 0.15 * np.random.default_rng(seed).normal(size=100)
        found = tools.LearningRateSearch(rates, losses, fall, False)
        assert 1e-3 < found.suggestion < 1e-1


def test_the_plot_has_both_curves_and_the_suggestion():
    import matplotlib

    matplotlib.use("Agg")
    losses = np.linspace(2, 1, 40)
    found = tools.LearningRateSearch(np.geomspace(1e-4, 1, 40), losses, losses, False)
    axes = found.plot()
    assert axes.get_xscale() == "log" and len(axes.lines) == 3
    assert found.plot(axes) is axes and len(axes.lines) == 6
    matplotlib.pyplot.close(axes.figure)
    with mock.patch.dict(sys.modules, {"matplotlib": None}), pytest.raises(ImportError, match=r"trainer-jax\[plot\]"):
        found.plot()


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"min_rate": 1.0, "max_rate": 1.0}, ValueError, "`min_rate` must be less than `max_rate`"),
    ({"min_rate": 0.0}, ValueError, "`min_rate` must be a number above 0"),
    ({"max_rate": "1"}, TypeError, "`max_rate` must be a number"),
    ({"stop_factor": 0.5}, ValueError, "`stop_factor` must be a number above 1. Received: stop_factor=0.5"),
    ({"steps": 2}, ValueError, "`steps` must be a whole number of at least 3"),
    ({"smoothing": 1.0}, ValueError, r"`smoothing` must be a number in \[0, 1\)"),
])
def test_arguments_that_cannot_be_used_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        search(compiled(), **options)


def test_models_that_cannot_be_searched_are_refused():
    with pytest.raises(TypeError, match=r"`model` must be a `trainer.Model`"):
        search(nn.Dense(3))
    with pytest.raises(RuntimeError, match="before `find_learning_rate`"):
        search(trainer.Model(nn.Dense(3)))
    two = trainer.Model({"a": nn.Dense(3), "b": nn.Dense(3)})
    two.compile({"a": "adam", "b": "sgd"})
    with pytest.raises(ValueError, match=r"searches one rate, but the model has the optimizers 'a', 'b'"):
        search(two)
    infinite = compiled(LinenMLP())
    with pytest.raises(ValueError, match=r"The loss is not finite at the learning rate 1e-07"):
        tools.find_learning_rate(infinite, np.full_like(X, np.inf), Y, batch_size=16, steps=20)


# --- the batch size --------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Activations of 4 MiB a kilo-row."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(1024)(x)))


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found_by_compiling():
    model = compiled(Wide())
    found = tools.find_batch_size(model, X[:1], Y[:1], start=64, memory_bytes=8 * 2**20, refine=2)
    assert not model.built
    tried = {trial.batch_size: trial for trial in found.trials}
    assert found.memory_bytes == int(0.9 * 8 * 2**20)
    assert all(trial.fits == (trial.peak_bytes <= found.memory_bytes) for trial in found.trials)
    assert tried[found.batch_size].fits and any(not trial.fits for trial in found.trials)
    double = tools.find_batch_size(model, X[:1], Y[:1], start=64, memory_bytes=32 * 2**20, refine=0)
    assert double.batch_size > found.batch_size


@pytest.mark.slow
def test_the_peak_is_that_of_the_report(capsys):
    model = compiled(Wide())
    found = tools.find_batch_size(model, X[:1], Y[:1], start=64, limit=64)
    report = model.strategy.explain(model, batch=(np.zeros((64, 6), np.float32), np.zeros(64, Y.dtype)))
    assert found.trials == (finders.BatchSizeTrial(64, True, report.peak_bytes),)


def test_sizes_between_are_multiples_of_the_replicas(monkeypatch):
    monkeypatch.setattr(finders, "_compiled", lambda model, rows, size, budget: finders.BatchSizeTrial(
        size, size <= 100, size))
    with mirrored(4).scope():
        model = compiled(Wide())
    found = tools.find_batch_size(model, X, Y, start=16, refine=5)
    assert found.batch_size == 100
    assert [trial.batch_size for trial in found.trials] == [16, 32, 64, 128, 96, 112, 104, 100]
    assert repr(found) == "BatchSizeSearch(batch_size=100, 104 does not fit)"
    limited = tools.find_batch_size(model, X, Y, start=16, limit=80, refine=5)
    assert limited.batch_size == 80
    assert repr(limited) == "BatchSizeSearch(batch_size=80, the limit: larger sizes were not tried)"


@pytest.mark.slow
def test_steps_are_run_until_the_memory_runs_out_and_nothing_is_changed(monkeypatch):
    model = compiled()
    model.fit(X, Y, epochs=1, batch_size=16, verbose=0)
    before, history, fit = model.state, model.history, type(model).fit

    def fit_in_little_memory(self, batch_size, **options):
        done = fit(self, batch_size=batch_size, **options)
        assert len(options["x"]) == batch_size and done.params["steps"] == 1
        if batch_size > 100:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")
        return done

    monkeypatch.setattr(trainer.Model, "fit", fit_in_little_memory)
    found = tools.find_batch_size(model, X, Y, run=True, refine=1)
    assert found.batch_size == 96 and found.memory_bytes is None
    assert [(trial.batch_size, trial.fits) for trial in found.trials] == [
        (32, True), (64, True), (128, False), (96, True)]
    assert_same_state(model.state, before)
    assert model.history is history


def test_other_errors_of_a_step_are_raised(monkeypatch):
    def fails(*arguments, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(trainer.Model, "fit", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        tools.find_batch_size(compiled(), X, Y, run=True)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"memory_bytes": 1000}, ValueError, r"Not even a batch of 32 rows fits. A step of it holds .* and 900 B may be"),
    ({"limit": 8}, ValueError, "`limit` must be at least `start`. Received: start=32, limit=8"),
    ({"run": True, "memory_bytes": 10}, ValueError, "Pass one of them"),
    ({"memory_fraction": 0}, ValueError, "`memory_fraction` must be a number above 0 and at most 1"),
    ({"start": 0}, ValueError, "`start` must be a whole number of at least 1"),
    ({"x": X[:0]}, ValueError, "must have rows"),
    ({"x": iter([X])}, TypeError, "`x` must be one batch"),
])
def test_arguments_of_the_other_search_that_cannot_be_used_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        tools.find_batch_size(compiled(), **{"x": X, "y": Y, **options})


def test_devices_that_do_not_say_how_much_memory_they_have_need_a_number(monkeypatch):
    monkeypatch.setattr(finders, "memory_of", lambda device: 0)
    with pytest.raises(ValueError, match=r"do not say how much memory they have. Pass `memory_bytes`"):
        tools.find_batch_size(compiled(), X, Y)
