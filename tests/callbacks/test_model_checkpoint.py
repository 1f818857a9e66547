"""ModelCheckpoint: which files are there in the end, when they are written, and that a resumed run writes the same.

What it shares with Keras's callback is compared with that in `test_like_keras.py`.
"""

import os
import pathlib
import re
import shutil
import warnings

import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss
from trainer.callbacks import Callback, CallbackList, EarlyStopping, LazyLogs, ModelCheckpoint
from trainer.callbacks.checkpoints.backup_and_restore import BackupAndRestore
from trainer.core.errors import see


class Model:
    """Writes its time, a number, to the files that it is told to save."""

    def __init__(self):
        self.time = 0
        self.saved = []

    def _write(self, path):
        pathlib.Path(path).write_text(str(self.time))
        self.saved.append(os.path.basename(path))

    def save_weights(self, path):
        self._write(path)

    def save(self, path):
        if os.path.splitext(path)[1]:
            self._write(path)
        else:
            os.makedirs(path, exist_ok=True)
            self._write(os.path.join(path, "state"))


def begun(callback, model, available=("loss", "val_loss")):
    callback.set_model(model)
    callback.check_monitor(available)
    callback.on_train_begin()
    return callback


def train_epoch(callback, model, epoch, batches, group=100, first=0):
    """Trains on batches in executions of at most `group`, cut where the callback looks; returns their ends."""
    if first == 0:
        callback.on_epoch_begin(epoch)
    ends = []
    while first < batches:
        look = callback.next_sync_step("train", first)
        first = min(first + group, batches, batches if look is None else look + 1)
        model.time += 1
        callback.on_execution_end("train", first - 1, {"loss": 0.5})
        ends.append(first)
    return ends


def end_epochs(callback, values, monitor="val_loss", first=0):
    for epoch, value in enumerate(values, first):
        callback.model.time = epoch
        callback.on_epoch_begin(epoch)
        callback.on_epoch_end(epoch, {"loss": 1.0} if value is None else {"loss": 1.0, monitor: value})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- when -----------------------------------------------------------------------------------------------------------


def test_executions_end_at_the_batches_to_save_and_nowhere_else(tmp_path):
    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}-{batch}.safetensors", save_freq=4), Model())
    assert train_epoch(checkpoint, checkpoint.model, 0, 6) == [4, 6]
    assert train_epoch(checkpoint, checkpoint.model, 1, 7) == [2, 6, 7]
    assert names_in(tmp_path) == ["1-4.safetensors", "2-2.safetensors", "2-6.safetensors"]


def test_batches_are_counted_over_epochs_that_are_one_execution(tmp_path):
    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_freq=15), Model())
    for epoch in range(10):
        train_epoch(checkpoint, checkpoint.model, epoch, batches=5)
    assert names_in(tmp_path) == ["3.safetensors", "6.safetensors", "9.safetensors"]


def test_other_phases_and_epochs_do_not_count(tmp_path):
    checkpoint = begun(ModelCheckpoint(tmp_path / "{batch}", save_freq=2), Model())
    checkpoint.on_epoch_begin(0)
    assert checkpoint.next_sync_step("test", 0) is None
    checkpoint.on_execution_end("test", 5, {})
    checkpoint.on_epoch_end(0, {"loss": 0.5})
    assert names_in(tmp_path) == []
    assert ModelCheckpoint("x").next_sync_step("train", 0) is None


def test_no_batch_hook_is_asked_for():
    both = [ModelCheckpoint("x", save_freq=3), ModelCheckpoint("y")]
    assert not CallbackList(both).wants_batch_hooks("train")


def test_logs_are_read_only_if_they_are_needed(tmp_path):
    logs = LazyLogs(["loss"], lambda: pytest.fail("nobody needs a value"))
    for arguments in ({}, {"max_to_keep": 1, "monitor": None}, {"save_freq": 1}):
        checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", **arguments), Model())
        checkpoint.on_epoch_begin(0)
        checkpoint.on_execution_end("train", 0, logs)
        checkpoint.on_epoch_end(0, logs)
    assert names_in(tmp_path) == ["1.safetensors"]


# --- what and where ---------------------------------------------------------------------------------------------------


def test_weights_or_all_of_it_are_written_to_a_file_or_a_folder(tmp_path):
    for name, weights_only in (("a.safetensors", True), ("b.safetensors", False), ("c", False), ("d", True)):
        end_epochs(begun(ModelCheckpoint(tmp_path / "new" / name, save_weights_only=weights_only), Model()), [0.5])
    assert names_in(tmp_path / "new") == ["a.safetensors", "b.safetensors", "c", "d"]
    assert [(tmp_path / "new" / name).is_dir() for name in "cd"] == [True, False]


@pytest.mark.parametrize(("name", "missing", "arguments"), [
    ("{val_los:.2f}", "val_los", {}), ("{val_loss.real}-{accuracy}", "accuracy", {}), ("{epoch}-{batch}", "batch", {}),
    ("{}", "", {}), ("{val_loss[0]}-{x}", "x", {"save_freq": 2}),
])
def test_a_name_that_no_log_has_is_refused_before_training(name, missing, arguments):
    with pytest.raises(KeyError) as raised:
        CallbackList([ModelCheckpoint(name, **arguments)]).check_monitors(["loss", "val_loss"])
    assert raised.value.args == (f'Failed to format this callback filepath: "{name}". Reason: {missing!r}',)
    assert raised.value.__notes__[-1].endswith(see("monitor"))


def test_a_name_of_a_validation_that_there_is_not_is_refused_with_advice():
    with pytest.raises(KeyError) as raised:
        CallbackList([ModelCheckpoint("c-{val_loss:.2f}.safetensors")]).check_monitors(["loss"])
    assert "Nothing is validated: pass `validation_data`, or name one of: epoch, loss." in raised.value.__notes__[-1]


def test_a_log_that_a_callback_before_it_adds_may_be_in_the_name(tmp_path):
    class Scores(Callback):
        @trainer.callbacks.adds_logs("score")
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = 0.25

    callback_list = CallbackList([Scores(), ModelCheckpoint(tmp_path / "{score:.2f}.safetensors")], model=Model())
    callback_list.check_monitors(["loss"])
    callback_list.on_epoch_end(0, {"loss": 0.5})
    assert names_in(tmp_path) == ["0.25.safetensors"]


def test_a_folder_where_the_file_should_be_is_named(tmp_path):
    with pytest.raises(OSError, match=r"Please specify a non-directory filepath for ModelCheckpoint. .* directory: /"):
        end_epochs(begun(ModelCheckpoint(tmp_path, save_weights_only=True), Model()), [0.5])


@pytest.mark.parametrize(("name", "arguments", "instead"), [
    ("best-{epoch}.keras", {}, r"Write 'best-\{epoch\}\.safetensors', or 'best-\{epoch\}' for a folder\."),
    ("best.weights.h5", {"save_weights_only": True}, r"Write 'best\.weights\.safetensors'\."),
])
def test_the_suffix_of_another_format_is_refused_before_training(name, arguments, instead):
    with pytest.raises(ValueError, match=rf"`filepath` has the suffix.*{instead}"):
        ModelCheckpoint(name, **arguments)


@pytest.mark.parametrize("name", ["w-{epoch", "w-{epoch}-{loss:.2q}", "w-{epoch:zz}"])
def test_a_name_that_cannot_be_formatted_is_refused_before_training(name):
    with pytest.raises(ValueError, match=rf"`filepath` is no format string of numbers.*Received: '{re.escape(name)}'"):
        ModelCheckpoint(name, save_weights_only=True)


def test_the_best_without_a_monitor_is_refused():
    with pytest.raises(ValueError, match="`save_best_only=True` needs a `monitor`"):
        ModelCheckpoint("x", monitor=None, save_best_only=True)


def test_an_unknown_mode_warns_and_an_unknown_direction_is_refused_only_if_it_is_needed(tmp_path):
    with pytest.warns(UserWarning, match="ModelCheckpoint mode 'unknown' is unknown, fallback to auto mode"):
        ModelCheckpoint("x", mode="unknown")
    available = ["loss", "score"]
    end_epochs(begun(ModelCheckpoint(tmp_path / "x", "score"), Model()), [0.5], "score")
    for arguments in ({"save_best_only": True}, {"max_to_keep": 2}):
        with pytest.raises(ValueError, match="ModelCheckpoint callback received monitor=score, and cannot"):
            end_epochs(begun(ModelCheckpoint(tmp_path / "x", "score", **arguments), Model(), available), [0.5], "score")


@pytest.mark.parametrize("arguments", [
    {"save_best_only": True}, {"max_to_keep": 2}, {"monitor": "val_loss", "save_best_only": True, "save_freq": 2},
    {"monitor": "val_accuracy", "max_to_keep": 2, "save_freq": 2}])
def test_a_monitor_that_no_log_at_the_saves_has_is_refused_before_training(arguments):
    checkpoint = ModelCheckpoint("x", **{"monitor": "val_score", "mode": "max", **arguments})
    with pytest.raises(ValueError, match=f"ModelCheckpoint received monitor='{checkpoint.monitor}', which no log has"):
        CallbackList([checkpoint]).check_monitors(["loss", "val_loss", "val_accuracy"], batches=["loss"])


def test_a_monitor_that_nobody_checked_is_refused_at_the_first_save(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "x", "unknown", save_best_only=True)
    checkpoint.set_model(Model())
    with pytest.raises(ValueError, match="monitor='unknown', which no log has"):
        end_epochs(checkpoint, [0.5])
    checkpoint = begun(ModelCheckpoint(tmp_path / "x", save_best_only=True, save_freq=1), Model())
    with pytest.raises(ValueError, match="monitor='val_loss', which no log has"):
        train_epoch(checkpoint, checkpoint.model, 0, 1)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("arguments", [
    {}, {"monitor": "score"}, {"monitor": None}, {"max_to_keep": 2}, {"max_to_keep": 2, "save_freq": 2}])
def test_a_monitor_that_decides_nothing_need_not_be_a_log(arguments):
    CallbackList([ModelCheckpoint("x", **arguments)]).check_monitors(["loss"])


@pytest.mark.parametrize(("arguments", "is_refused"), [
    ({}, True), ({"save_best_only": True}, False), ({"save_best_only": True, "monitor": "loss"}, True),
    ({"save_freq": 2}, True), ({"max_to_keep": 2}, True)])
def test_the_name_of_a_log_that_only_some_saves_have_is_refused_before_training(arguments, is_refused):
    callback_list = CallbackList([ModelCheckpoint("{val_loss:.2f}", **arguments)])
    if not is_refused:
        callback_list.check_monitors(["loss", "val_loss"], ["loss"], ["loss"])
        return
    with pytest.raises(KeyError, match="Failed to format") as raised:
        callback_list.check_monitors(["loss", "val_loss"], ["loss"], ["loss"])
    assert "Not every save has the log 'val_loss', which comes with a validation" in raised.value.__notes__[-1]


def test_what_callbacks_add_to_the_logs_of_batches_is_not_known_before():
    class Adds(Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["norm"] = 1.0

    CallbackList([Adds(), ModelCheckpoint("{norm}", save_freq=2)]).check_monitors(["loss"])
    with pytest.raises(KeyError, match="norm"):
        CallbackList([ModelCheckpoint("{norm}", save_freq=2), Adds()]).check_monitors(["loss"])


def test_a_monitor_with_several_values_warns_and_writes_all_the_same(tmp_path):
    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_best_only=True, max_to_keep=1), Model())
    with pytest.warns(UserWarning, match=r"only when `monitor` is a scalar value. Received: an array of shape \(2,\)"):
        end_epochs(checkpoint, [np.ones(2), np.ones(2)])
    assert names_in(tmp_path) == ["2.safetensors"]


def test_an_epoch_without_a_validation_saves_only_if_every_epoch_does(tmp_path):
    for best, expected in ((True, [1, 3]), (False, [1, 2, 3])):
        folder = tmp_path / str(best)
        checkpoint = ModelCheckpoint(folder / "{epoch}.safetensors", save_best_only=best)
        end_epochs(begun(checkpoint, Model()), [0.5, None, 0.4])
        assert names_in(folder) == [f"{number}.safetensors" for number in expected]


# --- how many ---------------------------------------------------------------------------------------------------------


def kept(folder, values, **arguments):
    end_epochs(begun(ModelCheckpoint(folder / "{epoch}.safetensors", **arguments), Model()), values)
    return [int(pathlib.Path(name).stem) for name in names_in(folder)]


@pytest.mark.parametrize(("values", "arguments", "expected"), [
    ([0.5, 0.4, 0.6, 0.3, 0.7], {"max_to_keep": 2}, [2, 4]),
    ([0.5, 0.4, 0.6, 0.3, 0.7], {"max_to_keep": 2, "mode": "max"}, [3, 5]),
    ([0.5, 0.4, 0.6, 0.3, 0.7], {"max_to_keep": 2, "monitor": None}, [4, 5]),
    ([None] * 5, {"max_to_keep": 2}, [4, 5]),
    ([0.5, 0.4, 0.6, 0.3, 0.7], {"max_to_keep": 2, "save_best_only": True}, [2, 4]),
    ([0.5, 0.4, 0.6, 0.3, 0.7], {"max_to_keep": 1}, [4]),
    ([0.5, 0.4, 0.6], {"max_to_keep": 9}, [1, 2, 3]),
    ([0.5, 0.5, 0.5, 0.5], {"max_to_keep": 2}, [1, 2]),
    ([None, 0.5, None, 0.6, 0.4, None], {"max_to_keep": 2}, [2, 5]),
    ([float("nan"), 0.5, float("nan"), 0.6], {"max_to_keep": 2}, [2, 4]),
    ([float("nan")] * 3, {"max_to_keep": 2}, [2, 3]),
])
def test_the_best_files_stay_or_the_newest(tmp_path, values, arguments, expected):
    assert kept(tmp_path, values, **arguments) == expected


def test_what_would_not_stay_is_not_written(tmp_path, capsys):
    model = Model()
    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", max_to_keep=2, verbose=1), model)
    end_epochs(checkpoint, [0.5, 0.4, 0.6, 0.45])
    assert model.saved == ["1.safetensors", "2.safetensors", "4.safetensors"]
    assert "\nEpoch 3: val_loss is not among the best 2\n" in capsys.readouterr().out


def test_a_name_that_is_written_again_counts_once_and_is_not_deleted(tmp_path):
    model = Model()
    checkpoint = begun(ModelCheckpoint(tmp_path / "model.safetensors", max_to_keep=1, monitor=None), model)
    end_epochs(checkpoint, [0.5, 0.4, 0.6])
    assert (tmp_path / "model.safetensors").read_text() == "2"


def test_only_files_that_it_wrote_are_deleted_and_only_after_the_new_one_is_there(tmp_path):
    (tmp_path / "0.safetensors").write_text("somebody's")

    class Watching(Model):
        def save(self, path):
            seen.append(names_in(tmp_path))
            super().save(path)

    seen = []
    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", max_to_keep=1, monitor=None), Watching())
    end_epochs(checkpoint, [0.5, 0.4, 0.3])
    assert seen == [["0.safetensors"], ["0.safetensors", "1.safetensors"], ["0.safetensors", "2.safetensors"]]
    assert names_in(tmp_path) == ["0.safetensors", "3.safetensors"]


def test_a_save_that_fails_leaves_the_old_files(tmp_path):
    class Failing(Model):
        def save(self, path):
            if self.time == 1:
                raise OSError("no space left")
            super().save(path)

    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", max_to_keep=1, monitor=None), Failing())
    with pytest.raises(OSError, match="no space left"):
        end_epochs(checkpoint, [0.5, 0.4])
    assert names_in(tmp_path) == ["1.safetensors"]
    end_epochs(checkpoint, [0.3], first=2)
    assert names_in(tmp_path) == ["3.safetensors"]


def test_folders_are_deleted_whole_and_links_are_not_followed(tmp_path):
    folders = tmp_path / "all"
    checkpoint = begun(ModelCheckpoint(folders / "{epoch}", max_to_keep=1, monitor=None), Model())
    end_epochs(checkpoint, [0.5])
    target = tmp_path / "elsewhere"
    (folders / "1").rename(target)
    (folders / "1").symlink_to(target)
    end_epochs(checkpoint, [0.5, 0.4], first=1)
    assert names_in(folders) == ["3"]
    assert names_in(target) == ["state"]


@pytest.mark.parametrize("path", [
    "elsewhere/1.safetensors", "all/../elsewhere/1.safetensors", "all/link/1.safetensors", "all", "all/", "all/.",
    "all/deep/..", "elsewhere",
])
def test_a_state_does_not_make_it_delete_outside_of_its_folder(tmp_path, path):
    for name in ("all/deep/1", "elsewhere/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.safetensors").write_text("somebody's")
    (tmp_path / "all" / "link").symlink_to(tmp_path / "elsewhere")
    checkpoint = begun(ModelCheckpoint(tmp_path / "all" / "{epoch}.safetensors", max_to_keep=1, monitor=None), Model())
    state = checkpoint.state_dict() | {"_written": 1, "_kept": [[str(tmp_path / path), 0, None]]}
    with pytest.warns(UserWarning, match="do not lie in the folder '.*all' of its `filepath`, and will not delete"):
        checkpoint.load_state_dict(state)
    end_epochs(checkpoint, [0.5, 0.4], first=1)
    assert names_in(tmp_path / "all") == ["3.safetensors", "deep", "link"]
    assert names_in(tmp_path / "elsewhere") == ["1.safetensors"]


def test_what_it_wrote_itself_is_deleted_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for template in ("{epoch}.safetensors", "runs/model-{epoch}", "runs/../deep/{epoch}/a.safetensors"):
        one, two = (begun(ModelCheckpoint(template, max_to_keep=1, monitor=None), Model()) for _ in range(2))
        end_epochs(one, [0.5])
        assert os.path.exists(template.format(epoch=1))
        two.load_state_dict(one.state_dict())
        end_epochs(two, [0.5], first=1)
        assert os.path.exists(template.format(epoch=2)) and not os.path.exists(template.format(epoch=1))


def test_a_file_that_is_gone_or_cannot_be_deleted_does_not_end_the_training(tmp_path, monkeypatch):
    checkpoint = begun(ModelCheckpoint(tmp_path / "{epoch}.safetensors", max_to_keep=1, monitor=None), Model())
    end_epochs(checkpoint, [0.5])
    (tmp_path / "1.safetensors").unlink()
    end_epochs(checkpoint, [0.4], first=1)

    def refuse(path):
        raise PermissionError(f"not allowed: {path}")

    monkeypatch.setattr(os, "remove", refuse)
    with pytest.warns(UserWarning, match=r"`ModelCheckpoint` cannot delete '.*2.safetensors': not allowed"):
        end_epochs(checkpoint, [0.3], first=2)
    assert names_in(tmp_path) == ["2.safetensors", "3.safetensors"]


def test_a_folder_of_which_a_part_remains_is_named(tmp_path, monkeypatch):
    def leave(path):
        raise FileNotFoundError("another process has deleted a file in it")

    (tmp_path / "1").mkdir()
    monkeypatch.setattr(shutil, "rmtree", leave)
    with pytest.warns(UserWarning, match=r"`ModelCheckpoint` cannot delete '.*1': another process"):
        ModelCheckpoint(tmp_path / "{epoch}")._delete(str(tmp_path / "1"))


def test_only_the_first_process_makes_folders_and_deletes_but_all_save(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.setattr("jax.process_index", lambda: 1)
    model = Model()
    checkpoint = begun(ModelCheckpoint(tmp_path / "there" / "{epoch}.safetensors", max_to_keep=1, monitor=None), model)
    end_epochs(checkpoint, [0.5, 0.4])
    assert model.saved == names_in(tmp_path / "there") == ["1.safetensors", "2.safetensors"]
    with pytest.raises(FileNotFoundError):
        end_epochs(begun(ModelCheckpoint(tmp_path / "new" / "x.safetensors"), model), [0.5])


# --- a resumed run ----------------------------------------------------------------------------------------------------


VALUES = [0.5, 0.6, 0.4, 0.45, 0.3, 0.35]
STATEFUL = {
    "best": {"save_best_only": True}, "best two": {"max_to_keep": 2}, "newest two": {"max_to_keep": 2, "monitor": None},
}


@pytest.mark.parametrize("cut", range(1, len(VALUES)))
@pytest.mark.parametrize("name", STATEFUL)
def test_a_resumed_run_keeps_what_an_undisturbed_one_keeps(name, cut, tmp_path):
    def new(folder):
        return begun(ModelCheckpoint(folder / "{epoch}.safetensors", **STATEFUL[name]), Model())

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    end_epochs(new(whole), VALUES)
    killed = new(resumed)
    end_epochs(killed, VALUES[:cut])
    state = killed.state_dict()
    end_epochs(killed, VALUES[cut:cut + 1], first=cut)  # after the checkpoint
    fresh = new(resumed)
    fresh.load_state_dict(state)
    end_epochs(fresh, VALUES[cut:], first=cut)
    assert names_in(resumed) == names_in(whole)


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_resumed_epoch_saves_at_the_batches_where_it_would_have_saved(stop, tmp_path):
    def new(folder):
        return begun(ModelCheckpoint(folder / "{epoch}-{batch}.safetensors", save_freq=4), Model())

    whole, resumed = new(tmp_path / "whole"), new(tmp_path / "resumed")
    for epoch in range(3):
        train_epoch(whole, whole.model, epoch, 7, group=2)
    train_epoch(resumed, resumed.model, 0, 7, group=2)
    train_epoch(resumed, resumed.model, 1, stop, group=2)
    state = resumed.state_dict()
    resumed = new(tmp_path / "resumed")
    resumed.on_epoch_begin(1)  # as a resumed `fit` does, before the state
    resumed.load_state_dict(state)
    train_epoch(resumed, resumed.model, 1, 7, group=2, first=stop)
    train_epoch(resumed, resumed.model, 2, 7, group=2)
    assert names_in(tmp_path / "resumed") == names_in(tmp_path / "whole")


# --- with a model -----------------------------------------------------------------------------------------------------


X, Y, _ = classification(24)


def compiled(**options):
    model = trainer.Model(LinenMLP())
    model.compile("sgd", logits_loss(), metrics=["accuracy"], **options)
    return model


def fit(model, *callbacks, epochs=3, **options):
    return model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)


@pytest.mark.slow
def test_the_best_weights_are_those_that_early_stopping_restores(tmp_path):
    model, path = compiled(), tmp_path / "weights-{epoch:02d}-{val_loss:.2f}.safetensors"
    checkpoint = ModelCheckpoint(path, save_best_only=True, save_weights_only=True, max_to_keep=1)
    stopping = EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    history = fit(model, checkpoint, stopping, validation_data=(X, Y))
    (file,) = tmp_path.iterdir()
    best = int(np.argmin(history.history["val_loss"]))
    assert file.name == f"weights-{best + 1:02d}-{history.history['val_loss'][best]:.2f}.safetensors"
    other = compiled()
    other.build(X)
    other.load_weights(file)
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_weights_of_fused_steps_are_those_of_single_ones(tmp_path):
    for name, options in (("fused", {"steps_per_execution": 6}), ("single", {"steps_per_execution": 1})):
        path = tmp_path / name / "{epoch}-{batch}.safetensors"
        fit(compiled(**options), ModelCheckpoint(path, save_freq=4, save_weights_only=True))
    assert names_in(tmp_path / "fused") == ["1-4.safetensors", "2-2.safetensors", "2-6.safetensors", "3-4.safetensors"]
    for path in (tmp_path / "fused").iterdir():
        assert path.read_bytes() == (tmp_path / "single" / path.name).read_bytes()


@pytest.mark.slow
def test_the_whole_state_is_written_to_one_file_or_to_a_folder(tmp_path):
    fit(compiled(), ModelCheckpoint(tmp_path / "model-{epoch}.safetensors", max_to_keep=1),
        ModelCheckpoint(tmp_path / "model-{epoch}", max_to_keep=1), epochs=2)
    assert names_in(tmp_path) == ["model-2", "model-2.safetensors"]
    assert (tmp_path / "model-2.safetensors").is_file() and (tmp_path / "model-2").is_dir()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("checkpoint", "arguments", "error"), [
    (ModelCheckpoint("x", "unknown", save_best_only=True), {}, ValueError),
    (ModelCheckpoint("x", save_best_only=True), {"validation_freq": 3}, ValueError),  # of two epochs
    (ModelCheckpoint("{val_loss}"), {"validation_freq": 2}, KeyError),
])
def test_a_log_that_no_save_will_have_is_refused_before_training(checkpoint, arguments, error):
    model = compiled()
    with pytest.raises(error, match=r"received monitor=.* no log has|Failed to format"):
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint], validation_data=(X, Y), **arguments)
    assert int(model.state.step) == 0


def test_a_wrong_name_is_refused_before_training(tmp_path):
    model = compiled()
    with pytest.raises(KeyError, match=r"Failed to format .* Reason: .*val_loss"):
        fit(model, ModelCheckpoint(tmp_path / "{val_loss}.safetensors"))
    assert int(model.state.step) == 0


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_a_run_that_is_interrupted_and_resumed_leaves_the_same_files(save_freq, tmp_path):
    class Interruption(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 9:
                raise KeyboardInterrupt

    def run(folder, *others):
        checkpoint = ModelCheckpoint(folder / "{epoch}.safetensors", save_freq=save_freq, save_weights_only=True,
                                     monitor="loss", max_to_keep=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(compiled(), checkpoint, BackupAndRestore(tmp_path / f"{folder.name}-backup", save_freq=5), *others)

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", Interruption())
    run(tmp_path / "resumed")
    assert names_in(tmp_path / "resumed") == names_in(tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes()
