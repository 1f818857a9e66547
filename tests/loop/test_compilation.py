"""What compiles, and when: call two never does, and nothing waits for or copies what it need not."""

from __future__ import annotations

import contextlib
import gc
import re

import jax
import numpy as np
import optax
import pytest

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer.engine.model.core import state_holder
from trainer.engine.model.core.model_core import core_of
from trainer.engine.step.compiled_phase import CompiledPhase


@contextlib.contextmanager
def count_compilations():
    """Gives a list that grows by an entry per program that XLA compiles, or takes from a cache on disk."""
    compiled = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def make_model(module=None, replicas=2, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(module or LinenMLP(batch_norm=True, dropout=0.1), seed=1)
        model.compile(optax.sgd(optax.constant_schedule(0.1)), logits_loss(), metrics=["accuracy"], **options)
    return model


PHASES = {
    "fit": lambda model, x, y: model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y)),
    "evaluate": lambda model, x, y: model.evaluate(x, y, batch_size=8, verbose=0),
    "predict": lambda model, x, y: model.predict(x, batch_size=8, verbose=0),
    "predict_iter": lambda model, x, y: list(model.predict_iter(x, batch_size=8)),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
@pytest.mark.parametrize("phase", PHASES)
def test_call_two_does_not_compile(phase, module):
    x, y, _ = classification(21)
    model = make_model(module(batch_norm=True, dropout=0.1))
    with count_compilations() as first:
        PHASES[phase](model, x, y)
    assert first, "the counter must see the first call's compilations"
    with count_compilations() as second:
        PHASES[phase](model, x, y)
    assert not second


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_fit_on_other_rows_compiles_only_a_last_batch_of_other_rows(epochs):
    x, y, _ = classification(40)
    model = make_model()
    model.fit(x[:22], y[:22], batch_size=4, epochs=epochs, verbose=0)
    for rows, most in ((38, 0), (24, 0), (11, 1), (39, 0)):
        with count_compilations() as compiled:
            model.fit(x[:rows], y[:rows], batch_size=4, epochs=epochs, verbose=0)
        assert len(compiled) <= most, rows


@pytest.mark.slow
def test_setting_the_learning_rate_or_weights_compiles_no_step():
    x, y, _ = classification(16)
    model = make_model()
    model.fit(x, y, verbose=0)
    model.set_weights(model.get_weights())
    model.optimizer.learning_rate = 0.05
    model.fit(x, y, verbose=0)
    with count_compilations() as compiled:
        model.set_weights(model.get_weights())
        model.optimizer.learning_rate = 0.01
        model.fit(x, y, verbose=0)
    assert not compiled


@pytest.mark.slow
def test_groups_of_any_length_share_one_executable():
    x, y, _ = classification(56)
    model = make_model(steps_per_execution=3)
    model.fit(x[:24], y[:24], batch_size=8, verbose=0)
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, verbose=0)
    assert not compiled


def steps_fused_for(module, shape):
    with mirrored(1).scope():
        model = trainer.Model(module)
        model.compile("sgd", logits_loss())
    phase = core_of(model).prepared_phase("train", (np.zeros(shape, np.float32), np.zeros(shape[0], np.int32)))
    return phase.steps_per_execution


# 2e7, 4e8, 3e9 and 6e9 operations.
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "steps"), [(2, 128), (32, 4), (256, 4), (512, 1)])
def test_many_small_steps_are_fused_by_default_few_larger_ones_and_no_large_ones(rows, steps):
    module = trainer.models.MLP(num_classes=1000, hidden=(1024,), classifier_activation=None)
    assert steps_fused_for(module, (rows, 1024)) == steps


@pytest.mark.slow
def test_convolutions_of_fused_steps_have_the_layout_that_is_fast_on_cpus():
    with mirrored(2).scope():
        model = trainer.Model(trainer.models.CNN(10, features=(4, 4), hidden=8, classifier_activation=None))
        model.compile("sgd", logits_loss())
    model.fit(np.ones((16, 8, 8, 1), np.float32), np.zeros(16, np.int32), batch_size=8, verbose=0)
    program = model.current_run.train_step_text()
    assert "while" in program
    assert set(re.findall(r"dim_labels=(\S+?),? ", program)) == {"b01f_01io->b01f"}


@pytest.mark.slow
def test_no_log_is_fetched_unless_somebody_reads_it(monkeypatch):
    fetched = []
    real = CompiledPhase.begin_results
    monkeypatch.setattr(CompiledPhase, "begin_results",
                        lambda phase, running: fetched.append(1) or real(phase, running))
    x, y, _ = classification(64)
    ignores_logs = trainer.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    make_model().fit(x, y, batch_size=8, epochs=3, callbacks=[ignores_logs], verbose=0)
    assert len(fetched) == 3, "one fetch per epoch, by History"


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2], ids=["streaming", "data_on_the_device"])
def test_the_loop_makes_no_implicit_transfer(epochs):
    x, y, _ = classification(40)
    model = make_model()
    model.fit(x, y, batch_size=8, epochs=epochs, validation_data=(x, y), verbose=0)
    model.predict(x, verbose=0)
    with jax.transfer_guard("disallow"):
        model.fit(x, y, batch_size=8, epochs=epochs, validation_data=(x, y), verbose=0)
        model.predict(x, verbose=0)


@pytest.mark.slow
def test_a_first_fit_that_sets_the_learning_rate_makes_no_implicit_transfer():
    x, y, _ = classification(40)
    callbacks = [trainer.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
                 trainer.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=100),
                 trainer.callbacks.SkipNonFinite()]
    with jax.transfer_guard("disallow"):
        model = make_model(weighted_metrics=["accuracy"])
        model.fit(x, y, batch_size=8, epochs=3, validation_data=(x, y), callbacks=callbacks, verbose=0)
        model.predict(x, verbose=0)
    assert float(model.optimizer.learning_rate) < 0.1 / 2**3


@pytest.mark.slow
def test_setting_weights_and_leaving_updates_out_make_no_implicit_transfer(tmp_path):
    x, y, _ = classification(40)
    path = tmp_path / "weights.safetensors"
    model = make_model(ema_decay=0.9)
    stopping = trainer.callbacks.EarlyStopping("loss", min_delta=100, patience=1, restore_best_weights=True)
    saving = trainer.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    callbacks = [stopping, saving, trainer.callbacks.TerminateOnNaN()]
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    with jax.transfer_guard("disallow"):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        model.set_weights(model.get_weights())
        model.load_weights(path)
        model.skip_non_finite = True
    assert stopping.stopped_epoch == 1


@pytest.mark.slow
def test_predict_has_the_memory_of_few_groups_on_the_devices_however_many_there_are():
    def live_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    groups, rows = 80, 16 * 16
    model = make_model(replicas=2, steps_per_execution=16)
    model.build(np.zeros((1, 6), np.float32))
    gc.collect()
    before = peak = live_bytes()
    for _ in model.predict_iter(np.ones((groups * rows, 6), np.float32), batch_size=16):
        peak = max(peak, live_bytes())
    of_a_group = 4 * rows * (6 + 3)  # float32 rows and predictions
    assert peak - before <= groups / 8 * of_a_group


@pytest.mark.slow
def test_a_callback_that_wants_every_batch_compiles_nothing_more():
    class EveryBatch(trainer.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    x, y, _ = classification(64)
    model = make_model()
    model.fit(x, y, batch_size=8, verbose=0)
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, callbacks=[EveryBatch()], verbose=0)
    assert not compiled


@pytest.mark.slow
def test_an_eager_step_is_never_traced():
    class ReadsValues(trainer.Model):
        def train_step(self, state, batch):
            logs, state = super().train_step(state, batch)
            seen.append(float(logs["loss"]))
            return logs, state

    seen = []
    x, y, _ = classification(16)
    model = ReadsValues(LinenMLP())
    model.compile("sgd", logits_loss(), run_eagerly=True)
    history = model.fit(x, y, batch_size=8, verbose=0).history
    np.testing.assert_allclose(np.mean(seen[-2:]), history["loss"][0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["fit", "evaluate", "predict"])
def test_the_first_step_compiles_while_the_weights_are_made(monkeypatch, phase):
    model, events = make_model(), []
    init_placed, executable = state_holder.init_placed, CompiledPhase.executable

    def watched_init(*args):
        shapes, wait = init_placed(*args)
        return shapes, lambda: (events.append("waits for the weights"), wait())[1]

    def watched_executable(self, *args, **kwargs):
        result = executable(self, *args, **kwargs)
        events.append("has compiled")
        return result

    monkeypatch.setattr(state_holder, "init_placed", watched_init)
    monkeypatch.setattr(CompiledPhase, "executable", watched_executable)
    PHASES[phase](model, *classification(16)[:2])
    assert events[:2] == ["has compiled", "waits for the weights"]


@pytest.mark.slow
def test_weights_that_cannot_be_made_leave_a_model_without_weights(monkeypatch):
    model, init_placed = make_model(), state_holder.init_placed

    def failing_init(*args):
        def wait():
            raise MemoryError("too large")

        return init_placed(*args)[0], wait

    data = classification(16)[:2]
    monkeypatch.setattr(state_holder, "init_placed", failing_init)
    with pytest.raises(MemoryError):
        PHASES["fit"](model, *data)
    monkeypatch.undo()
    assert not model.built
    other = make_model()
    for each in (model, other):
        PHASES["fit"](each, *data)
    jax.tree.map(np.testing.assert_array_equal, model.state.params, other.state.params)
