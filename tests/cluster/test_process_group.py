"""What processes must have alike is compared, and what they may decide differently is agreed on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import trainer
from tests.support.fake_store import FakeStore
from tests.support.networks import LinenMLP, classification, logits_loss
from tests.support.rendezvous_cluster import free_port
from tests.support.waiting import GUARD_SECS
from trainer import callbacks as cb
from trainer import distribute
from trainer.callbacks import Callback, CallbackList
from trainer.core.train_state import TrainState
from trainer.data.sharding.processes import Channel
from trainer.distribute.cluster import ClusterError, ProcessGroup, process_group
from trainer.engine.model.core.run_fingerprint import describe_model
from trainer.engine.saving.checkpoint.manifest import CheckpointError
from trainer.engine.saving.checkpoint.processes import from_first
from trainer.testing import LocalCluster

X, Y, _ = classification(48)
BATCH_SIZE = 8  # six batches


class StopsOneProcess(Callback):
    """Asks to stop in process 1 alone, by the time of the day or whatever else differs there."""

    def __init__(self, hook):
        setattr(self, hook, self.stop)

    def stop(self, number, logs=None):
        if jax.process_index() == 1 and number == 2:
            self.model.stop_training = True


class Seen(Callback):
    def __init__(self, runs_on):
        self.runs_on, self.batches, self.epochs = runs_on, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, logs["loss"]))


def fitted(callbacks, epochs=5):
    with distribute.MultiWorkerMirroredStrategy().scope():
        model = trainer.Model(LinenMLP(), seed=1)
        model.compile(trainer.optimizers.SGD(0.1), logits_loss())
    history = model.fit(X, Y, batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=callbacks)
    return int(model.state.step), history.history["loss"]


def in_a_process(folder):
    """Returns what a process has seen; a message of an error in the place of what could not run."""
    distribute.MultiWorkerMirroredStrategy()
    index = jax.process_index()
    found = {"any": [ProcessGroup.of_all().any(flag) for flag in (False, index == 1, True)]}
    for hook in ("on_train_batch_end", "on_execution_end", "on_epoch_end"):
        callback = StopsOneProcess("on_train_batch_end" if hook == "on_execution_end" else hook)
        if hook == "on_execution_end":
            callback = cb.LambdaCallback()
            callback.on_execution_end = lambda phase, batch, logs, self=callback: (
                StopsOneProcess.stop(self, 2) if batch >= 2 else None)
        found[hook] = fitted([callback])
    everywhere, on_chief = Seen("all"), Seen("chief")
    logger = cb.CSVLogger(os.path.join(folder, "log.csv"))
    found["steps"], _ = fitted([everywhere, on_chief, logger], epochs=1)
    found["seen"] = [everywhere.batches, on_chief.batches, everywhere.epochs, on_chief.epochs]
    found["opened"] = logger.csv_file is not None
    return found


@pytest.mark.processes
def test_processes_agree_when_to_stop_and_the_chief_alone_runs_what_is_its_own(tmp_path):
    chief, other = LocalCluster(2).run(in_a_process, str(tmp_path))
    assert chief["any"] == other["any"] == [False, True, True]
    assert chief["on_train_batch_end"] == other["on_train_batch_end"] and chief["on_train_batch_end"][0] == 3
    assert chief["on_execution_end"] == other["on_execution_end"] and chief["on_execution_end"][0] == 6
    assert chief["on_epoch_end"] == other["on_epoch_end"] and chief["on_epoch_end"][0] == 3 * 6
    assert chief["steps"] == other["steps"] == 6
    every_batch, epochs = list(range(6)), chief["seen"][2]
    assert chief["seen"] == [every_batch, every_batch, epochs, epochs]
    assert other["seen"] == [every_batch, [], epochs, []]
    assert (chief["opened"], other["opened"]) == (True, False)


def test_names_of_other_processes_are_escaped_and_their_texts_are_not(monkeypatch):
    store = FakeStore()
    monkeypatch.setattr(process_group, "jax_store", lambda: store)
    theirs = [["data", "\x1b"], ["model\x1b", ""], ["model", json.dumps({"na\x1bme": "\nvalue"})]]
    for number, message in enumerate(theirs):
        store.key_value_set(f"trainer/process_group/pair{number}/call0/1", json.dumps(message))
    pairs = [ProcessGroup([0, 1], f"pair{number}") for number in range(3)]
    assert pairs[0].all_gather("\n") == ["\n", "\x1b"]
    with pytest.raises(ClusterError, match=r"worker 0 prepares its data, worker 1 its model\\x1b\."):
        pairs[1].all_gather("")
    with pytest.raises(ClusterError, match=r"na\\x1bme: 1 in worker 0, \\nvalue in worker 1\."):
        pairs[2].assert_consistent("model", lambda: {"na\x1bme": "1"})


class Failing:
    """A group of two processes, one of which says that it has failed."""

    index, count = 1, 2

    def subgroup(self):
        return self

    def all_gather(self, text, what="data"):
        return [json.dumps({"error": "ValueError: \x1b[2J\nmore"}), text]


def test_an_error_of_another_process_keeps_its_lines_and_is_escaped_otherwise(monkeypatch):
    monkeypatch.setattr(ProcessGroup, "of_all", Failing)
    said = r"failed: ValueError: \\x1b\[2J\nmore$"
    with pytest.raises(RuntimeError, match=said):
        Channel(Failing()).all(1)
    with pytest.raises(CheckpointError, match=said):
        from_first(str)


SCRIPT = """
import sys
import numpy as np
import trainer
from flax import linen as nn

width, epochs, callbacks = {differ}
options = trainer.distribute.CommunicationOptions(timeout_seconds=600)  # a process that waits for it does not end
with trainer.distribute.MultiWorkerMirroredStrategy(options).scope():
    model = trainer.Sequential([nn.Dense(width), nn.Dense(1)])
    model.compile("sgd", "mse")
print("ready", flush=True)
model.fit(np.ones((8, 4), np.float32), np.ones((8, 1), np.float32), epochs=epochs, verbose=0, callbacks=callbacks)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("roles", "differ", "message"), [
    (["worker", "worker"], "(int(sys.argv[1]) + 4, 1, [])",
     "The model for `fit` of worker 1 differs from worker 0's. parameters: 4 arrays, 25 values (........) in worker 0, "
     "4 arrays, 31 values (........) in worker 1"),
    (["chief", "worker"],
     "(4, 1, [trainer.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)] * int(sys.argv[1]))",
     "The training of worker 0 differs from chief's. callbacks that run on \"all\": History in chief, "
     "LambdaCallback, History in worker 0; phases of which a callback sees each batch: none in chief, train in "
     "worker 0")])
def test_a_worker_with_another_model_or_training_ends_all_before_anything_runs(roles, differ, message):
    port = free_port()
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"]
    tasks = [(role, roles[:index].count(role)) for index, role in enumerate(roles)]
    cluster = {role: [address for one, address in zip(roles, addresses, strict=True) if one == role] for role in roles}
    processes = []
    for index, (role, index_in_role) in enumerate(tasks):
        config = {"cluster": cluster, "task": {"type": role, "index": index_in_role}}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CONFIG": json.dumps(config)}
        environment.pop("XLA_FLAGS", None)
        processes.append(subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(differ=differ), str(index)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True))
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes:
            error = process.communicate(timeout=GUARD_SECS)[1]
            assert process.returncode == 2, error
            assert matches(message, error), error
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=GUARD_SECS)
    finally:
        for process in processes:
            process.kill()


def matches(message, text):
    at = text.find(message[:40])
    found = text[at:at + len(message)]
    return at >= 0 and all(wanted in (".", got) for wanted, got in zip(message, found, strict=True))


def refused(compiled=(), fitted=(), prepare=lambda model: None, call="fit"):
    """Returns why `fit`, or another call, does not begin if processes have different arguments for it or `compile`."""
    with distribute.MultiWorkerMirroredStrategy().scope():
        model = trainer.Model(LinenMLP(), seed=1)
        model.compile(**{"optimizer": trainer.optimizers.SGD(0.1), "loss": logits_loss(), **dict(compiled)})
    prepare(model)
    given = {"x": X, "y": Y, "batch_size": BATCH_SIZE, "verbose": 0, **dict(fitted)}
    fitted = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(distribute.ClusterError) as caught:
        getattr(model, call)(**fitted)
    return str(caught.value)


class Evaluates(Callback):
    """Calls in one process what all have to call."""

    def on_epoch_end(self, epoch, logs=None):
        if jax.process_index() == 1:
            self.model.evaluate(X, Y, verbose=0)


def shared(policy):
    return trainer.data.with_options(trainer.data.Dataset.from_arrays((X, Y)).batch(BATCH_SIZE), policy)


def refused_loop(policy):
    strategy = distribute.MultiWorkerMirroredStrategy()
    with pytest.raises(distribute.ClusterError) as caught:
        strategy.experimental_distribute_dataset(shared(policy))
    return str(caught.value)


def set_to_ones(model):
    model.build(X[:1])
    model.set_weights([np.ones_like(weight) for weight in model.get_weights()])


def all_refused():
    """Returns the messages for all that process 1 may have otherwise than process 0."""
    distribute.MultiWorkerMirroredStrategy()
    sgd, losses = trainer.optimizers.SGD, trainer.losses
    decay = trainer.optimizers.schedules.ExponentialDecay
    is_other = jax.process_index() == 1
    smoothed = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1 * is_other)
    return {
        "learning rate": refused({"optimizer": sgd(0.2 if is_other else 0.1)}),
        "schedule": refused({"optimizer": sgd(decay(0.1, 10, 0.5 if is_other else 0.9))}),
        "clipping": refused({"optimizer": sgd(0.1, clipnorm=2.0 if is_other else 1.0)}),
        "loss": refused({"loss": smoothed}, {"y": np.eye(3, dtype=np.float32)[Y]}),
        "weights": refused(prepare=set_to_ones if is_other else lambda model: model.build(X[:1])),
        "batch": refused(fitted={"batch_size": BATCH_SIZE + is_other}),
        "rows": refused(fitted={"x": X[is_other:], "y": Y[is_other:]}),
        "order": refused(fitted={"shuffle": is_other}),
        "validation": refused(fitted={"validation_data": (X, Y), "validation_freq": 1 + is_other}),
        "rows of the validation": refused(fitted={"validation_data": (X + is_other, Y)}),
        "evaluated rows": refused(call="evaluate", fitted={"x": X + is_other}),
        "predicted rows": refused(call="predict", fitted={"x": X + is_other, "y": None}),
        "calls": refused(call="evaluate" if is_other else "fit"),
        "calls in a callback": refused(fitted={"callbacks": [Evaluates()]}),
        "sharing": refused(fitted={"x": shared("off" if is_other else "data"), "y": None, "batch_size": None}),
        "sharing of the validation": refused(fitted={"validation_data": shared("data" if is_other else "off")}),
        "sharing in a loop": refused_loop("off" if is_other else "auto"),
    }


@pytest.mark.processes
def test_a_worker_that_differs_in_anything_but_shapes_is_refused():
    program = "program, made by the code, the loss, the metrics, the optimizer and the communication: "
    chief, other = LocalCluster(2).run(all_refused)
    assert chief == other
    expected = {
        "learning rate": "The model for `fit` of worker 1 differs from worker 0's. values of the optimizer state: ",
        "schedule": program, "clipping": program,
        "loss": "loss: CategoricalCrossentropy(from_logits=True) in worker 0, CategoricalCrossentropy("
                "from_logits=True, label_smoothing=0.1) in worker 1",
        "weights": "values of the parameters: ",
        "batch": "batch: 2 arrays, 56 values (", "rows": "rows of the data: 48 in worker 0, 47 in worker 1",
        "order": "The training of worker 1 differs from worker 0's. first batch: ",
        "validation": "validation_freq: 1 in worker 0, 2 in worker 1",
        "rows of the validation": "first batch (validation): ",
        "evaluated rows": "The data for `evaluate` of worker 1 differs from worker 0's. first batch: ",
        "predicted rows": "The data for `predict` of worker 1 differs from worker 0's. first batch: ",
        "calls": "worker 0 prepares its data for `fit`, worker 1 its data for `evaluate`",
        "calls in a callback": "worker 0 prepares its decision to stop, worker 1 its data for `evaluate`",
        "sharing": "auto_shard_policy of `x`: data in worker 0, off in worker 1. ",
        "sharing of the validation": "auto_shard_policy of `validation_data`: off in worker 0, data in worker 1. ",
        "sharing in a loop": "auto_shard_policy: auto in worker 0, off in worker 1. "}
    for what, said in expected.items():
        assert said in chief[what], chief[what]


def with_a_model_of_its_own():
    """Returns the losses of a model on this process's devices, which process 0 trains twice and process 1 once."""
    distribute.MultiWorkerMirroredStrategy()
    losses = []
    for _ in range(2 - jax.process_index()):
        with distribute.MirroredStrategy().scope():
            model = trainer.Model(LinenMLP(), seed=1)
            model.compile(trainer.optimizers.SGD(0.1), logits_loss())
        history = model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[Stops()])
        assert np.isfinite(model.predict(X, verbose=0)).all()
        losses.append((history.history["loss"], model.evaluate(X, Y, verbose=0)))
    shared_by_all = fitted([], epochs=1)
    return losses, shared_by_all


@pytest.mark.processes
def test_models_on_the_devices_of_one_process_need_no_other():
    (chief, chief_shared), (other, other_shared) = LocalCluster(2).run(with_a_model_of_its_own)
    assert chief == other * 2
    assert chief_shared == other_shared


# --- one process ------------------------------------------------------------------------------------------------------


class Stops(Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1


def test_the_versions_of_the_packages_are_compared_with_the_model():
    state = TrainState(step=np.int32(0), params={}, model_state={}, opt_state=(), seed=0)
    described = describe_model(state, np.ones((4, 2), np.float32), {})
    assert (described["trainer"], described["jax"]) == (trainer.__version__, jax.__version__)


def test_a_callback_for_the_chief_is_called_where_there_is_one_process():
    seen = Seen("chief")
    CallbackList([seen]).on_train_batch_end(3, {"loss": np.float32(1)})
    assert seen.batches == [3]


def test_where_a_callback_runs_is_checked():
    with pytest.raises(ValueError, match=r"`Seen.runs_on` must be 'all' or 'chief'. Received: 'worker 3'."):
        CallbackList([Seen("worker 3")])
    looking = Seen("chief")
    looking.next_sync_step = lambda phase, batch: batch
    with pytest.raises(TypeError, match="`Seen` runs on the chief alone, and cannot have a `next_sync_step`"):
        CallbackList([looking])


def test_only_callbacks_that_may_stop_differently_make_processes_ask():
    assert CallbackList([Stops()]).may_stop_differently("train")
    assert not CallbackList([Stops()]).may_stop_differently("test")
    alike = [cb.TerminateOnNaN(), cb.EarlyStopping("loss"), cb.ModelCheckpoint("x.safetensors", save_freq=2),
             cb.ProgbarLogger(), cb.CSVLogger("log.csv"), cb.Throughput(1), cb.BackupAndRestore("backup", 2)]
    assert not CallbackList(alike).may_stop_differently("train")
