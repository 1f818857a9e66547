"""Writes tensorboard.json: what is in the event files of Keras's TensorBoard callback.

Run with Keras and TensorFlow installed: `KERAS_BACKEND=jax python tests/reference/make_tensorboard.py`. The test drives
the trainer's callback through the same hooks, with the same weights and logs, and reads its files with its own reader.
"""

import json
import os
import pathlib
import tempfile

import numpy as np

OUTPUT = pathlib.Path(__file__).with_name("tensorboard.json")

BATCHES = 4  # of an epoch; divisible by each `update_freq`, because Keras else drops the epoch's logs
LEARNING_RATES = (0.5, 0.25)
WEIGHTS = {
    "dense/kernel": np.linspace(-0.4, 1.2, 15, dtype=np.float32).reshape(5, 3),
    "dense/bias": np.array([0.0, 0.1, 0.1], np.float32),
    "norm/moving_mean": np.full(3, 0.25, np.float32),
}
CASES = [
    {},
    {"update_freq": "batch"},
    {"update_freq": 2},
    {"histogram_freq": 1, "write_images": True},
    {"histogram_freq": 2},
    {"fits": 2, "update_freq": 2},
]


def run_fits(callback, model, fits):
    """Calls the hooks of `fits` fits of two epochs with two validations, as a trainer does.

    Args:
      callback: the callback.
      model: has `set_progress(iterations, learning_rate)`.
      fits: how many.
    """
    iterations = 0
    for _ in range(fits):
        callback.set_model(model)
        model.set_progress(iterations, LEARNING_RATES[0])
        callback.on_train_begin({})
        for epoch, learning_rate in enumerate(LEARNING_RATES):
            callback.on_epoch_begin(epoch, {})
            for batch in range(BATCHES):
                callback.on_train_batch_begin(batch, logs={})
                iterations += 1
                logs = {"loss": 2.0**-iterations, "accuracy": iterations / 16}
                callback.on_train_batch_end(batch, logs=logs)
                if hasattr(callback, "on_execution_end"):  # Keras has no such hook
                    callback.on_execution_end("train", batch, logs)
            model.set_progress(iterations, learning_rate)
            validation = {"loss": 3.0**-iterations, "accuracy": iterations / 32}
            callback.on_test_begin({})
            callback.on_test_batch_begin(0, logs={})
            # The reference's callback drops what it writes while the number of test batches is odd.
            callback.on_test_batch_begin(1, logs={})
            callback.on_test_batch_end(1, logs=validation)
            callback.on_test_end(validation)
            logs = {"loss": 2.0**-iterations, "accuracy": iterations / 16}
            callback.on_epoch_end(epoch, {**logs, **{f"val_{name}": value for name, value in validation.items()}})
        callback.on_train_end(logs)


def _keras_model():
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__(name="")
            self.dense = keras.layers.Dense(3, name="dense")
            self.norm = keras.layers.BatchNormalization(name="norm", scale=False, center=False)

        def call(self, x):
            return self.norm(self.dense(x))

        def set_progress(self, iterations, learning_rate):
            self.optimizer.iterations.assign(iterations)
            self.optimizer.learning_rate = learning_rate

    model = Model()
    model.compile(keras.optimizers.SGD(LEARNING_RATES[0]), "mse")
    model(np.zeros((2, 5), np.float32))
    for weight in model.weights:
        if (known := WEIGHTS.get(weight.path.strip("/"))) is not None:
            weight.assign(known)
    return model


def _events(log_dir):
    """Returns what is in the event files: the run, the tag, the plugin, the step and the value of each event."""
    import tensorflow as tf

    rows = []
    for path in sorted(pathlib.Path(log_dir).rglob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                array = tf.make_ndarray(value.tensor)
                if plugin == "images":  # the pixels, because the same image has many encodings
                    size, images = array[:2], array[2:]
                    pixels = [np.asarray(tf.io.decode_png(image)).tolist() for image in images]
                    array = np.array([*map(int, size), pixels], object)
                rows.append([path.parent.name, value.tag.strip("/"), plugin, event.step, array.tolist()])
    return rows


def main():
    import keras

    results = []
    for case in CASES:
        arguments = {name: value for name, value in case.items() if name != "fits"}
        with tempfile.TemporaryDirectory() as log_dir:
            callback = keras.callbacks.TensorBoard(log_dir, write_graph=False, **arguments)
            run_fits(callback, _keras_model(), case.get("fits", 1))
            known = tuple(f"{name}/" for name in WEIGHTS)
            rows = [row for row in _events(log_dir) if row[2] == "scalars" or row[1].startswith(known)]
        results.append({"case": case, "events": rows})
    content = {"keras": keras.__version__, "results": results}
    OUTPUT.write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")
    print(f"{OUTPUT.name}: {sum(len(result['events']) for result in results)} events of Keras {keras.__version__}")


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    main()
