"""Makes `tests/saving/files/`: what a version of the trainer writes, for later versions to read.

Run with that version: `python tests/reference/make_files.py FOLDER`. A run is interrupted in its second epoch, so that
the backup holds running logs, the position in the data, and the states of callbacks. Commit 4f300b6 made those files.
"""

import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np

BATCH_SIZE, EPOCHS = 4, 3
SAVED_AT, STOPPED_AT = 6, 8  # batches; an epoch has four
X = np.linspace(-1, 1, 60, dtype=np.float32).reshape(20, 3)
Y = np.sin(X.sum(1, keepdims=True))


def new_model():
    import optax
    from flax import linen as nn

    import trainer

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, training: bool = False):
            x = nn.BatchNorm(use_running_average=not training)(nn.Dense(4, use_bias=False)(x))
            return nn.Dense(1)(nn.relu(x))

    with trainer.distribute.OneDeviceStrategy().scope():
        model = trainer.Model(Network(), seed=3)
        model.compile(optax.adam(0.05), "mse", metrics=["mae"], ema_decay=0.9)
    return model


def train(backup: str, stop_at: int | None = None, verbose: int = 0):
    """Trains to the end, or exits the process after so many batches."""
    from trainer import callbacks

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches == stop_at:
                while not os.path.exists(os.path.join(backup, f"step_{SAVED_AT}")):
                    time.sleep(0.01)  # a thread writes it
                os._exit(0)

    model = new_model()
    history = model.fit(X, Y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=verbose, validation_split=0.2, callbacks=[
        callbacks.BackupAndRestore(backup, save_freq=SAVED_AT, double_checkpoint=False),
        callbacks.EarlyStopping("val_loss", patience=5), *([Stop()] if stop_at else [])])
    return model, history


def main(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    interrupted = f"import make_files; make_files.train({str(folder / 'backup')!r}, stop_at={STOPPED_AT})"
    subprocess.run([sys.executable, "-c", interrupted], check=True, cwd=pathlib.Path(__file__).parent)
    model, history = train(str(folder / "undisturbed"))
    model.save(str(folder / "state"))
    model.save(str(folder / "state.safetensors"))
    model.save_weights(str(folder / "weights.safetensors"))
    state = {f"state_{number}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(model.state))}
    logs = {f"log_{name}": np.asarray(values) for name, values in history.history.items()}
    np.savez_compressed(folder / "expected.npz", predictions=model.predict(X, verbose=0), **state, **logs)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
