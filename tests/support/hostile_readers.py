"""Every reader of files of the project, as a function of a path, for `hostile_files.py`."""

from __future__ import annotations

import contextlib
import io
import pathlib
import types
import warnings
from typing import Any

import numpy as np
from flax import linen as nn

import trainer
from tests.support.hostile_contents import Contents
from trainer import datasets, models, utils
from trainer.callbacks import BackupAndRestore, CallbackList, CSVLogger
from trainer.callbacks.record import run_record
from trainer.data import audio_dataset_from_directory, image_dataset_from_directory, text_dataset_from_directory
from trainer.distribute.parameter_server.rows import stored_rows
from trainer.engine.loop import begun_run
from trainer.estimator import BestExporter
from trainer.estimator.feature_columns import vocabulary
from trainer.tools.command_line import inspection

_FOLDER_OPTIONS: dict[str, Any] = {"labels": None, "batch_size": 1, "verbose": False, "num_threads": 1}


class Head(nn.Module):
    """A layer that files of Keras and of PyTorch can name."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(x)


_made: list[trainer.Model] = []


def model() -> trainer.Model:
    """Returns the one model, which is built and compiled."""
    if not _made:
        made = trainer.Model(Head())
        made.compile("sgd", "mse")
        made.build(np.zeros((1, 3), np.float32))
        _made.append(made)
    return _made[0]


def train(folder: pathlib.Path, epochs: int = 2) -> None:
    """Trains the model for some epochs, after those of the checkpoints in a folder."""
    model().fit(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32), batch_size=4, epochs=epochs, verbose=0,
                callbacks=[BackupAndRestore(folder, delete_checkpoint=False)])


def _inspect(path: pathlib.Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = inspection.run(str(path), False)
    if code:
        raise ValueError(printed.getvalue())
    print(printed.getvalue(), end="")


def _extract(path: pathlib.Path) -> None:
    cache = path.parent / "cache"
    cache.mkdir()
    utils.get_file("unpacked", path, extract=True, cache_dir=cache)


def _append_to_csv(path: pathlib.Path) -> None:
    callback = CSVLogger(path, append=True)
    callback.set_model(model())
    callback.on_train_begin()
    try:
        callback.on_epoch_end(0, {"loss": 0.5})
    finally:
        callback.on_train_end()


def _compare_with_best(path: pathlib.Path) -> None:
    exporter = BestExporter("best", lambda: None)
    stand_in: Any = types.SimpleNamespace(export_saved_model=lambda *args, **kwargs: "")
    exporter.export(stand_in, str(path.parent), "", {"loss": 1.0}, False)


def _restore_rows(path: pathlib.Path) -> None:
    arrays = {"rows": np.zeros((4, 2), np.float32)}
    shard: Any = types.SimpleNamespace(arrays=lambda: arrays)
    stored_rows.restore(shard, str(path.parent), "table", (4, 2), 0, 1)


def _extend_vocabulary(path: pathlib.Path) -> None:
    column = vocabulary.categorical_column_with_vocabulary_file("word", str(path), vocabulary_size=3)
    column.ids_of_words()


def _quietly(read: Any) -> Any:
    def reading(path: pathlib.Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)
    return reading


READERS: dict[str, Any] = {
    "weights": lambda path: model().load_weights(path),
    "state": lambda path: trainer.load(path, model()),
    "export": trainer.load_exported,
    "inspect": _inspect,
    "report": _quietly(trainer.report),
    "keras": lambda path: models.load_keras_weights(model(), path),
    "torch": lambda path: models.load_torch_weights(model(), path),
    "npz": datasets.mnist.load_data,
    "objects": datasets.imdb.load_data,
    "idx": lambda path: datasets.fashion_mnist.load_data(path.parent),
    "cifar": lambda path: datasets.cifar10.load_data(path.parent),
    "words": datasets.imdb.get_word_index,
    "archive": _extract,
    "image": _quietly(utils.load_img),
    "images": _quietly(lambda path: list(image_dataset_from_directory(
        path.parent, image_size=(8, 8), max_pixels=10_000_000, **_FOLDER_OPTIONS))),
    "sounds": _quietly(lambda path: list(audio_dataset_from_directory(
        path.parent, output_sequence_length=8, **_FOLDER_OPTIONS))),
    "texts": lambda path: list(text_dataset_from_directory(
        path.parent, lambda text: [len(text)], **_FOLDER_OPTIONS)),
    "csv": _quietly(_append_to_csv),
    "begun": lambda path: begun_run.begin(str(path.parent), CallbackList([])),
    "best": _compare_with_best,
    "rows": _restore_rows,
    "vocabulary": lambda path: _extend_vocabulary(path),
    "checkpoint": lambda path: trainer.load(path, model()),
    "inspected folder": _inspect,
    "run": _quietly(train),
    "earlier": lambda path: run_record._earlier(str(path)),
}
FOLDERS = ("checkpoint", "inspected folder", "run")
TAKE_ANY_BYTES = ("texts", "csv", "vocabulary", "earlier")  # of which any bytes are lines, or nothing


def warm_up(contents: Contents) -> None:
    """Reads a good file with each reader, so that all modules are imported and all programs are compiled."""
    for reader, read in READERS.items():
        read(contents.good(reader))
