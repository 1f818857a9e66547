"""Parameter servers used wrongly, for long, or beside other models: clear errors, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.waiting import GUARD_SECS
from trainer import callbacks, distribute

pytestmark = pytest.mark.processes
x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
y = np.arange(32) % 3
LOSS = trainer.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module")
def strategy():
    with distribute.ParameterServerStrategy(num_workers=1, num_ps=1) as made:
        yield made


def made(strategy, kind=trainer.Model, seed=0):
    with strategy.scope():
        model = kind(nn.Dense(3), seed=seed)
        model.compile(trainer.optimizers.SGD(0.1), LOSS)
    return model


class Student(trainer.Model):
    def train_step(self, state, batch):
        teacher = self.teacher.apply(self.teacher.state.params, self.teacher.state, batch[0])[0]

        def loss_fn(params):
            outputs, model_state = self.apply(params, state, batch[0], training=True)
            return ((outputs - teacher) ** 2).mean(), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return {"loss": loss}, state.apply_gradients(grads, model_state=model_state)


def test_a_teacher_whose_weights_change_is_seen_by_the_workers(strategy):
    def losses(strategy):
        teacher, student = made(strategy, seed=1), made(strategy, Student)
        teacher.build(x[:2])
        student.teacher = teacher
        student.fit(x, y, batch_size=16, verbose=0)
        teacher.set_weights([5 * weight + 1 for weight in teacher.get_weights()])
        with pytest.warns(UserWarning, match="weights of another model, which have changed"):
            return student.fit(x, y, batch_size=16, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(strategy), losses(distribute.OneDeviceStrategy()), rtol=1e-5)


def test_a_teacher_of_another_strategy_is_refused(strategy):
    student = made(strategy, Student)
    student.teacher = made(distribute.OneDeviceStrategy())
    student.teacher.build(x[:2])
    with pytest.raises(TypeError, match=r"made under OneDeviceStrategy.*scope of the ParameterServerStrategy"):
        student.fit(x, y, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "get_weights", "compile", "summary", "build"])
def test_what_is_for_the_chief_is_refused_in_a_function(strategy, method):
    model = made(strategy)
    model.build(x[:2])
    arguments = {"fit": (x, y), "evaluate": (x, y), "predict": (x,), "compile": ("sgd", "mse"), "build": (x,)}

    def use():
        getattr(model, method)(*arguments.get(method, ()))

    with pytest.raises(RuntimeError, match="scheduled function cannot use"):
        strategy.coordinator.schedule(use).fetch()
    with pytest.raises(RuntimeError, match="scheduled function cannot use"):
        strategy.coordinator.join()


def test_a_state_of_ones_own_cannot_be_assigned_in_a_function(strategy):
    model = made(strategy)
    model.build(x[:2])

    def assign():
        model.state = model.state.replace(params=jax.tree.map(np.zeros_like, model.state.params))

    with pytest.raises(RuntimeError, match=r"only be assigned what `strategy.run`"):
        strategy.coordinator.schedule(assign).fetch()
    with pytest.raises(RuntimeError, match=r"only be assigned what `strategy.run`"):
        strategy.coordinator.join()


def test_workers_keep_nothing_of_fits_that_have_ended(strategy):
    def sent():
        return len(strategy.coordinator._slots[0].sent)

    model, counts = made(strategy), []
    for _ in range(4):
        model.fit(x.copy(), y, batch_size=16, verbose=0, epochs=2, callbacks=[
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))])
        gc.collect()
        strategy.coordinator.fetch([strategy.coordinator.schedule(int) for _ in range(8)])
        counts.append(sent())
    assert counts[-1] <= counts[1] + 2, counts  # two fits more send three values each


def test_workers_see_what_a_callback_writes_to_arrays_and_what_is_written_between_fits(strategy):
    def losses(strategy):
        inputs = x.copy()
        dataset = trainer.data.Dataset.from_arrays((inputs, y)).batch(16)
        double = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: np.multiply(inputs, 2, out=inputs))
        model = made(strategy)
        found = model.fit(dataset, epochs=2, verbose=0, callbacks=[double]).history["loss"]
        return found + model.fit(dataset, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(strategy), losses(distribute.OneDeviceStrategy()), rtol=1e-5)


def test_a_closed_strategy_says_so():
    with distribute.ParameterServerStrategy(num_workers=1, num_ps=1) as closed:
        model = made(closed)
    for use in (lambda: model.fit(x, y, verbose=0), lambda: closed.create_embedding_table("t", 3, 3)):
        with pytest.raises(RuntimeError, match="The strategy is closed"):
            use()


SCRIPT = """
import os, signal, threading, time
import jax, numpy as np
from flax import linen as nn
import trainer
from trainer import distribute

strategy = distribute.ParameterServerStrategy(num_workers=1, num_ps=1)

class Slow(trainer.Model):
    def train_step(self, state, batch):
        logs, state = super().train_step(state, batch)
        def wait(loss):
            print("in a worker")
            time.sleep(1000)
            return loss
        return {**logs, "waited": jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), logs["loss"])}, state

with strategy.scope():
    model = Slow(nn.Dense(1))
    model.compile("sgd", "mse")
print(strategy._engine._folder, flush=True)
model.fit(np.zeros((8, 2), np.float32), np.zeros((8, 1), np.float32), batch_size=4, verbose=0)
"""


def test_ctrl_c_ends_a_fit_at_once_and_leaves_nothing():
    root = pathlib.Path(trainer.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env={**environment, "PYTHONPATH": str(root)}) as process:
        folder = process.stdout.readline().strip()
        assert process.stdout.readline() == "in a worker\n", "what a function prints is seen at once"
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=GUARD_SECS)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors and "run again" not in errors
    assert not os.path.exists(folder)
