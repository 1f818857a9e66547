"""A training to be killed: `python crash_training.py MODULE DATA REPLICAS STEPS_PER_EXECUTION [SAVE_FREQ]`.

REPLICAS is a number of devices, or as "2x1" that of processes and of devices of each: then this is one process of a job
of `trainer.launch`. The chief writes the weights, the optimizer's state, the history and the state of the callbacks to
`result.npz`.
"""

import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import trainer
from trainer import callbacks

module_kind, data_kind, replicas, steps_per_execution = sys.argv[1:5]
save_freq = sys.argv[5] if len(sys.argv) > 5 else "5"
processes, _, devices = replicas.rpartition("x")
# JAX reads this when the devices are first used.
os.environ["XLA_FLAGS"] = (f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices} "
                           "--xla_backend_optimization_level=0")
jax.config.update("jax_platforms", "cpu")

ROWS, BATCH_SIZE, EPOCHS = 150, 12, 3  # a last batch of 6 rows, which do not divide by 4 replicas
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 6)).astype(np.float32)
y = (x @ rng.normal(size=(6, 3))).argmax(-1).astype(np.int32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.BatchNorm(use_running_average=not training)(x)
        x = nn.Dropout(0.3, deterministic=not training)(x)
        return nn.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(self.norm(nnx.relu(self.up(x)))))


class CustomStep(trainer.Model):
    """Mixes rows at random, and clips gradients by their norm."""

    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)
        other = jax.random.permutation(self.make_rng(state, "mixup"), len(x))
        mixed = 0.7 * x + 0.3 * x[other]

        def loss_fn(params):
            y_pred, model_state = self.apply(params, state, mixed, training=True)
            loss = 0.7 * self.compute_loss(x, y, y_pred, None) + 0.3 * self.compute_loss(x, y[other], y_pred, None)
            return loss, (y_pred, model_state)

        (loss, (y_pred, model_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, 0.3 / (norm + 1e-6)), grads)
        logs = {"loss": loss, "norm": norm, **self.compute_metrics(x, y, y_pred, None)}
        return logs, state.apply_gradients(grads, model_state=model_state)


def grain_batches():
    import grain

    rows = grain.MapDataset.range(ROWS).shuffle(seed=3).map(lambda row: (x[row], y[row]))
    return rows.batch(BATCH_SIZE).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))


def image_batches():
    from PIL import Image

    folder = pathlib.Path("photos")
    for row, label in enumerate(y):
        path = folder / f"class {label}" / f"{row}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.default_rng(row).integers(0, 256, (8, 12, 3), np.uint8)).save(path)
    images = trainer.data.image_dataset_from_directory(
        folder, image_size=(1, 2), batch_size=None, seed=3, verbose=False)
    for augmentation in (trainer.data.augmentation.RandomFlip(), trainer.data.augmentation.RandomContrast(0.3)):
        images = images.random_map(augmentation)
    return images.map(lambda images, labels: (images.reshape(6) / np.float32(255), labels)).batch(BATCH_SIZE)


def generated_batches():
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(ROWS)
        for start in range(0, ROWS, BATCH_SIZE):
            rows = order[start:start + BATCH_SIZE]
            yield x[rows], y[rows]


data = {"arrays": lambda: {"x": x, "y": y, "batch_size": BATCH_SIZE},
        "grain": lambda: {"x": grain_batches()},
        "images": lambda: {"x": image_batches()},
        "generator": lambda: {"x": generated_batches(), "steps_per_epoch": -(-ROWS // BATCH_SIZE)}}[data_kind]()
strategy = (trainer.distribute.MultiWorkerMirroredStrategy() if processes else
            trainer.distribute.MirroredStrategy() if int(devices) > 1 else trainer.distribute.OneDeviceStrategy())
assert strategy.num_replicas_in_sync == int(processes or 1) * int(devices)
with strategy.scope():
    make = CustomStep if module_kind == "custom" else trainer.Model
    model = make(Nnx(nnx.Rngs(0)) if module_kind == "nnx" else Linen(), seed=5)
    model.compile(trainer.optimizers.Adam(0.01), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"], ema_decay=0.9,
                  steps_per_execution="auto" if steps_per_execution == "auto" else int(steps_per_execution))


class Pause(callbacks.Callback):
    def on_execution_end(self, phase, batch, logs=None):
        # Where there are several processes, JAX looks for SIGTERM once a second only.
        time.sleep(0.25 if processes and os.environ.get("TRAINER_KILL_SIGNAL") == "15" else 0.0)


plateau = callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=0.5)
stopping = callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
history = model.fit(
    **data, epochs=EPOCHS, validation_data=(x[:40], y[:40]), verbose=0,
    callbacks=[callbacks.BackupAndRestore("backup", "epoch" if save_freq == "epoch" else int(save_freq)), plateau,
               stopping, callbacks.CSVLogger("log.csv"), trainer.testing.kill_at(), Pause()])

if jax.process_index() == 0:
    arrays = {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
    arrays |= {f"state {number}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(model.state))}
    arrays |= {f"history {name}": np.asarray(values) for name, values in history.history.items()}
    arrays |= {f"best weight {number}": weight for number, weight in enumerate(stopping.best_weights)}
    arrays |= {"callbacks": np.asarray([
                   plateau.best, plateau.wait, plateau.cooldown_counter, stopping.best, stopping.wait,
                   stopping.best_epoch, float(model.optimizer.learning_rate)]),
               "epochs": np.asarray(history.epoch),
               "log.csv": np.frombuffer(pathlib.Path("log.csv").read_bytes(), np.uint8)}
    np.savez("result.npz", **arrays)
