"""`SidecarEvaluator`: which checkpoints are evaluated, to which numbers, and when it ends."""

from __future__ import annotations

import os
import shutil
import time
import types

import jax.numpy as jnp
import pytest

import trainer
from tests.support.event_files import scalars
from tests.support.networks import NNXMLP, LinenMLP, classification, compiled_mlp, logits_loss, mirrored
from trainer import callbacks as cb
from trainer.distribute import SidecarEvaluator
from trainer.engine.model import sidecar_evaluator
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter, disk, open_checkpoint

X, Y, WEIGHTS = classification(52)
TEST = classification(30, seed=1)
BATCH_SIZE, EPOCHS = 8, 3  # 7 batches an epoch
ENDS = (7, 14, 21)


def new_model(replicas=1, module=None, optimizer="adam", **options):
    with mirrored(replicas).scope():
        model = trainer.Model(module or LinenMLP(batch_norm=True, dropout=0.2), seed=3)
        model.compile(optimizer, logits_loss(), metrics=["accuracy"], **{"ema_decay": 0.9, **options})
    return model


def train(folder, model, callbacks=()):
    """Trains and leaves all checkpoints in a folder; returns what `evaluate` gave by the number of batches."""
    evaluated = {}

    def evaluate(epoch, logs):
        x, y, sample_weight = TEST
        evaluated[7 * (epoch + 1)] = model.evaluate(x, y, sample_weight=sample_weight, verbose=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "prune", lambda self: None)
        model.fit(X, Y, BATCH_SIZE, EPOCHS, verbose=0, callbacks=[
            *callbacks, cb.LambdaCallback(on_epoch_end=evaluate),
            cb.BackupAndRestore(folder, delete_checkpoint=False)])
    return evaluated


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training's checkpoints after each epoch, and what `evaluate` gave then."""
    saved = tmp_path_factory.mktemp("run")
    return types.SimpleNamespace(saved=saved, evaluated=train(saved, new_model()))


@pytest.fixture(scope="module")
def model():
    """What evaluates, compiled once."""
    return new_model()


class Training:
    """Stands for a training: does the next of its `acts` whenever the evaluator waits."""

    def __init__(self, saved, folder, monkeypatch):
        self.saved, self.folder, self.acts = saved, folder, []
        clock = types.SimpleNamespace(sleep=self._act, monotonic=time.monotonic)
        monkeypatch.setattr(sidecar_evaluator, "time", clock)

    def _act(self, secs):
        assert self.acts, "it goes on waiting"
        self.acts.pop(0)()

    def saves(self, *steps, saved=None):
        self.folder.mkdir(exist_ok=True)
        for step in steps:
            temporary = disk.temporary_path(str(self.folder / f"step_{step}"))
            shutil.copytree((saved or self.saved) / f"step_{step}", temporary)
            disk.put_in_place(temporary, str(self.folder / f"step_{step}"))

    def deletes(self, *steps):
        for step in steps:
            disk.discard(str(self.folder / f"step_{step}"))

    def ends(self):
        CheckpointFolder(self.folder).delete()

    def nothing(self):
        pass


@pytest.fixture
def training(run, tmp_path, monkeypatch):
    return Training(run.saved, tmp_path / "backup", monkeypatch)


def evaluator(model, training, data=TEST, **options):
    return SidecarEvaluator(model, data, training.folder, **{"verbose": 0, **options})


def steps(history):
    return [entry["step"] for entry in history]


# --- what is evaluated ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_once_to_the_numbers_of_the_training(run, model, training, capsys):
    training.acts = [training.nothing, lambda: training.saves(7), training.nothing, lambda: training.saves(14),
                     lambda: training.saves(21)]
    sidecar = evaluator(model, training, verbose=1)
    history = sidecar.start()
    assert history is sidecar.history and sidecar.has_evaluated_end
    for entry, step, epoch in zip(history, ENDS, (1, 2, 3), strict=True):
        assert entry == {"step": step, "epoch": epoch, **{name: pytest.approx(value, rel=1e-6)
                                                           for name, value in run.evaluated[step].items()}}
    assert list(history[0])[:3] == ["step", "epoch", "loss"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"step 14, 2 of 3 epochs - loss: {history[1]['loss']:.4f} - accuracy: ")
    assert model.optimizer.iterations == 21


@pytest.mark.slow
def test_the_strategy_need_not_be_that_of_the_training(run, training):
    training.saves(14)
    sidecar = evaluator(new_model(replicas=4), training, max_evaluations=1)
    assert sidecar.start() == [{"step": 14, "epoch": 2, **{name: pytest.approx(value, rel=1e-5)
                                                           for name, value in run.evaluated[14].items()}}]


@pytest.mark.slow
def test_an_nnx_training_that_was_stopped_is_evaluated_and_has_ended(tmp_path, monkeypatch):
    trained = new_model(module=NNXMLP(batch_norm=True))
    stop = cb.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(trained, "stop_training", True))
    expected = train(tmp_path / "saved", trained, callbacks=[stop])
    training = Training(tmp_path / "saved", tmp_path / "backup", monkeypatch)
    training.saves(7)
    sidecar = evaluator(new_model(module=NNXMLP(batch_norm=True, seed=1)), training)
    history = sidecar.start()
    assert sidecar.has_evaluated_end
    assert history == [{"step": 7, "epoch": 1, **{name: pytest.approx(value, rel=1e-6)
                                                  for name, value in expected[7].items()}}]


@pytest.mark.slow
def test_the_newest_is_evaluated_first_and_those_before_it_never(model, training):
    training.saves(7, 14)
    slow = cb.LambdaCallback(on_test_end=lambda logs: training.acts and training.acts.pop(0)())
    training.acts = [lambda: training.saves(21)]
    assert steps(evaluator(model, training, callbacks=slow).start()) == [14, 21]


@pytest.mark.slow
def test_a_training_that_goes_back_is_evaluated_where_it_has_not_been(model, training):
    def resumes_from_the_one_before():
        training.deletes(14)
        training.saves(7)

    training.saves(14)
    training.acts = [resumes_from_the_one_before, lambda: training.saves(14), lambda: training.saves(21)]
    assert steps(evaluator(model, training).start()) == [14, 21]


@pytest.mark.slow
def test_steps_limits_the_batches_and_max_evaluations_the_evaluations(model, training):
    training.saves(7)
    training.acts = [lambda: training.saves(14)]
    data = trainer.data.Dataset.from_arrays(TEST).batch(4)
    sidecar = evaluator(model, training, data, steps=2, max_evaluations=2)
    history = sidecar.start()
    assert steps(history) == [7, 14] and not sidecar.has_evaluated_end
    assert history[-1]["loss"] == model.evaluate(data, steps=2, verbose=0)["loss"] != model.evaluate(
        data, verbose=0)["loss"]


@pytest.mark.slow
def test_every_start_begins_anew(model, training):
    training.saves(21)
    sidecar = evaluator(model, training)
    assert steps(sidecar.start()) == steps(sidecar.start()) == [21]


@pytest.mark.slow
def test_tensorboard_shows_evaluations_by_the_updates_of_the_training(model, training, tmp_path):
    training.saves(7)
    training.acts = [lambda: training.saves(21)]
    history = evaluator(model, training, callbacks=cb.TensorBoard(tmp_path / "logs")).start()
    points = scalars(tmp_path / "logs")
    assert points == {f"validation/evaluation_{name}_vs_iterations": [(entry["step"], pytest.approx(entry[name]))
                                                                       for entry in history]
                      for name in ("loss", "accuracy")}


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["open_checkpoint", "check_is_of_run", "restored_state"])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_skipped(model, training, monkeypatch, moment, is_after):
    training.saves(7)
    training.acts = [lambda: training.saves(21)]
    original = getattr(sidecar_evaluator, moment)

    def deleting(*arguments):
        if is_after:
            result = original(*arguments)
        monkeypatch.setattr(sidecar_evaluator, moment, original)
        training.deletes(7)
        return result if is_after else original(*arguments)

    monkeypatch.setattr(sidecar_evaluator, moment, deleting)
    assert steps(evaluator(model, training).start()) == [21]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(model, training, monkeypatch):
    training.saves(21)
    training.acts = [training.nothing]
    original = sidecar_evaluator.restored_state

    def replacing(*arguments):
        monkeypatch.setattr(sidecar_evaluator, "restored_state", original)
        training.saves(21)
        return original(*arguments)

    monkeypatch.setattr(sidecar_evaluator, "restored_state", replacing)
    assert steps(evaluator(model, training).start()) == [21]


def damage(path):
    with open(path / "document.json", "r+b") as file:
        file.truncate(40)


def test_a_damaged_checkpoint_is_skipped_and_left_where_it_is(model, training):
    training.saves(7, 14)
    damage(training.folder / "step_14")
    training.acts = [training.nothing, lambda: training.saves(21)]
    with pytest.warns(UserWarning, match=r"step_14' is damaged.*document\.json.*not evaluated") as caught:
        history = evaluator(model, training).start()
    assert len(caught) == 1 and steps(history) == [7, 21]
    assert sorted(os.listdir(training.folder)) == ["step_14", "step_21", "step_7"]


def test_nothing_in_the_folder_is_changed(model, training):
    training.saves(7, 21)
    (training.folder / ".step_9.0123456789ab.tmp").mkdir()
    before = [(path, path.stat().st_mtime_ns) for path in sorted(training.folder.rglob("*"))]
    evaluator(model, training).start()
    assert [(path, path.stat().st_mtime_ns) for path in sorted(training.folder.rglob("*"))] == before


# --- when it ends -----------------------------------------------------------------------------------------------------


def test_it_ends_when_the_checkpoints_are_deleted(model, training, capsys):
    training.saves(7)
    training.acts = [training.ends, training.nothing]
    sidecar = evaluator(model, training, verbose=1)
    assert steps(sidecar.start()) == [7] and not sidecar.has_evaluated_end
    assert "deleted its checkpoints before its last state was evaluated; the last evaluation was of step 7." in (
        capsys.readouterr().out.splitlines()[-1])


def test_a_folder_in_which_nothing_is_whole_for_a_moment_is_not_the_end(model, training):
    def fails_and_starts_again():
        os.rename(training.folder / "step_7", training.folder / "corrupt_step_7")

    training.saves(7)
    training.acts = [fails_and_starts_again, training.nothing, training.nothing, lambda: training.saves(21)]
    assert steps(evaluator(model, training).start()) == [7, 21]


def test_a_folder_that_is_empty_at_one_look_is_not_the_end(model, training):
    training.saves(7)
    training.acts = [lambda: training.deletes(7), lambda: training.saves(14), lambda: training.deletes(14),
                     lambda: training.saves(21)]
    assert steps(evaluator(model, training).start()) == [7, 14, 21]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_end_is_seen_where_the_last_batch_was_saved_before_it(model, training, is_stopped):
    saved = open_checkpoint(training.saved / "step_21")
    arrays = saved.restore({name: jnp.zeros(*spec) for name, spec in saved.specs.items()})
    with CheckpointWriter() as writer:  # as `save_freq=7` does
        writer.save(training.folder / "step_21", arrays,
                    {**saved.document, "epoch": 2, "batch": 7, "stop_training": is_stopped})
    training.acts = [training.nothing, lambda: training.saves(21)]
    sidecar = evaluator(model, training)
    assert steps(sidecar.start()) == [21] and sidecar.has_evaluated_end and not training.acts


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, 1])
def test_the_end_of_a_training_is_saved_however_often_it_saves_else(tmp_path, model, stop):
    def end(epoch, logs):
        trained.stop_training = epoch == stop

    trained = new_model()
    backup = cb.BackupAndRestore(tmp_path / "backup", 5, delete_checkpoint=False)
    trained.fit(X, Y, BATCH_SIZE, EPOCHS, verbose=0, callbacks=[backup, cb.LambdaCallback(on_epoch_end=end)])
    sidecar = SidecarEvaluator(model, TEST, tmp_path / "backup", verbose=0)
    assert steps(sidecar.start()) == [21 if stop is None else 14] and sidecar.has_evaluated_end


@pytest.mark.parametrize(("prepare", "found"), [
    (lambda folder: None, r"the folder '.*backup' does not exist, nothing was evaluated"),
    (lambda folder: folder.mkdir(), r"the folder '.*backup' is empty"),
    (lambda folder: (folder.mkdir(), (folder / "1.safetensors").touch()), r"no checkpoint of a run, but '1.safeten"),
])
def test_a_checkpoint_that_does_not_come_is_an_error_after_a_time(model, tmp_path, prepare, found):
    prepare(tmp_path / "backup")
    sidecar = SidecarEvaluator(model, TEST, tmp_path / "backup", poll_secs=0.01, timeout_secs=0.1)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"No new checkpoint came in 0\.1 s: .*{found}"):
        sidecar.start()
    assert time.monotonic() - begin >= 0.1


@pytest.mark.slow
def test_the_time_to_wait_counts_from_the_last_evaluation(run, model, tmp_path):
    shutil.copytree(run.saved / "step_7", tmp_path / "step_7")
    late = cb.LambdaCallback(on_test_end=lambda logs: time.sleep(0.3))
    sidecar = SidecarEvaluator(model, TEST, tmp_path, callbacks=late, poll_secs=0.01, timeout_secs=0.2, verbose=0)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"newest in .* is 'step_7', the last evaluation was of step 7\."):
        sidecar.start()
    assert time.monotonic() - begin >= 0.5 and steps(sidecar.history) == [7]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("make", "message"), [
    (lambda: new_model(module=LinenMLP(classes=4)), r"(?s)not match the run.*other shape.*Dense_1/kernel"),
    (lambda: new_model(optimizer="sgd"), r"(?s)not match the run.*not wanted: state/opt_state"),
    (lambda: new_model(precision="mixed_bfloat16"), r"another precision .* in the checkpoint: None"),
])
def test_another_model_is_refused(training, make, message):
    training.saves(7)
    with pytest.raises(ValueError, match=message):
        evaluator(make(), training).start()


def test_folders_of_something_else_are_refused(model, training, tmp_path):
    training.saves(7)
    with pytest.raises(ValueError, match=r"step_7' is itself a checkpoint. Give the folder"):
        SidecarEvaluator(model, TEST, training.folder / "step_7").start()
    built = new_model()
    built.build(TEST[0])
    built.save(tmp_path / "models" / "step_1")
    with pytest.raises(ValueError, match=r"step_1' is no checkpoint of a run"):
        SidecarEvaluator(model, TEST, tmp_path / "models").start()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="`checkpoint_dir` must be a folder"):
        SidecarEvaluator(model, TEST, tmp_path / "file").start()


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"model": LinenMLP()}, TypeError, r"`model` must be a `trainer.Model`"),
    ({"model": trainer.Model(LinenMLP())}, RuntimeError, r"Call `compile` before"),
    ({"checkpoint_dir": None}, TypeError, "`checkpoint_dir` must be the path"),
    ({"checkpoint_dir": ""}, ValueError, r"`checkpoint_dir` must be the path.*an empty one"),
    ({"steps": 0}, ValueError, "`steps` must be a whole number of at least 1"),
    ({"data": (batch for batch in [TEST])}, ValueError, "read again .* a generator"),
    ({"data": (*TEST, X)}, ValueError, "`data` must be"),
    ({"max_evaluations": 1.5}, TypeError, "`max_evaluations` must be a whole number"),
    ({"callbacks": [print]}, TypeError, "`callbacks` must be instances"),
    ({"poll_secs": 0}, ValueError, "`poll_secs` must be a number of seconds above 0"),
    ({"timeout_secs": "1"}, TypeError, "`timeout_secs` must be a number of seconds"),
    ({"verbose": 3}, ValueError, "`verbose` must be"),
])
def test_bad_arguments_are_refused(changes, error, message):
    arguments = {"model": compiled_mlp(), "data": TEST, "checkpoint_dir": "backup", **changes}
    with pytest.raises(error, match=message):
        SidecarEvaluator(**arguments)


def test_a_process_of_several_is_refused(model, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="needs a process of its own"):
        SidecarEvaluator(model, TEST, "backup")
