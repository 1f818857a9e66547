"""A training on a stream with a position, for tests that kill it: `python stream_training.py KIND`.

Kinds: "loader", like torchdata's; "joined", such a loader in each process; "torchdata"; "hugging face"; "shuffled",
with a buffer.
"""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import numpy as np
from flax import linen as nn

import trainer
from tests.support.streams import LikeLoader
from trainer import callbacks

KIND = sys.argv[1]
EPOCHS, BATCHES = 2, 8
x = np.random.default_rng(0).normal(size=(BATCHES * 4, 3)).astype(np.float32)
strategy = (trainer.distribute.MultiWorkerMirroredStrategy() if KIND == "joined"
            else trainer.distribute.OneDeviceStrategy())


class Loader(LikeLoader):
    def batch(self, number):
        rows = x[number * 4:number * 4 + 4]
        return rows, rows.sum(1, keepdims=True)


also = []
if KIND in ("loader", "joined"):
    data = Loader(BATCHES, seed=jax.process_index() if KIND == "joined" else 0)
    if KIND == "joined":
        data = trainer.data.with_options(data, trainer.data.AutoShardPolicy.OFF)
elif KIND == "torchdata":
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = StatefulDataLoader(
        torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, x.sum(1, keepdims=True)))), 4, shuffle=True,
        generator=torch.Generator().manual_seed(5))
else:
    import datasets

    rows = datasets.Dataset.from_dict({"x": x, "y": x.sum(1, keepdims=True)}).to_iterable_dataset(num_shards=2)
    if KIND == "shuffled":
        rows = rows.shuffle(seed=3, buffer_size=10)
        also.append(callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: rows_in_batches.set_epoch(epoch)))
    rows_in_batches = rows.batch(4)
    data = trainer.data.batches_from_columns(rows_in_batches, x="x", y="y")

with strategy.scope():
    model = trainer.Sequential([nn.Dense(4), nn.Dropout(0.2), nn.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=1 if KIND == "joined" else 3)
history = model.fit(data, epochs=EPOCHS, verbose=2, callbacks=[
    *also, callbacks.BackupAndRestore("backup", 2), trainer.testing.kill_at()])
if strategy.is_chief:
    np.savez("result.npz", *model.get_weights(), **history.history)
