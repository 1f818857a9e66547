"""What becomes of a training whose loss or gradients are not finite: it ends, or leaves these updates out."""

from __future__ import annotations

import contextlib
import datetime
import re
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.networks import classification, compiled_mlp, logits_loss, mirrored
from tests.support.strategy_cases import STRATEGIES
from trainer.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    LambdaCallback,
    LazyLogs,
    ModelCheckpoint,
    TerminateOnNaN,
)
from trainer.callbacks.skip_non_finite import SkipNonFinite
from trainer.engine.saving.checkpoint import CheckpointFolder, open_checkpoint

ROWS, BATCH = 64, 8  # eight batches


def data_with(value, *batches):
    """Returns rows and labels; the first row of these batches has the value in it."""
    x, y, _ = classification(ROWS)
    for batch in batches:
        x[batch * BATCH] = value
    return x, y


def fit(model, x, y, *callbacks, **options):
    return model.fit(x, y, batch_size=BATCH, shuffle=False, callbacks=list(callbacks), verbose=0, **options)


class Recorder(Callback):
    """Notes where train executions ended, and which epochs did."""

    def __init__(self):
        self.ends, self.epochs = [], []

    def on_execution_end(self, phase, batch, logs=None):
        self.ends.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def fake_model(params=None, model_state=None):
    """Returns a model with these weights, each the only leaf below its name."""
    params, model_state = params or {}, model_state or {}
    return types.SimpleNamespace(
        stop_training=False,
        current_run=types.SimpleNamespace(state=types.SimpleNamespace(params=params, model_state=model_state)),
        get_weights=lambda: [np.asarray(leaf) for _, leaf in [*sorted(params.items()), *sorted(model_state.items())]])


@pytest.fixture(scope="module")
def compiled_once():
    model = compiled_mlp(steps_per_execution=8)
    model.build(classification(ROWS)[0])
    return model, model.state


@pytest.fixture
def mlp_of_one(compiled_once):
    """A model whose epochs are one execution unless a callback looks; its weights are those of the beginning."""
    model, model.state = compiled_once
    return model


# --- TerminateOnNaN ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("fused", "bad", "ends", "named"), [
    # It looks at an execution once the next one has begun.
    (1, 2, [0, 1, 2, 3], "Batch 2: Invalid loss, terminating training. Weights"),
    (4, 2, [3, 7], "Batch 3: Invalid loss, terminating training. It is one of the batches 0 to 3, which ran as one"),
    (3, 7, [2, 5, 7], "Batch 7: Invalid loss, terminating training. It is one of the batches 6 to 7, which ran as one"),
])
def test_a_fit_ends_at_most_one_execution_late_and_says_where_the_loss_was_lost(fused, bad, ends, named, capsys):
    recorder = Recorder()
    model = compiled_mlp(steps_per_execution=fused)
    fit(model, *data_with(np.nan, bad), TerminateOnNaN(), recorder, epochs=3)
    assert recorder.ends == ends and recorder.epochs == [0]
    printed = capsys.readouterr().out
    assert named in printed and printed.count("Invalid loss") == 1
    assert "Weights that are not finite: Dense_0/bias, Dense_0/kernel, Dense_1/bias, Dense_1/kernel, of 4." in printed


@pytest.mark.slow
def test_an_infinite_loss_ends_the_training_too():
    model = compiled_mlp(steps_per_execution=2)
    x, y = data_with(np.inf, 1)
    with pytest.raises(RuntimeError, match=r"NaN or Inf loss encountered at batch 1\. Loss value: (nan|inf)\. "
                                           r"Terminating training immediately\. It is one of the batches 0 to 1"):
        fit(model, x, y, TerminateOnNaN(raise_error=True))
    assert int(model.state.step) == 4


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("raises", [True, False])
def test_the_last_execution_of_an_epoch_is_looked_at_before_the_callbacks_behind_it_see_the_epoch(raises):
    recorder, stops = Recorder(), []
    watcher = LambdaCallback(on_epoch_end=lambda epoch, logs: stops.append(model.stop_training))
    model = compiled_mlp(steps_per_execution=4)
    callbacks = [TerminateOnNaN(raise_error=raises), watcher, recorder]
    if raises:
        with pytest.raises(RuntimeError, match="at batch 7"):
            fit(model, *data_with(np.nan, 7), *callbacks, epochs=2)
    else:
        fit(model, *data_with(np.nan, 7), *callbacks, epochs=2)
    assert (stops, recorder.epochs) == (([], []) if raises else ([True], [0]))


@pytest.mark.slow
def test_a_training_with_finite_losses_runs_as_without_it():
    plain, watched = Recorder(), Recorder()
    histories = [fit(compiled_mlp(steps_per_execution=4), *data_with(0.0), *callbacks, epochs=2).history
                 for callbacks in ([plain], [TerminateOnNaN(), watched])]
    assert histories[0] == histories[1]
    assert plain.ends == watched.ends == [3, 7, 3, 7]


@pytest.mark.slow
def test_a_fit_after_one_that_was_ended_starts_afresh(capsys):
    model, callback = compiled_mlp(steps_per_execution=1), TerminateOnNaN()
    x, y = data_with(np.nan, 0)
    for _ in range(2):
        fit(model, x, y, callback)
        assert capsys.readouterr().out.count("Batch 0: Invalid loss") == 1


def test_it_reads_no_execution_before_the_next_one_has_begun():
    happened = []

    def logs_of(number):
        return LazyLogs(["loss"], lambda: happened.append(f"read {number}") or {"loss": 0.5},
                        lambda: happened.append(f"begin {number}"))

    callback = TerminateOnNaN()
    callback.set_model(fake_model())
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    for number in range(3):
        happened.append(f"run {number}")
        callback.on_execution_end("train", number, logs_of(number))
    callback.on_execution_end("test", 0, logs_of("a validation"))
    callback.flush()
    assert happened == ["run 0", "begin 0", "run 1", "begin 1", "read 0", "run 2", "begin 2", "read 1", "read 2"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("save_freq", "saved"), [(2, ["2", "4"]), (3, ["3"]), ("epoch", [])])
def test_no_weights_are_saved_from_the_bad_batch_on(tmp_path, mlp_of_one, save_freq, saved, is_first, raises):
    name = "all" if save_freq == "epoch" else "{batch}"
    callbacks = [TerminateOnNaN(raise_error=raises), ModelCheckpoint(
        tmp_path / name, save_weights_only=True, save_freq=save_freq)]
    with pytest.raises(RuntimeError, match="Loss value: nan") if raises else contextlib.nullcontext():
        fit(mlp_of_one, *data_with(np.nan, 5), *callbacks[::-1 if is_first else 1], epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == saved


@pytest.mark.slow
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(("save_freq", "bad", "steps"), [(4, 5, 4), (8, 7, None), ("epoch", 5, None),
                                                         (datetime.timedelta(microseconds=1), 2, None)], ids=str)
def test_no_run_is_saved_from_the_bad_batch_on(tmp_path, mlp_of_one, save_freq, bad, steps, raises):
    callbacks = [BackupAndRestore(tmp_path, save_freq, delete_checkpoint=False), TerminateOnNaN(raise_error=raises)]
    for _ in range(2):  # also not by the one that resumes
        with pytest.raises(RuntimeError, match="Loss value: nan") if raises else contextlib.nullcontext():
            fit(mlp_of_one, *data_with(np.nan, bad), *callbacks, epochs=2)
        newest = CheckpointFolder(tmp_path).newest_whole()
        assert steps == (newest and open_checkpoint(newest).document["batches"])


def test_a_run_that_is_told_to_end_after_a_bad_batch_keeps_what_it_saved_before(tmp_path, mlp_of_one, caplog):
    def tell(batch, logs):
        if batch == 5:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(mlp_of_one, *data_with(np.nan, 5), BackupAndRestore(tmp_path, 2), TerminateOnNaN(),
            LambdaCallback(on_train_batch_end=tell))
    assert open_checkpoint(CheckpointFolder(tmp_path).newest_whole()).document["batches"] == 4
    assert "SIGTERM: the weights are not finite, and only what was before is saved" in caplog.text


def test_only_a_save_makes_it_read_the_logs_of_the_last_execution(tmp_path):
    happened, model = [], fake_model()
    model.save_weights = lambda path: happened.append("save")
    checkpoint = ModelCheckpoint(tmp_path / "weights", save_freq=4, save_weights_only=True)
    looks_often = Callback()
    looks_often.next_sync_step = lambda phase, batch: batch
    callbacks = CallbackList([checkpoint, looks_often, TerminateOnNaN()], model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch in range(4):
        assert callbacks.next_sync_step("train", batch) == batch
        callbacks.on_execution_end("train", batch, LazyLogs(
            ["loss"], lambda batch=batch: happened.append(f"read {batch}") or {"loss": 0.5}))
        happened.append(f"end {batch}")
    assert happened == ["end 0", "read 0", "end 1", "read 1", "end 2", "read 2", "read 3", "save", "end 3"]


def test_it_keeps_no_batches_from_being_fused_and_reads_none_for_another_callback_that_does(capsys):
    watcher = LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    callbacks = CallbackList([TerminateOnNaN(), watcher], model=fake_model())
    assert not CallbackList([TerminateOnNaN()]).wants_batch_hooks("train") and callbacks.wants_batch_hooks("train")

    def refuse():
        raise AssertionError("this waits for the device")

    callbacks.on_train_begin()
    callbacks.on_train_batch_end(0, LazyLogs(["loss"], refuse))


def test_a_subclass_that_wants_every_batch_gets_it():
    class Own(TerminateOnNaN):
        def on_batch_end(self, batch, logs=None):
            pass

    assert CallbackList([Own()]).wants_batch_hooks("train")


@pytest.mark.parametrize("hook", ["on_batch_end", "on_train_batch_end"])
@pytest.mark.parametrize("loss", [np.nan, -np.inf, np.float32(np.nan)])
def test_a_batch_hook_that_is_called_by_hand_looks_at_once(hook, loss, capsys):
    callback = TerminateOnNaN()
    callback.set_model(fake_model({"kernel": jnp.ones(2)}))
    callback.on_train_begin()
    getattr(callback, hook)(2, {"loss": 0.5})
    assert not callback.model.stop_training
    getattr(callback, hook)(3, {"loss": loss})
    assert callback.model.stop_training
    assert capsys.readouterr().out == "Batch 3: Invalid loss, terminating training. All weights are finite.\n"


@pytest.mark.parametrize(("params", "model_state", "sentence"), [
    ({f"w{index}": jnp.array([1, jnp.nan]) for index in range(8)}, {},
     "Weights that are not finite: w0, w1, w2, w3, w4 and 3 more, of 8."),
    ({"half": jnp.array([jnp.inf], jnp.bfloat16), "count": jnp.arange(3)}, {"mean": jnp.array(jnp.nan)},
     "Weights that are not finite: half, mean, of 3."),
    ({"kernel": jnp.ones(2)}, {"mean": jnp.ones(2)}, "All weights are finite."),
])
def test_weights_that_are_not_finite_are_named(params, model_state, sentence):
    callback = TerminateOnNaN(raise_error=True)
    callback.set_model(fake_model(params, model_state))
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        callback.on_batch_end(0, {"loss": np.nan})


# --- SkipNonFinite ----------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.BatchNorm(use_running_average=not training, momentum=0.9, epsilon=0.1)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.tanh(x))


def normed_model(strategy=None, **options):
    with (strategy or mirrored(1)).scope():
        model = trainer.Model(Normed())
        # No Adam: it makes steps of a whole size of the rounding in a gradient of zero, as of a bias before BatchNorm.
        sgd = optax.sgd(0.1, momentum=0.9)
        model.compile(**{"optimizer": sgd, "loss": logits_loss(), "steps_per_execution": 4, **options})
    return model


def without_step(state):
    """Returns the arrays of a state that skipped updates leave alone."""
    opt_state = state.opt_state._replace(skipped=None)
    return jax.tree.leaves((state.params, state.model_state, opt_state))


def assert_equal(ours, theirs, rtol=0.0):
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=rtol, atol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize(("value", "options"), [
    (np.nan, {}), (np.inf, {"ema_decay": 0.9}), (np.nan, {"microbatches": 2}), (-np.inf, {"run_eagerly": True}),
], ids=str)
def test_a_training_goes_on_as_if_the_bad_batches_had_not_been_there(value, options):
    x, y = data_with(value, 1, 3)
    x, y, good = x[:40], y[:40], [*range(8), *range(16, 24), *range(32, 40)]
    model = normed_model(skip_non_finite=True, **options)
    model.build(x)
    start = model.state
    history = fit(model, x, y).history
    state = model.state
    assert history["skipped_steps"] == [2.0] and history["skipped_in_a_row"] == [1.0]
    assert (int(state.step), model.optimizer.iterations) == (5, 3)
    model.state = start
    fit(model, x[good], y[good])
    assert (int(model.state.step), model.optimizer.iterations) == (3, 3)
    assert_equal(without_step(state), without_step(model.state), rtol=1e-6)


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_every_bit_of_parameters_optimizer_and_model_state():
    model = normed_model(skip_non_finite=True)
    fit(model, *data_with(0.0))
    before = without_step(model.state)
    fit(model, *data_with(np.nan, *range(8)))
    assert_equal(without_step(model.state), before)
    assert int(model.state.opt_state.skipped.total) == 8


@pytest.mark.slow
def test_a_training_with_finite_gradients_is_the_same_with_and_without_it():
    plain, guarded = normed_model(), normed_model(skip_non_finite=True)
    histories = [fit(model, *data_with(0.0), epochs=2).history for model in (plain, guarded)]
    assert histories[1].pop("skipped_steps") == histories[1].pop("skipped_in_a_row") == [0.0, 0.0]
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-6)
    assert_equal(without_step(guarded.state), without_step(plain.state), rtol=1e-6)


def trained_with_bad_rows(strategy):
    """Returns the state after some batches of which a few have one bad row, on one replica."""
    model = normed_model(strategy, skip_non_finite=True)
    history = fit(model, *data_with(np.nan, 1, 2, 6)).history
    assert history["skipped_steps"] == [3.0] and history["skipped_in_a_row"] == [2.0]
    return without_step(model.state)


@pytest.fixture(scope="module")
def trained_on_one_device():
    return trained_with_bad_rows(mirrored(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mirrored", "central_storage", "fully_sharded", "sharded_optimizer", "model_parallel"])
def test_all_replicas_leave_the_same_updates_out_as_one_device(name, trained_on_one_device):
    assert_equal(trained_with_bad_rows(STRATEGIES[name]()), trained_on_one_device, rtol=1e-4)


@pytest.mark.slow
def test_fused_steps_give_the_same_bits_however_they_are_cut():
    model = normed_model(skip_non_finite=True, steps_per_execution=8)
    model.build(data_with(0.0)[0])
    start, states = model.state, []
    for callbacks in ([], [LambdaCallback(on_train_batch_end=lambda batch, logs: None)]):
        model.state = start
        fit(model, *data_with(np.nan, 1, 2, 6), *callbacks, epochs=2)
        states.append(jax.tree.leaves(model.state))
    assert_equal(*states)


@pytest.mark.slow
def test_of_several_optimizers_each_leaves_its_own_updates_out():
    class Two(trainer.Model):
        def train_step(self, state, batch):
            x, y = batch
            good, bad = ({"kernel": jnp.ones((6, 1)) * x.mean()} for _ in range(2))
            bad = jax.tree.map(lambda leaf: leaf / y.mean(), bad)
            return {"loss": x.mean()}, state.apply_gradients({"good": good, "bad": bad})

        def sample_inputs(self, batch):
            return {"good": batch[0], "bad": batch[0]}

    with mirrored(1).scope():
        model = Two({name: nn.Dense(1, use_bias=False) for name in ("good", "bad")})
        model.compile({"good": "sgd", "bad": "sgd"}, skip_non_finite=True)
    y = np.repeat([0.0, 1.0], ROWS // 2).astype(np.float32)  # half of the batches divide by zero
    history = fit(model, np.ones((ROWS, 6), np.float32), y).history
    assert history["skipped_steps"] == history["skipped_in_a_row"] == [4.0]
    assert {name: optimizer.iterations for name, optimizer in model.optimizer.items()} == {"good": 8, "bad": 4}


@pytest.mark.slow
def test_with_a_loss_scale_too_there_is_one_count_and_the_scale_is_lowered():
    model = normed_model(precision="mixed_float16", skip_non_finite=True)
    history = fit(model, *data_with(np.nan, 1, 2)).history
    assert (history["skipped_steps"], history["skipped_in_a_row"]) == ([2.0], [2.0])
    assert float(model.state.loss_scale) == 2.0**13


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_option_is_refused_unless_it_is_true_or_false(value):
    with pytest.raises(TypeError, match="`skip_non_finite` must be True or False"):
        compiled_mlp(skip_non_finite=value)


# The callback


@pytest.mark.slow
def test_the_callback_switches_it_on_without_compile_and_training_goes_on_with_the_optimizer_as_it_is():
    model = normed_model()
    fit(model, *data_with(0.0))
    model.optimizer.learning_rate = 0.05
    held = model.state  # its arrays stay valid
    callback = SkipNonFinite()
    callback.set_model(model)
    assert model.skip_non_finite
    assert_equal(without_step(model.state), without_step(held))
    assert fit(model, *data_with(np.nan, 1), callback).history["skipped_steps"] == [1.0]
    assert model.optimizer.iterations == 15 and model.optimizer.learning_rate == pytest.approx(0.05)
    assert all(np.isfinite(leaf).all() for leaf in [*model.get_weights(), *without_step(held)])


@pytest.mark.slow
def test_the_callback_compiles_nothing_anew_in_a_second_fit():
    model = normed_model()
    counts = []
    for _ in range(2):
        with count_compilations() as compiled:
            fit(model, *data_with(0.0), SkipNonFinite())
        counts.append(len(compiled))
    assert counts[0] > counts[1] == 0


@pytest.mark.slow
def test_switched_off_again_a_bad_batch_spoils_the_weights():
    model = normed_model(skip_non_finite=True)
    fit(model, *data_with(np.nan, 1))
    assert np.isfinite(model.get_weights()[0]).all()
    model.skip_non_finite = False
    with pytest.warns(RuntimeWarning, match="ended with loss=nan"):
        history = fit(model, *data_with(np.nan, 1)).history
    assert "skipped_steps" not in history and np.isnan(model.get_weights()[0]).all()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("bad", "ends", "printed"), [
    ([1, 2, 4, 5, 7], [1, 3, 5, 7], ""),
    # Batches 2 to 4 are three in a row. They end with the execution of 4 and 5, after which one more has begun.
    ([2, 3, 4], [1, 3, 5, 7], "Batch 5: the gradients of 3 train steps in a row were not finite"),
    ([0, 1, 2, 3, 4, 5, 6, 7], [1, 3, 5], "Batch 3: the gradients of 4 train steps in a row were not finite"),
])
def test_too_many_in_a_row_end_the_training(bad, ends, printed, capsys):
    recorder = Recorder()
    model = compiled_mlp(steps_per_execution=2)
    fit(model, *data_with(np.nan, *bad), SkipNonFinite(max_consecutive=3), recorder)
    output = capsys.readouterr().out
    assert recorder.ends == ends and model.stop_training == bool(printed)
    assert output.startswith(printed) and output.count("in a row") == bool(printed)


def test_too_many_in_a_row_over_two_epochs_raise_if_they_shall():
    x, y = data_with(np.nan, 0, 6, 7)
    callback = SkipNonFinite(max_consecutive=3, raise_error=True)
    with pytest.raises(RuntimeError, match="Batch 3: the gradients of 3 train steps in a row were not finite"):
        fit(compiled_mlp(steps_per_execution=4), x, y, callback, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("callbacks", "options", "warns"), [
    ([], {}, True),
    ([TerminateOnNaN()], {}, False),
    ([SkipNonFinite()], {}, False),
    ([], {"skip_non_finite": True}, False),
])
def test_a_training_that_ends_without_a_finite_loss_says_so_once(callbacks, options, warns):
    model = compiled_mlp(**options)
    expected = (pytest.warns(RuntimeWarning, match=r"ended with loss=nan.*TerminateOnNaN.*skip_non_finite")
                if warns else contextlib.nullcontext([]))
    with expected as warned:
        fit(model, *data_with(np.nan, 3), *callbacks, epochs=2)
    assert [warning.filename for warning in warned] == [__file__] * warns


def not_a_number(y, y_pred):
    return jnp.full(y_pred.shape[0], jnp.nan)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "bad_validation", "message"), [
    ({}, True, r"with val_loss=nan\. The loss that was trained on is finite"),
    ({"skip_non_finite": True}, True, r"with val_loss=nan\. The loss"),
    ({"metrics": [not_a_number]}, False, r"with not_a_number=nan, val_not_a_number=nan\. The loss"),
])
def test_a_validation_or_a_metric_that_is_not_finite_is_named_too(options, bad_validation, message):
    with pytest.warns(RuntimeWarning, match=message) as warned:
        compiled_mlp(**options).fit(*data_with(0.0), batch_size=8, epochs=2, verbose=0,
                                    validation_data=data_with(np.nan if bad_validation else 0.0, 1))
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.slow
def test_logs_of_epochs_before_the_last_are_not_named():
    history = compiled_mlp().fit(*data_with(0.0), batch_size=8, epochs=2, verbose=0,
                                 validation_data=data_with(np.nan, 1), validation_freq=[1])
    assert np.isnan(history.history["val_loss"]).all()


@pytest.mark.slow
def test_a_metric_of_several_values_is_named():
    def spoil(epoch, logs):
        logs["by_class"] = np.array([1.0, np.inf])

    with pytest.warns(RuntimeWarning, match=r"with by_class=\[ 1\. inf\]"):
        fit(compiled_mlp(), *data_with(0.0), LambdaCallback(on_epoch_end=spoil))
