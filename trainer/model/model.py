"""Model and Sequential: the façade that users see, in Keras's words.

Owns the arguments of `fit`, `evaluate`, `predict` and their relatives. What is trained is in `compiled_model.py`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from trainer.callbacks import CallbackList, History
from trainer.core import errors
from trainer.core.timing import Timing
from trainer.data import Reader, Source, adapt, pack_x_y_sample_weight, split_validation, unpack_x_y_sample_weight
from trainer.data.sharding.processes import Processes
from trainer.data.sources.arrays import is_array_tree, is_leaf
from trainer.data.sources.batches import as_batch
from trainer.distribute.placement.placement import to_host
from trainer.loop import loop
from trainer.model.model_files import ModelFiles
from trainer.modules import render_summary
from trainer.step import output_checks
from trainer.step.compiled_phase import MAX_FUSED_STEPS
from trainer.step.output_matching import collect


class Model(ModelFiles):
    """Trains, evaluates and predicts with a Flax module, on the devices of the strategy in scope.

    Args:
      module: a Linen module, an NNX module, or a dict of named modules.
      seed: what the initial weights, shuffling, dropout and all other random streams derive from.
      name: a name for messages and tables; by default the module's.

    Attributes:
      strategy: the strategy in whose scope the model was made.
      stop_training: set to True, in a callback for example, to end `fit` after the batch that is running.
      stop_evaluating: the same for `evaluate`.
      stop_predicting: the same for `predict`.
      history: the `History` of the last `fit`.

    Raises:
      TypeError: if `module` is not a Flax module.

    Example:
      >>> import numpy as np
      >>> from flax import linen as nn
      >>> model = Model(nn.Dense(1))
      >>> model.compile("sgd", "mse")
      >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
      >>> sorted(model.evaluate(np.ones((8, 2)), np.ones((8, 1)), verbose=0))
      ['loss']
    """

    history: History | None = None

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> History:
        """Trains the model.

        Args:
          x: inputs: an array, or a tuple or dict of arrays, rows first; or a `trainer.data.Dataset`, a generator, a
            Grain dataset, or any other iterable of batches `(x, y)` or `(x, y, sample_weight)`. Whether `fit` sees what
            a callback writes into the arrays is not defined: they may be on the devices already.
          y: targets, if `x` is arrays.
          batch_size: rows of a batch over all replicas, if `x` is arrays; by default as many as make `steps_per_epoch`
            batches, or 32. The last batch of an epoch may be smaller, and counts for what it is.
          epochs: the number after that of the last epoch.
          verbose: 0 prints nothing, 1 shows a progress bar (in a terminal; elsewhere a line per epoch), 2 prints a line
            per epoch, "auto" is 1.
          callbacks: callbacks, or a list of them.
          validation_split: the fraction of the arrays, taken from their end before shuffling, to validate on.
          validation_data: `(x, y)`, `(x, y, sample_weight)`, or an iterable of batches, to validate on.
          shuffle: whether arrays are read in another order in each epoch, a function of the seed and the epoch. A loop
            over `fit` that means other epochs says so: `fit(..., initial_epoch=epoch, epochs=epoch + 1)`.
          class_weight: weights of rows by their label.
          sample_weight: weights of rows, if `x` is arrays.
          initial_epoch: the number of the first epoch.
          steps_per_epoch: batches of an epoch; without it, all that `x` has. With it, epochs follow each other in one
            stream of batches, of which other data than arrays and generators are read up to `initial_epoch`.
          validation_steps: batches of a validation; without it, all there are. Each validation starts from the first
            batch, except that a generator continues where the last one stopped.
          validation_batch_size: like `batch_size`, for validation; by default `batch_size`.
          validation_freq: validate every so many epochs, or after the epochs listed, counted from 1.

        Returns:
          The `History`, whose `history` has a list of floats per log.

        Raises:
          RuntimeError: if the model is not compiled, or the data pipeline fails; the batch is named.
          ValueError: for data and arguments that cannot be used, before the train step compiles.
          TypeError: for arguments of a wrong type.
        """
        self._require_compiled("fit")
        output_checks.check_count("epochs", epochs, 0)
        output_checks.check_count("initial_epoch", initial_epoch, 0)
        output_checks.check_count("steps_per_epoch", steps_per_epoch, 1, optional=True)
        output_checks.check_count("validation_steps", validation_steps, 1, optional=True)
        output_checks.check_count("validation_batch_size", validation_batch_size, 1, optional=True)
        output_checks.check_validation_freq(validation_freq)
        if validation_split:
            if validation_data is not None:
                raise ValueError("`validation_split` and `validation_data` cannot be used together.")
            (x, y, sample_weight), validation_data = split_validation((x, y, sample_weight), validation_split)
        loop.agree_on_data(self, "fit", x=x, validation_data=validation_data)
        with contextlib.ExitStack() as readers:
            reader = readers.enter_context(Reader(
                adapt(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=self._seed,
                      class_weight=class_weight, steps=steps_per_epoch, processes=self.strategy.processes),
                steps_per_epoch,
                first_epoch=initial_epoch))
            validation = None
            if validation_data is not None:
                source = _adapt_validation(validation_data, validation_batch_size or batch_size, validation_steps,
                                           self.strategy.processes)
                output_checks.check_holds_steps(source, "validation_steps", validation_steps)
                validation = readers.enter_context(Reader(source, validation_steps))
            callback_list = self._callback_list(callbacks, verbose, epochs=epochs, steps=reader.num_batches)
            history = next(callback for callback in callback_list.callbacks if isinstance(callback, History))
            timing = Timing()
            try:
                loop.fit(self, reader, callback_list, epochs, initial_epoch, validation, validation_freq, timing)
            finally:
                self.shows_averages = False
                self._absorb()
                history.timing = timing.report()
                self.history = history  # a callback may have called `fit` too
        return history

    def compile_ahead(
        self,
        sample: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        phases: Sequence[str] = ("train",),
        steps_per_epoch: int | None = None,
    ) -> float:
        """Compiles the steps of a later `fit`, `evaluate` or `predict`, which then start at once; builds the model.

        Of arrays and `Dataset`s that includes a shorter last batch; of other data, one compiles when it comes.

        Args:
          sample: the data that will be given: a batched `Dataset` or another iterable of batches that can be iterated
            anew, or `(x, y)` or `(x, y, sample_weight)` of arrays; of `predict`, also `x` alone, unless it is a tuple.
          batch_size: rows of a batch, if `sample` is all rows of arrays; without it, the arrays are one batch.
          epochs: how often the data will be read, such as the epochs of `fit`. What is read more than once may be kept
            on the devices, for which steps compile differently; see `data_on_device` of `compile`. `predict`, and
            `evaluate` outside of `fit`, read data once. None compiles for both.
          phases: which steps: "train", "test" and "predict".
          steps_per_epoch: as it will be given to `fit`, or as `validation_steps` or `steps`: an epoch of few batches
            compiles differently. Of a batch that stands for data with a length, that length.

        Returns:
          The seconds that it took.

        Raises:
          As `fit` does; and ValueError for an unknown phase or data that can be read only once.

        Example:
          >>> model.compile_ahead((x, y), batch_size=64)  # doctest: +SKIP
        """
        output_checks.check_count("epochs", epochs, 1, optional=True)
        output_checks.check_count("steps_per_epoch", steps_per_epoch, 1, optional=True)
        phases = (phases,) if isinstance(phases, str) else phases
        if not isinstance(phases, (tuple, list)):
            raise errors.wrong_type("phases", phases, "a list of phases, such as ['train', 'test']")
        for kind in phases:
            if kind not in ("train", "test", "predict"):
                raise errors.unknown_name("phase", str(kind), ("train", "test", "predict"))
            if kind != "predict":
                self._require_compiled("compile_ahead")
        if isinstance(sample, (tuple, list)) and not sample:
            raise ValueError("`sample` is empty. Pass `(x, y)`, or a dataset.")
        parts = _array_parts(sample) or (sample,)
        is_sample = batch_size is None and is_array_tree(parts[0])
        if is_sample:
            batch_size = _rows(parts[0])
        begin = time.perf_counter()
        loop.agree_on_data(self, "compile_ahead", sample=sample)
        for kind in phases:
            # Of arrays, `predict` is given the inputs alone.
            source = adapt(*(parts[:1] if kind == "predict" else parts), batch_size=batch_size,
                           processes=self.strategy.processes)
            if source.is_one_shot:
                raise ValueError("`sample` must be data that can be read anew. Received: a generator, whose first "
                                 "batches `fit` would miss. Pass a batch of it.")
            # Of endless data any number of steps will do that fills a group, and a batch stands for so many.
            many = MAX_FUSED_STEPS if source.num_batches == math.inf or is_sample else None
            with Reader(source, steps_per_epoch or many) as reader:
                once = is_sample or kind == "predict"
                for passes in (1,) if once else (1, 2) if epochs is None else (epochs,):
                    loop.compile_ahead(self, kind, reader, passes, is_sample)
        self._require_built()
        return time.perf_counter() - begin

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the loss and the metrics over all rows of the data, exactly.

        Args:
          x: inputs, as in `fit`.
          y: targets, if `x` is arrays.
          batch_size: rows of a batch, if `x` is arrays; 32 by default.
          verbose: as in `fit`.
          sample_weight: weights of rows, if `x` is arrays.
          steps: how many batches to evaluate; by default all.
          callbacks: callbacks, or a list of them.
          return_dict: False returns Keras's list, or the loss alone if there are no metrics.

        Raises:
          As `fit` does.
        """
        self._require_compiled("evaluate")
        output_checks.check_count("steps", steps, 1, optional=True)
        loop.agree_on_data(self, "evaluate", x=x)
        source = adapt(x, y, sample_weight, batch_size=batch_size, steps=steps, processes=self.strategy.processes)
        output_checks.check_holds_steps(source, "steps", steps)
        with Reader(source, steps) as reader:
            callback_list = self._callback_list(callbacks, verbose, history=False, epochs=1, steps=reader.num_batches)
            logs = loop.evaluate(self, reader, callback_list)
        return logs if return_dict else _as_list(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs for all rows as numpy arrays, in input order.

        Outputs move to the host as they are made, so the device needs memory for few batches only.

        Args:
          x: inputs, as in `fit`; targets in batches are ignored.
          batch_size: rows of a batch, if `x` is arrays; 32 by default.
          verbose: as in `fit`.
          steps: how many batches to predict; by default all.
          callbacks: callbacks, or a list of them.

        Raises:
          As `fit` does, but the model need not be compiled.
        """
        with self._predict_reader(x, batch_size, steps) as (reader, rows):
            callback_list = self._callback_list(callbacks, verbose, history=False, epochs=1, steps=reader.num_batches)
            return collect(loop.predict(self, reader, callback_list), rows)

    def predict_iter(self, x: Any, batch_size: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """Yields the outputs of `predict` batch by batch, for results that do not fit into memory at once."""
        with self._predict_reader(x, batch_size, steps) as (reader, _):
            yield from loop.predict(self, reader, CallbackList(model=self))

    @contextlib.contextmanager
    def _predict_reader(self, x: Any, batch_size: int | None, steps: int | None) -> Iterator[tuple[Reader, int | None]]:
        output_checks.check_count("steps", steps, 1, optional=True)
        loop.agree_on_data(self, "predict", x=x)
        source = adapt(x, batch_size=batch_size, steps=steps, processes=self.strategy.processes)
        output_checks.check_holds_steps(source, "steps", steps)
        with Reader(source, steps) as reader:
            yield reader, source.rows if steps is None else None

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one batch; returns its logs, in Keras's list or as a dict."""
        return self._on_batch("train", x, y, sample_weight, class_weight, return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Evaluates one batch; returns its logs, in Keras's list or as a dict."""
        return self._on_batch("test", x, y, sample_weight, None, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for one batch as numpy arrays."""
        return self.predict(x, batch_size=_rows(x), verbose=0)

    def _on_batch(self, kind: str, x: Any, y: Any, sample_weight: Any, class_weight: Any, return_dict: bool) -> Any:
        self._require_compiled(f"{kind}_on_batch")
        source = adapt(x, y, sample_weight, batch_size=_rows(x), class_weight=class_weight,
                       processes=self.strategy.processes)
        with Reader(source, 1) as reader:
            logs = loop.run_on_batch(self, kind, reader)
        return logs if return_dict else _as_list(logs)

    def __call__(self, x: Any, training: bool = False) -> Any:
        """Returns the module's outputs for `x`, computed at once, operation by operation and as one batch.

        Builds the model, if it is not. `training=True` lets dropout drop; running averages are not kept.
        """
        if not self.built:
            self.build(x)
        state = self.strategy.on_devices(self.current_state)
        inputs = unpack_x_y_sample_weight(as_batch(pack_x_y_sample_weight(x)))[0]
        return self.apply(state.params, state, inputs, training=training)[0]

    def summary(self, print_fn: Callable[[str], Any] = print) -> None:
        """Prints a table of the layers, their output shapes and weights.

        Args:
          print_fn: called with each line.

        Raises:
          RuntimeError: if the model is not built.
        """
        state = self._require_built()
        trained = state.params if state.optimizer is None else state.trainable(state.params)
        trees = (state.params, state.model_state, trained)
        params, others, trainable = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in trees)
        rows = self._functional.summary_rows(self._sample_spec)
        for line in render_summary(rows, self.name, params + others, trainable if self.trainable else 0,
                                   others):
            print_fn(line)

    def _absorb(self) -> None:
        """Gives an NNX user's own object the trained weights, as a loop of one's own would leave it."""
        if self.built and any(self._functional.variable_identities()):
            # One device's copy: the user's eager calls run on one device.
            state = self.strategy.on_devices(self.current_state)
            params, model_state = jax.tree.map(
                lambda leaf: leaf.addressable_data(0) if leaf.is_fully_replicated else to_host(leaf),
                (state.params, state.model_state))
            self._functional.absorb(params, model_state)

    def _require_compiled(self, method: str) -> None:
        if not self._is_compiled:
            raise RuntimeError(f"Call `compile(optimizer, loss)` before `{method}`.")

    def _callback_list(self, callbacks: Any, verbose: Any, history: bool = True, **params: Any) -> CallbackList:
        verbose = output_checks.check_verbose(verbose)
        if isinstance(callbacks, CallbackList):
            callbacks = callbacks.callbacks
        return CallbackList(
            callbacks, add_history=history, add_progbar=verbose != 0, model=self, verbose=verbose, **params)


class Sequential(Model):
    """A model of layers applied one after another.

    Args:
      layers: Flax layers and functions, such as `[nn.Dense(16), nn.relu, nn.Dense(10)]`.
      seed: as in `Model`.
      name: as in `Model`.

    Attributes:
      layers: the layers as they were given.

    Raises:
      TypeError: if a layer is neither a Flax module nor a function.
    """

    def __init__(self, layers: Sequence[Any], *, seed: int = 0, name: str | None = None):
        if not isinstance(layers, (list, tuple)):
            raise errors.wrong_type("layers", layers, "a list of Flax layers and functions")
        super().__init__(list(layers), seed=seed, name=name or "sequential")
        self.layers = list(layers)


def _adapt_validation(
    data: Any, batch_size: int | None, steps: int | None, processes: Processes
) -> Source:
    try:
        parts = _array_parts(data)
        return (adapt(data, processes=processes) if parts is None
                else adapt(*parts, batch_size=batch_size, steps=steps, processes=processes))
    except ValueError as error:
        raise ValueError(f"`validation_data` must be `(x, y)`, `(x, y, sample_weight)` or an iterable of batches. "
                         f"{error}") from error


def _array_parts(data: Any) -> Sequence[Any] | None:
    """Returns data that are a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays; None for other data."""
    if not isinstance(data, (tuple, list)) or not data or not is_array_tree(data[0]):
        return None
    unpack_x_y_sample_weight(data)  # Refuses other numbers of parts.
    return data


def _rows(x: Any) -> int:
    if not is_array_tree(x):
        raise errors.wrong_type("x", x, "one batch: an array, or a tuple or dict of arrays")
    first = jax.tree.leaves(x, is_leaf=is_leaf)[0]
    return max(len(first), 1) if np.ndim(first) else 1


def _as_list(logs: dict[str, Any]) -> Any:
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
