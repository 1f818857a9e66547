
import os, sys, json, numpy as np, optax, trainer
from flax import linen as nn
from trainer import callbacks as cb
rng = np.random.default_rng(0)
x = rng.normal(size=(500, 6)).astype(np.float32)
y = (x @ rng.normal(size=(6, 3))).argmax(-1)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.relu(nn.Dense(32)(x))
        x = nn.BatchNorm(use_running_average=not training)(x)
        x = nn.Dropout(0.3, deterministic=not training)(x)
        return nn.Dense(3)(x)

class Dies(cb.Callback):
    def __init__(self, at): self.at, self.seen = at, 0
    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), 9)

die, directory = int(sys.argv[1]), sys.argv[2]
model = trainer.Model(Net(), seed=5)
model.compile(optimizer="adam", loss=trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
plateau = cb.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.5)
stopper = cb.EarlyStopping(monitor="val_loss", patience=50)
callbacks = [cb.BackupAndRestore(directory, save_freq=7), plateau, stopper]
callbacks.append(Dies(die) if die else cb.LambdaCallback(on_train_batch_end=lambda batch, logs: None))
history = model.fit(x, y, batch_size=32, epochs=6, validation_split=0.2, callbacks=callbacks, verbose=0)
np.savez("out.npz", lr=float(model.optimizer.learning_rate), best=stopper.best,
         **{f"w{i}": v for i, v in enumerate(model.get_weights())}, **history.history)
