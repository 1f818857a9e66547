"""A use of each extra, by `python -m tests.support.use_of_extras onnx`, which fails if a release has broken it.

The weekly job of .github/workflows/extras.yml runs it with the newest releases that pyproject.toml allows. It needs
nothing but the extra.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

import numpy as np
from flax import linen as nn

import trainer
from trainer import callbacks
from trainer.tools.command_line import commands

X, Y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)


def _model() -> trainer.Model:
    model = trainer.Sequential([nn.Dense(3), nn.relu, nn.Dense(1)])
    model.compile("adam", "mse")
    return model


def _fit(*used: Any) -> trainer.Model:
    model = _model()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=list(used))
    return model


def cli() -> None:
    with open("described.py", "w") as script:
        script.write("import numpy as np\nfrom flax import linen as nn\n\n\n"
                     "class Network(nn.Module):\n    width: int = 3\n\n    @nn.compact\n"
                     "    def __call__(self, x):\n        return nn.Dense(1)(nn.Dense(self.width)(x))\n\n\n"
                     "def data(rows: int = 8) -> dict:\n"
                     "    return {'train': (np.ones((rows, 4)), np.ones((rows, 1)))}\n")
    sys.path.insert(0, os.getcwd())
    assert commands.main(["fit", "--model", "described.Network", "--data", "described.data", "--model.width", "2",
                          "--compile.loss", "mse", "--run", "run"]) == 0
    assert os.path.getsize("run/run.json") > 0


def grain() -> None:
    import grain as library

    model = _model()
    model.fit(library.MapDataset.source(list(zip(X, Y, strict=True))).batch(4), verbose=0)
    assert int(model.state.step) == 2


def orbax() -> None:
    _fit(callbacks.OrbaxCheckpoint(os.path.abspath("orbax")))
    assert os.listdir("orbax")


def tensorboard() -> None:
    _fit(callbacks.TensorBoard("logs", histogram_freq=1))
    assert any(name.startswith("events.out") for _, _, names in os.walk("logs") for name in names)


def plot() -> None:
    model = _fit(callbacks.RunRecord("run"))
    assert model.history.plot()._repr_png_().startswith(b"\x89PNG")
    assert os.path.getsize(trainer.report("run", model=model)) > 10_000


def mlflow() -> None:
    _fit(callbacks.LogTo(callbacks.loggers.MLflow("use", tracking_uri="sqlite:///mlflow.db")))
    assert os.path.getsize("mlflow.db") > 0


def wandb() -> None:
    _fit(callbacks.LogTo(callbacks.loggers.WandB("use", mode="offline", dir=".")))
    assert any(name.startswith("offline-run") for name in os.listdir("wandb"))


def remote() -> None:
    _fit(callbacks.ModelCheckpoint("memory://use/best.safetensors", save_weights_only=True))
    model = _model()
    model.build(X)
    model.load_weights("memory://use/best.safetensors")


def images() -> None:
    import h5py
    import safetensors.numpy

    picture = trainer.utils.array_to_img(np.full((4, 4, 3), 7.0), scale=False)
    picture.save("picture.png")
    assert trainer.utils.img_to_array(trainer.utils.load_img("picture.png")).mean() == 7.0
    with h5py.File("weights.h5", "w") as file:
        file["kernel"] = X
    _fit().save_weights("weights.safetensors")
    assert len(safetensors.numpy.load_file("weights.safetensors")) >= 4


def sklearn() -> None:
    from sklearn.model_selection import cross_val_score

    classifier = trainer.TrainerClassifier(nn.Dense(2), epochs=1, verbose=0)
    labels = np.arange(8) % 2
    assert len(cross_val_score(classifier, X, labels, cv=2)) == 2


def tensorflow() -> None:
    import tensorflow as tf

    model = _fit()
    model.export("saved", format="saved_model")
    loaded = tf.saved_model.load("saved")  # its functions refer to its variables only weakly
    served, = tf.nest.flatten(loaded.serve(X))
    np.testing.assert_allclose(np.asarray(served), model.predict(X, verbose=0), rtol=1e-5)


def onnx() -> None:
    import onnxruntime

    model = _fit()
    model.export("model.onnx", format="onnx")
    session = onnxruntime.InferenceSession("model.onnx")
    served, = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(served, model.predict(X, verbose=0), rtol=1e-5)


def ray() -> None:
    with trainer.distribute.ParameterServerStrategy(num_workers=1, num_ps=1, address="local"):
        assert int(_fit().state.step) == 2


USES = {use.__name__: use for use in (
    cli, grain, orbax, tensorboard, plot, mlflow, wandb, remote, images, sklearn, tensorflow, onnx, ray)}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        USES[sys.argv[1]]()
    print(f"{sys.argv[1]}: used")
