"""A step that reads another model computes with that model's present weights, or says that it cannot."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def model_and_target(read, **options):
    """Returns a model whose loss is its distance from another one, read in some way, and that one."""
    target = trainer.Model(nn.Dense(2), seed=3)
    target.build(X)

    class Distance(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return jnp.square(y_pred - read(target, x)).mean()

    model = Distance(nn.Dense(2))
    model.compile(trainer.optimizers.SGD(0.0), **options)
    model.build(X)
    return model, target


def of_weights(model, target):
    """Returns the distance that follows from the weights of both."""
    kernel, bias = (np.asarray(model.state.params[name]) - np.asarray(target.state.params[name])
                    for name in ("kernel", "bias"))
    return np.square(X @ kernel + bias).mean()


READS = {
    "call": lambda target, x: target(x),
    "state": lambda target, x: target.apply(target.state.params, target.state, x)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_run_after_a_change_compiles_the_step_again(read):
    model, target = model_and_target(read)
    for run in (lambda: model.train_on_batch(X), lambda: model.train_on_batch(X),
                lambda: model.fit(X, verbose=0).history["loss"][0], lambda: model.evaluate(X, verbose=0)["loss"]):
        assert run() == pytest.approx(of_weights(model, target), rel=1e-5)
    target.set_weights([weight + 1 for weight in target.get_weights()])
    with pytest.warns(UserWarning, match="train step is compiled again: it reads the weights of another model"):
        assert model.train_on_batch(X) == pytest.approx(of_weights(model, target), rel=1e-5)
    assert model.fit(X, verbose=0).history["loss"][0] == pytest.approx(of_weights(model, target), rel=1e-5)
    with pytest.warns(UserWarning, match="test step is compiled again"):
        assert model.evaluate(X, verbose=0)["loss"] == pytest.approx(of_weights(model, target), rel=1e-5)


@pytest.mark.slow
def test_training_the_other_model_is_a_change():
    model, target = model_and_target(READS["call"])
    target.compile("sgd", "mse")
    model.train_on_batch(X)
    target.fit(X, np.ones((16, 2), np.float32), verbose=0)
    with pytest.warns(UserWarning, match="compiled again"):
        assert model.train_on_batch(X) == pytest.approx(of_weights(model, target), rel=1e-5)


def test_a_change_within_a_run_ends_it_and_keeps_the_weights():
    model, target = model_and_target(READS["call"])

    class Halve(trainer.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            target.set_weights([weight / 2 for weight in target.get_weights()])

    with pytest.raises(RuntimeError, match="weights of another model, which have changed since the run began"):
        model.fit(X, batch_size=4, epochs=3, verbose=0, callbacks=[Halve()])
    with pytest.warns(UserWarning, match="compiled again"):
        assert model.train_on_batch(X) == pytest.approx(of_weights(model, target), rel=1e-5)


@pytest.mark.slow
def test_reading_and_evaluating_the_other_model_is_no_change(recwarn):
    model, target = model_and_target(READS["call"])
    target.compile("sgd", "mse")
    model.train_on_batch(X)
    target.evaluate(X, np.ones((16, 2), np.float32), verbose=0)
    target.get_weights(), target.state, target.predict(X, verbose=0)
    model.train_on_batch(X)
    assert not [each for each in recwarn if "compiled again" in str(each.message)]


@pytest.mark.slow
def test_an_eager_step_reads_the_present_weights():
    model, target = model_and_target(READS["call"], run_eagerly=True)
    for _ in range(2):
        assert model.train_on_batch(X) == pytest.approx(of_weights(model, target), rel=1e-5)
        target.set_weights([weight + 1 for weight in target.get_weights()])
