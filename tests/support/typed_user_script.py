"""A user's script, for a type checker to read: nothing runs. Lines with the comment `wrong` must be rejected."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import trainer
from trainer import TrainState

x, y = np.ones((8, 2), np.float32), np.ones((8, 3))


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield x, y


class Indexed:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return x, y


def modules() -> None:
    trainer.Model(lambda x: x * 2)
    trainer.Model({"generator": [nn.Dense(1)], "critic": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})
    trainer.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)])
    trainer.Sequential(nn.Dense(3))  # wrong


def compiles(model: trainer.Model, precision: str) -> None:
    model.compile("sgd", "mse", metrics=["mae", trainer.metrics.MeanAbsoluteError()])
    model.compile(optax.adam(1e-3), trainer.losses.MeanSquaredError(), precision=precision)
    model.compile(trainer.optimizers.Adam(1e-3), loss=["mse", None], loss_weights=[1, 0.5], freeze="encoder",
                  metrics={"a": ["mae"], "b": "mse"})
    model.compile({"generator": "adam", "critic": optax.sgd(0.1)}, jit_compile=True, steps_per_execution=4)
    model.compile("adam", lambda y, y_pred: jnp.mean((y - y_pred) ** 2, -1))
    model.compile(loss=3)  # wrong
    model.compile(steps_per_execution="all")  # wrong
    model.compile(compile_guard="raise")  # wrong


def fits(model: trainer.Model, verbose: int, several: list[trainer.callbacks.EarlyStopping]) -> None:
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=verbose, callbacks=several)
    print(history.history["loss"][0])
    model.fit([[1.0, 2.0]], [1.0], callbacks=trainer.callbacks.EarlyStopping())
    model.fit({"a": x, "b": jnp.ones((8, 2))}, (y, y), shuffle="batch", validation_freq=[1, 3])
    model.fit((x, x), [y, y], class_weight={0: 1.0}, sample_weight=np.ones(8), validation_data=(x, y, np.ones(8)))
    model.fit(batches(), steps_per_epoch=3, validation_data=batches())
    model.fit(trainer.data.Dataset.from_arrays((x, y)).batch(4))
    model.fit(grain.MapDataset.source([1, 2, 3]).map(lambda index: (x, y)).batch(2))
    model.fit(Indexed())
    model.fit(x, y, epochs="3")  # wrong
    model.fit(x, y, callbacks=[1])  # wrong
    model.fit(x, y, shuffle="rows")  # wrong


def others(model: trainer.Model, as_dict: bool) -> None:
    loss: float = model.evaluate(x, y, verbose=0)["loss"]
    loss, mae = model.evaluate(x, y, return_dict=False)
    loss = model.train_on_batch(x, y)
    loss = model.test_on_batch(x, y, return_dict=True)["loss"]
    print(loss, mae, model.evaluate(x, y, return_dict=as_dict), model.predict(x).shape)
    for outputs in model.predict_iter(batches()):
        print(outputs)
    model.build({"a": x})
    model.state = model.state.replace(step=model.state.step)
    model.set_weights(model.get_weights())
    model.compile_ahead((x, y), phases=["train", "test"])
    run: trainer.callbacks.Run = model  # as callbacks get it
    print(run.name, trainer.load("digits", trainer.Sequential([nn.Dense(1)])).layers)
    model.evaluate(x, y)["loss"].append(1)  # wrong


class Untyped(trainer.Model):
    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)

        def loss_of(params):
            y_pred, model_state = self.apply(params, state, x, training=True)
            return self.compute_loss(x, y, y_pred, sample_weight), (y_pred, model_state)

        (loss, (y_pred, model_state)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        logs = {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}
        return logs, state.apply_gradients(grads, model_state=model_state)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, x, y_pred, sample_weight) + 1.0


class Typed(trainer.Model):
    def __init__(self, width: int):
        super().__init__(nn.Dense(width))

    def train_step(
        self, state: TrainState, batch: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], TrainState]:
        return {"loss": jnp.zeros(())}, state

    def test_step(self, state: TrainState, batch: Any) -> dict[str, jax.Array]:
        return {"loss": jnp.zeros(())}

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                     training: bool = True) -> jax.Array:
        return jnp.mean((y - y_pred) ** 2)

    def predict_step(self, state: int, batch: Any) -> Any:  # wrong
        return batch


class Stops(trainer.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True
        print(self.model.optimizer.learning_rate, self.model.current_run.state.params)


def public_names() -> None:
    trainer.optimizers.AdamW(1e-3, weight_decay=0.1, clipnorm=1.0, name="decayed")
    trainer.optimizers.Adam(lr=1e-3)  # wrong
    trainer.optimizers.Adam(clipnorm="1")  # wrong
    print(trainer.Modell)  # wrong
    trainer.losses.Hubert()  # wrong
    (x, _), _ = trainer.datasets.mnist.load_data()
    x.no_such_method()  # wrong
