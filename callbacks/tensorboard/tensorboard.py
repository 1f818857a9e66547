"""The callback that writes logs, weights, the compiled step and profiles for TensorBoard.

Owns the content, the time and the names of the data; the names are Keras's. `event_file.py` and
`embedding_projector.py` own the form of the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from trainer.callbacks.base.callback import Logs, adds_logs
from trainer.callbacks.base.log_values import learning_rates, named_weights, optimizers_of, scalars
from trainer.callbacks.base.run_protocol import Run, run_detail
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.callbacks.tensorboard import embedding_projector
from trainer.callbacks.tensorboard.profiler_trace import ProfilerTrace, checked_batches
from trainer.core.arguments import as_count, as_count_or_word, as_path, require_bool
from trainer.core.errors import missing_package
from trainer.core.files.storage import as_place, is_remote
from trainer.core.types import Phase


class TensorBoard(TrainBatchCallback):
    """Writes data for TensorBoard. `tensorboard --logdir=LOG_DIR` shows them.

    There are two runs, "train" and "validation". Each epoch writes the scalars `epoch_loss` and so on, and for training
    `epoch_learning_rate`, if known, with the index of the epoch as the step. Each evaluation writes
    `evaluation_loss_vs_iterations` and so on to "validation", with the number of the optimizer's updates as the step. A
    log with several values, such as one per class, writes a scalar for each: `epoch_recall_0`, `epoch_recall_1` and so
    on.

    Another run, or a resumed run, adds to the data in `log_dir`. With several processes, the first process writes. With
    the default arguments no step waits for this callback, and fused steps stay fused.

    Args:
      log_dir: path of the directory, created if missing; or its URL in an object store, without a profile.
      histogram_freq: number of epochs between histograms of each weight, such as `Dense_0/kernel/histogram`; 0 writes
        none. The names are the paths in the tree of parameters, or of the model state.
      write_graph: whether to write the text of the compiled train step, once per `fit`, as `train_step`.
      write_images: whether to write each weight also as an image, such as `Dense_0/kernel/image`, together with the
        histograms.
      write_steps_per_second: whether to write `epoch_steps_per_second`; and `batch_steps_per_second`, the rate since
        the last such scalar of the epoch, if `update_freq` is not "epoch".
      update_freq: "epoch" to write logs after epochs only. An integer adds `batch_loss` and so on for every batch whose
        number it divides, with that number, counted from 1 in this `fit`, as the step; "batch" is 1. The integer limits
        the batches of an execution, and writing waits for the device.
      profile_batch: number of the batch to profile, counted from 1 as above, or the first and the last as a pair or as
        "first,last"; 0 profiles none. Batches are executed individually up to the end of the last batch's epoch.
      embeddings_freq: number of epochs between writes of all embedding vectors for TensorBoard's projector; 0 writes
        none. An embedding is a two-dimensional parameter with the name "embedding", as in Flax's `Embed`.
      embeddings_metadata: path, relative to `log_dir`, of a file with a line for each entry of an embedding; or a dict
        of such paths by the path of the layer, such as `Embed_0`.

    Raises:
      ImportError: if tensorboardX is not installed.
      ValueError: for invalid values; from `fit`, for unknown embeddings in `embeddings_metadata`.
      OSError: from `fit`, if a file cannot be written.

    Example:

    >>> import pathlib, tempfile, types
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> board = TensorBoard(directory)
    >>> board.set_model(types.SimpleNamespace(optimizer=None))
    >>> board.on_train_begin()
    >>> board.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.6})
    >>> board.on_train_end()
    >>> sorted(path.name for path in directory.iterdir())
    ['train', 'validation']

    Source: Keras 3's callback of this name.
    """

    state_attributes = TrainBatchCallback.counters

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: Literal["epoch", "batch"] | int = "epoch",
        profile_batch: int | Sequence[int] | str = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: str | Mapping[str, str] | None = None,
    ):
        # Imported here because the other callbacks work without tensorboardX.
        try:
            from trainer.callbacks.tensorboard.event_file import EventFile
        except ImportError as error:
            raise missing_package("TensorBoard", "tensorboardX", "tensorboard") from error
        require_bool(write_graph=write_graph, write_images=write_images, write_steps_per_second=write_steps_per_second)
        self._new_file = EventFile
        self.log_dir = self.run_folder = as_place("log_dir", log_dir, "the path of a folder")
        self.histogram_freq = as_count("histogram_freq", histogram_freq, 0)
        self.write_graph = write_graph
        self.write_images = write_images
        self.write_steps_per_second = write_steps_per_second
        freq = as_count_or_word("update_freq", update_freq, ["epoch", "batch"])
        self.update_freq: str | int = 1 if freq == "batch" else freq
        self._start_batch, self._stop_batch = _checked_profile_batch(profile_batch)
        if self._stop_batch and is_remote(self.log_dir):
            raise ValueError("`profile_batch` writes the profile of JAX, which goes to the local disk alone. Received: "
                             f"log_dir={self.log_dir!r}. Give a local `log_dir`, or `profile_batch=0`.")
        self.embeddings_freq = as_count("embeddings_freq", embeddings_freq, 0)
        if embeddings_metadata is not None and not embeddings_freq:
            raise ValueError("`embeddings_metadata` describes embeddings, but `embeddings_freq` is 0, so none are "
                             "written. Pass, for example, `embeddings_freq=1`.")
        for file in embeddings_metadata.values() if isinstance(embeddings_metadata, Mapping) else [embeddings_metadata]:
            if file is not None:
                as_path("embeddings_metadata", file, "a file, or a dict of files by embeddings")
        self.embeddings_metadata = embeddings_metadata
        self._train_dir = os.path.join(self.log_dir, "train")
        self._val_dir = os.path.join(self.log_dir, "validation")
        self._files: dict[str, Any] = {}  # EventFile by directory
        self._is_training = False
        self._trace = ProfilerTrace("TensorBoard")
        self._should_write_step = False
        self._epoch_start = self._rate_start = (0, 0.0)  # a number of batches, and its time

    # --- the hooks -------------------------------------------------------------------------------------------------

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        self._end()  # an exception may have ended the last fit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._is_training = True
        self._should_write_step = self.write_graph
        if self.embeddings_freq:
            self._embeddings_metadata(list(self._embeddings()))

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._end()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._start_from_here()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._start_from_here()

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = dict(logs or {})  # waits for the epoch's steps, and so comes before the clock is read
        train_logs = {name: value for name, value in logs.items() if not name.startswith("val_")}
        val_logs = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        if logs:
            train_logs |= learning_rates(self.model, known_only=True)
            if self.write_steps_per_second:
                train_logs["steps_per_second"] = self._rate_since(self._epoch_start)
        self._add_scalars(self._train_dir, "epoch_{}", train_logs, epoch)
        self._add_scalars(self._val_dir, "epoch_{}", val_logs, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._add_weights(epoch)
        if self.embeddings_freq and epoch % self.embeddings_freq == 0:
            self._write_embeddings()
        self.flush()

    def flush(self) -> bool:
        for file in self._files.values():
            file.flush()
        return False

    def on_test_end(self, logs: Logs | None = None) -> None:
        optimizers = optimizers_of(self.model)
        if optimizers and logs:
            iterations = max(int(optimizer.iterations) for optimizer in optimizers.values())
            self._add_scalars(self._val_dir, "evaluation_{}_vs_iterations", logs, iterations)
        if not self._is_training:
            self._end()

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        if self._should_write_step:
            self._should_write_step = False
            self._add_train_step()
        step = self._number(last)
        if isinstance(self.update_freq, int) and step % self.update_freq == 0:
            values = dict(logs or {})
            if self.write_steps_per_second:
                values["steps_per_second"] = self._rate_since(self._rate_start)
                self._rate_start = (step, time.perf_counter())
            self._add_scalars(self._train_dir, "batch_{}", values, step)

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        super().next_sync_step(phase, batch)
        if phase != "train" or not isinstance(self.update_freq, int):
            return None
        return batch + -self._number(batch) % self.update_freq

    def _start_from_here(self) -> None:
        """Starts the clocks, and calls for every batch only as long as necessary, equally in all processes."""
        begun = self._number(self._last_batch)
        self._epoch_start = self._rate_start = (begun, time.perf_counter())
        for hook in ("on_batch_begin", "on_batch_end"):
            self.__dict__.pop(hook, None)
        if begun < self._stop_batch:
            self.__dict__.update(on_batch_begin=self._before_batch, on_batch_end=self._after_batch)

    def _before_batch(self, batch: int, logs: Logs | None = None) -> None:
        if self._number(batch) == self._start_batch:
            self._trace.start(self._train_dir)
        self._trace.begin_step(self._number(batch))

    def _after_batch(self, batch: int, logs: Logs | None = None) -> None:
        self._trace.end_step()
        if self._number(batch) == self._stop_batch:
            logs = dict(logs or {})  # waits for the step, which else would outlast the trace
            self._trace.stop()

    def _rate_since(self, start: tuple[int, float]) -> float:
        batch, secs = start
        return (self._number(self._last_batch) - batch) / max(time.perf_counter() - secs, 1e-9)

    # --- writing ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._is_training = False
        self._trace.stop()
        for file in self._files.values():
            file.close()
        self._files = {}

    def _file(self, directory: str) -> Any:
        """Returns the event file of a run, created on demand; None if another process writes."""
        if jax.process_index() != 0:
            return None
        if directory not in self._files:
            self._files[directory] = self._new_file(directory)
        return self._files[directory]

    def _add_scalars(self, directory: str, tag: str, values: Mapping[str, Any], step: int) -> None:
        if jax.process_index() != 0:
            return
        for name, value in scalars(values):
            self._file(directory).add_scalar(tag.format(name), value, step)

    def _add_weights(self, epoch: int) -> None:
        weights = named_weights(self.model)
        file = self._file(self._train_dir)
        if file is None:
            return
        for name, weight in weights.items():
            file.add_histogram(f"{name}/histogram", weight, epoch)
            images = _as_images(weight) if self.write_images else None
            if images is not None:
                file.add_images(f"{name}/image", images, epoch)

    def _add_train_step(self) -> None:
        text = run_detail(self.model, "train_step_text", lambda: None)()
        file = None if text is None else self._file(self._train_dir)
        if file is not None:
            file.add_text("train_step", f"```\n{text}\n```", step=0)

    def _write_embeddings(self) -> None:
        embeddings = self._embeddings()
        if jax.process_index() == 0:
            metadata = self._embeddings_metadata(list(embeddings))
            embedding_projector.write_embeddings(self.log_dir, embeddings, metadata)

    def _embeddings_metadata(self, names: list[str]) -> dict[str, str]:
        return embedding_projector.metadata_by_embedding(names, self.embeddings_metadata)

    # --- reading the model -----------------------------------------------------------------------------------------

    def _embeddings(self) -> dict[str, np.ndarray]:
        """Returns the vectors of the embeddings by the paths of their layers."""
        return {name.rpartition("/")[0]: weight for name, weight in named_weights(self.model).items()
                if name.rpartition("/")[2] == "embedding" and weight.ndim == 2}


def _as_images(weight: np.ndarray) -> np.ndarray | None:
    """Returns a weight as images, of shape (images, height, width, channels); None if its shape fits no images."""
    image = np.squeeze(weight)
    if image.ndim == 1:
        image = image[None, :, None, None]
    elif image.ndim == 2:
        image = (image.T if image.shape[0] > image.shape[1] else image)[None, :, :, None]
    elif image.ndim == 3:
        image = image.transpose(2, 0, 1)[..., None]
    return image if image.ndim == 4 and image.shape[-1] in (1, 3, 4) and image.size else None


def _checked_profile_batch(value: object) -> tuple[int, int]:
    expected = "the number of a batch, counted from 1, a pair of the first and the last, or 0 to profile none"
    batches = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"`profile_batch` must be {expected}. Received: {value!r}.")
        batches = int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]
    if not isinstance(batches, (tuple, list)):
        batch = as_count("profile_batch", batches, 0, expected)
        return batch, batch
    return checked_batches("profile_batch", batches, expected)
