"""What users bring along: metrics of their own, buffers used again, callbacks that meddle."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from tests.support import project_files
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored


class HitCount(trainer.metrics.Metric):
    """Counts right answers, of rows that it takes to be all there are."""

    def __init__(self):
        super().__init__(name="hits")
        self.count = self.add_variable(name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add((y_pred.argmax(-1) == y_true).astype(jnp.float32).sum())

    def result(self):
        return self.count


class HitCountWithoutWeights(HitCount):
    def update_state(self, y_true, y_pred):
        super().update_state(y_true, y_pred)


class LargestLogit(HitCount):
    """A maximum, which neither adds nor has weights."""

    additive = False

    def update_state(self, y_true, y_pred):
        self.count.assign(jnp.maximum(self.count.value, y_pred.max()))

    def merge_variables(self, first, second):
        return [jnp.maximum(one, other) for one, other in zip(first, second, strict=True)]


def compiled(replicas=1, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(LinenMLP())
    model.compile("sgd", logits_loss(), **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize(("metric", "expected"), [
    (HitCount, lambda logits, y: (logits.argmax(-1) == y).sum()),
    (HitCountWithoutWeights, lambda logits, y: (logits.argmax(-1) == y).sum()),
    (LargestLogit, lambda logits, y: logits.max()),
])
def test_metrics_that_ignore_sample_weights_do_not_see_padded_rows(metric, expected, replicas):
    x, y, _ = classification(11)
    model = compiled(replicas, metrics=[metric()])
    logits = model.predict(x, verbose=0)
    y[-1] = logits[-1].argmax()  # The row that padding repeats is one that counts.
    assert model.evaluate(x, y, batch_size=11, verbose=0)["hits"] == pytest.approx(expected(logits, y), rel=1e-6)


@pytest.mark.slow
def test_a_generator_may_write_each_batch_into_the_same_buffer():
    x, y, _ = classification(64)

    def reuses_a_buffer():
        rows, labels = np.empty((16, 6), np.float32), np.empty(16, np.int64)
        for start in range(0, 64, 16):
            rows[:], labels[:] = x[start : start + 16], y[start : start + 16]
            yield rows, labels
            rows[:], labels[:] = np.nan, 0

    by_generator = compiled().fit(reuses_a_buffer(), verbose=0).history
    assert by_generator == compiled().fit(x, y, batch_size=16, shuffle=False, verbose=0).history


@pytest.mark.slow
def test_a_callback_may_replace_weights_between_batches():
    class Zeroes(trainer.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.set_weights([0 * weight for weight in self.model.get_weights()])
                self.model.optimizer.learning_rate = 0.0

    x, y, _ = classification(40)
    model = compiled()
    model.fit(x, y, batch_size=8, callbacks=[Zeroes()], verbose=0)
    assert not any(weight.any() for weight in model.get_weights())


@pytest.mark.slow
def test_training_goes_on_after_an_interrupt():
    class Interrupts(trainer.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    x, y, _ = classification(40)
    model = compiled()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, callbacks=[Interrupts()], verbose=0)
    assert int(model.state.step) == 3
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(model.state.step) == 8
    assert not [thread for thread in threading.enumerate() if thread.name == "trainer-prefetch"]


@pytest.mark.slow
def test_fit_in_another_thread_gives_the_same_numbers():
    x, y, _ = classification(24)
    model, histories = compiled(replicas=3), []
    thread = threading.Thread(target=lambda: histories.append(model.fit(x, y, batch_size=8, verbose=0).history))
    thread.start()
    thread.join()
    assert histories == [compiled(replicas=3).fit(x, y, batch_size=8, verbose=0).history]


@pytest.mark.slow
def test_an_endless_validation_generator_needs_validation_steps():
    x, y, _ = classification(8)
    model = compiled()
    history = model.fit(x, y, epochs=2, verbose=0, validation_data=((x, y) for _ in itertools.count()),
                        validation_steps=2).history
    assert len(history["val_loss"]) == 2


@pytest.mark.slow
def test_a_script_may_end_with_predictions_that_nobody_took():
    script = """
import numpy as np
import trainer
from tests.support.networks import LinenMLP

model = trainer.Model(LinenMLP())
model.build(np.zeros((1, 6), np.float32))
predictions = model.predict_iter(np.zeros((80, 6), np.float32), batch_size=16)
next(predictions)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=project_files.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
