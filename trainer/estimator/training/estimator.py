"""Estimator: trains, evaluates, predicts and exports a `model_fn`, with a folder of checkpoints.

Owns only the public class. A call of `train` is a `fit` of a `Model`. Each other call restores a checkpoint into a
separate model.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.core import arguments, errors
from trainer.core.calls.entry_points import foreign_arguments
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.foreign_names import ForeignNames
from trainer.core.types import ArrayLike, PyTree
from trainer.distribute import Strategy
from trainer.engine.saving.checkpoint import Checkpoint
from trainer.estimator.training import checkpoints, evaluation_record, foreign_names, serving
from trainer.estimator.training.estimator_model import EstimatorModel, make_model
from trainer.estimator.training.events import LOGGER, TrainingLog, write_evaluation
from trainer.estimator.training.functions import (
    InputFn,
    call_input_fn,
    call_model_fn,
    check_input_fn,
    check_model_fn,
    check_receiver,
    check_steps,
)
from trainer.estimator.training.hooks import (
    CheckpointSaverListener,
    ScheduledSaveListener,
    as_callbacks,
    check_listeners,
)
from trainer.estimator.training.input_function import InputBatches, mapped_batch
from trainer.estimator.training.run_config import RunConfig
from trainer.estimator.training.spec import EstimatorSpec, Mode, ModeKeys, ModelFn
from trainer.estimator.training.warm_start import WarmStartSettings, as_settings, warm_start

Hooks = Any
"""A `SessionRunHook`, a callback, or a list of these."""


@foreign_arguments(foreign_names.CONSTRUCTORS)
class Estimator(ForeignNames):
    """Trains the model of a `model_fn` and keeps checkpoints in a folder.

    It follows TensorFlow's conventions. `input_fn` returns the batch of *one* replica, so a step of N replicas reads N
    batches (`Model.fit` splits a global batch instead). The data start over with each call of `train`. `evaluate` and
    `predict` read the newest checkpoint. An interrupted call of `train`, even after `kill -9`, resumes exactly when the
    same script starts again.

    Args:
      model_fn: function `(features, labels, mode, params, config)` that returns an `EstimatorSpec`. All arguments
        except `features` are optional. It receives the first batch of the input, as NumPy arrays.
      model_dir: folder of the checkpoints; by default the folder in `config`, or a new temporary folder.
      config: a `RunConfig`.
      params: dict to pass to `model_fn` and `input_fn` as `params`, copied; empty by default.
      warm_start_from: folder of another training with the initial weights, or `WarmStartSettings`.

    Attributes:
      model_dir: folder of the checkpoints.
      config: the `RunConfig`, with its `model_dir` set.

    Raises:
      ValueError: if `model_fn` has unknown arguments, or `model_dir` and `config` name different folders.
      TypeError: if an argument has the wrong type.

    Example:
      >>> import trainer
      >>> from flax import linen as nn
      >>> def model_fn(features, labels, mode):
      ...     return EstimatorSpec(mode, module=nn.Dense(1), loss="mse", optimizer="sgd")
      >>> data = trainer.data.Dataset.from_arrays((np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)))
      >>> estimator = Estimator(model_fn, model_dir="run").train(lambda: data.batch(4), steps=2)
      >>> estimator.evaluate(lambda: data.batch(4))["global_step"]
      2

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/Estimator
    """

    _foreign_names = foreign_names.METHODS

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            foreign_arguments(foreign_names.CONSTRUCTORS)(cls)

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ):
        if config is not None and not isinstance(config, RunConfig):
            raise errors.wrong_type("config", config, "a `RunConfig`")
        if params is not None and not isinstance(params, Mapping):
            raise errors.wrong_type("params", params, "a dict")
        self._params = copy.deepcopy({} if params is None else params)
        self._model_fn = check_model_fn(model_fn, params)
        self.config = _with_model_dir(config or RunConfig(), model_dir)
        assert self.config.model_dir is not None, "it was chosen above"
        self.model_dir = self.config.model_dir
        self._warm_start = as_settings(warm_start_from)
        self._models: dict[Any, tuple[EstimatorSpec, EstimatorModel]] = {}
        self._exports_before: dict[str, int] = {}

    @property
    def params(self) -> Any:
        """A copy of the `params` argument."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> ModelFn:
        """The `model_fn` argument."""
        return self._model_fn

    # --- training ----------------------------------------------------------------------------------------------------

    @foreign_arguments(foreign_names.CALLS)
    def train(
        self,
        input_fn: InputFn,
        hooks: Hooks = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Estimator:
        """Trains from the newest checkpoint, or from initial weights, and saves checkpoints.

        Args:
          input_fn: function `(mode, params, config)`, with all arguments optional, that returns the data: a
            `trainer.data.Dataset` of batches `(features, labels)` of one replica, another iterable of such batches, or
            arrays `(features, labels)`, which repeat as the same batch forever. It is called once.
          hooks: `SessionRunHook`s, callbacks of `trainer.callbacks`, or a list of both.
          steps: number of additional steps to train.
          max_steps: global step to train to. If it is already reached, nothing is called. Without `steps` and
            `max_steps`, the training ends with the data, or when a hook stops it.
          saving_listeners: listeners to call around each checkpoint.

        Returns:
          The estimator.

        Raises:
          ValueError: if both `steps` and `max_steps` are given or either is less than 1, or if the data, the spec or an
            argument is invalid.
          TypeError: if a hook has the wrong type.
        """
        check_input_fn(input_fn)
        callbacks = as_callbacks("hooks", hooks)
        listeners = check_listeners(saving_listeners)
        if steps is not None and max_steps is not None:
            raise ValueError(f"Can not provide both steps and max_steps. Received: {steps} and {max_steps}.")
        check_steps(steps=steps, max_steps=max_steps)
        last = checkpoints.newest(self.model_dir)
        begin = 0 if last is None else checkpoints.step_of(last)
        if max_steps is not None and begin >= max_steps:
            LOGGER.info("Skipping training since max_steps has already saved: %r is at step %s, and max_steps is %s. "
                        "Give a larger `max_steps`, or `steps`, the number of further steps.", self.model_dir, begin,
                        max_steps)
            return self
        batches = self._input(input_fn, ModeKeys.TRAIN)
        spec, model = self._model(ModeKeys.TRAIN, batches, is_new=last is None)
        if last is None:
            self._begin(ModeKeys.TRAIN, model)
        if not any(isinstance(listener, ScheduledSaveListener) for listener in listeners):
            evaluation_record.forget(self.model_dir)
        has_ended = last is not None and checkpoints.is_of_an_ended_call(last)
        saver = checkpoints.CheckpointSaver(
            self.model_dir, self.config.save_freq, self.config.keep_checkpoint_max, listeners, has_ended)
        log = TrainingLog(self.model_dir, self.config.log_step_count_steps, self.config.save_summary_steps,
                          jax.process_index() == 0)
        if steps is not None:
            max_steps = begin + steps
        of_chief = as_callbacks("training_chief_hooks", spec.training_chief_hooks)
        for callback in of_chief:
            callback.runs_on = "chief"
        model.fit(
            batches.per_step(model.strategy.num_replicas_in_sync, spec.batch_map), verbose=0,
            max_steps=sys.maxsize if max_steps is None else max_steps,  # a hook may end endless data
            callbacks=[saver, log, *callbacks, *as_callbacks("training_hooks", spec.training_hooks), *of_chief])
        return self

    # --- evaluating --------------------------------------------------------------------------------------------------

    @foreign_arguments(foreign_names.EVALUATE)
    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Hooks = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Returns the metrics over the data, and writes them for TensorBoard to the folder "eval".

        Each row counts once, on any number of devices.

        Args:
          input_fn: as in `train`.
          steps: maximum number of steps, each with one batch of `input_fn` per replica; all data by default.
          hooks: as in `train`.
          checkpoint_path: checkpoint to evaluate; the newest by default. Without a checkpoint, the weights are freshly
            initialized, with a warning.
          name: suffix of the folder: "eval_<name>".

        Returns:
          A dict of the metrics by name, "loss", the mean loss over the batches of `input_fn`, and "global_step".

        Raises:
          ValueError: if `steps` is less than 1, or the checkpoint is from another module.
        """
        check_input_fn(input_fn)
        check_steps(steps=steps)
        callbacks = as_callbacks("hooks", hooks)
        if name is not None:
            arguments.require_text(name=name)
        batches = self._input(input_fn, ModeKeys.EVAL)
        spec, model, step = self._restored(ModeKeys.EVAL, batches, checkpoint_path)
        # Replicas share each batch, so that the batch loss equals the loss on a single device.
        limit = None if steps is None else steps * model.strategy.num_replicas_in_sync
        logs = model.evaluate(
            batches.per_step(1, spec.batch_map, limit), verbose=0,
            callbacks=[*callbacks, *as_callbacks("evaluation_hooks", spec.evaluation_hooks)])
        if jax.process_index() == 0:
            scalars = {log: value for log, value in logs.items() if np.ndim(value) == 0}
            write_evaluation(self.eval_dir(name), scalars, step)
            texts = ", ".join(f"{log} = {value:.6g}" for log, value in scalars.items())
            LOGGER.info("Evaluated step %d: %s", step, texts)
        return {**logs, checkpoints.GLOBAL_STEP: step}

    # --- predicting --------------------------------------------------------------------------------------------------

    @foreign_arguments(foreign_names.CALLS)
    def predict(
        self,
        input_fn: InputFn,
        predict_keys: str | Sequence[str] | None = None,
        hooks: Hooks = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields the predictions for the data, which may be endless: batches are read on demand.

        Args:
          input_fn: as in `train`; labels are ignored.
          predict_keys: names of the predictions to yield; all by default.
          hooks: as in `train`.
          checkpoint_path: checkpoint to predict with; the newest by default. Without a checkpoint, the weights are
            freshly initialized, with a warning.
          yield_single_examples: whether to yield predictions per row instead of per batch.

        Yields:
          Predictions as NumPy arrays, or dicts of arrays.

        Raises:
          ValueError: if `predict_keys` matches no prediction, or the checkpoint is from another module.
        """
        check_input_fn(input_fn)
        callbacks = as_callbacks("hooks", hooks)
        if predict_keys is not None:
            predict_keys = arguments.as_names(
                "predict_keys", [predict_keys] if isinstance(predict_keys, str) else predict_keys)
        arguments.require_bool(yield_single_examples=yield_single_examples)
        batches = self._input(input_fn, ModeKeys.PREDICT)
        spec, model, _ = self._restored(ModeKeys.PREDICT, batches, checkpoint_path)
        callbacks += as_callbacks("prediction_hooks", spec.prediction_hooks)
        for outputs in model.predict_iter(batches.per_step(1, spec.batch_map), callbacks=callbacks):
            if spec.decode_predictions is not None:
                outputs = spec.decode_predictions(outputs)
            if predict_keys is not None:
                outputs = _named(outputs, predict_keys)
            if yield_single_examples:
                yield from _rows(outputs)
            else:
                yield outputs

    # --- exporting and reading ---------------------------------------------------------------------------------------

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> str:
        """Exports `predict` with a checkpoint's weights to a new folder, to load by `trainer.load_exported`.

        Args:
          export_dir_base: parent of the new folder, which is named by the time in seconds.
          serving_input_receiver_fn: function that returns some rows of features like `input_fn`, such as
            `{"age": np.zeros((1, 1), np.float32)}`. The input of the export is the output of the spec's `batch_map`:
            numbers only, because programs take no text.
          checkpoint_path: checkpoint to export; the newest by default.

        Returns:
          The path of the folder, which contains the file "model.export" of `Model.export`.

        Raises:
          ValueError: if there is no checkpoint, or `export_outputs` names an unknown prediction.
          TypeError: if an argument has the wrong type.
        """
        base = arguments.as_path("export_dir_base", export_dir_base, "the path of a folder")
        check_receiver(serving_input_receiver_fn)
        made = serving.exports_in(base, self._exports_before.pop(os.path.abspath(base), sys.maxsize))
        if made:
            return made[-1]
        checkpoint = self._checkpoint(checkpoint_path)
        if checkpoint is None:
            raise ValueError(f"Couldn't find trained model at {self.model_dir}. Train first.")
        features = serving_input_receiver_fn()
        if features is None:
            raise errors.wrong_type("the result of serving_input_receiver_fn", features, "some rows of features")
        spec, model = self._model_of(ModeKeys.PREDICT, features, None)
        model.state = checkpoints.with_variables(checkpoint, model.state)
        return serving.export(model, spec.export_outputs, base)

    @contextlib.contextmanager
    def _finishing_exports(self, exports_before: Mapping[str, int]) -> Iterator[None]:
        """Goes on with exports that a killed process may have made: each is found, or made again.

        Args:
          exports_before: number of the newest export before the process began, by the folder of the exports.
        """
        for base, number in exports_before.items():
            serving.remove_unfinished(base, number)
        self._exports_before = {os.path.abspath(base): number for base, number in exports_before.items()}
        try:
            yield
        finally:
            self._exports_before = {}

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest whole checkpoint; None if there is no checkpoint."""
        checkpoint = checkpoints.newest(self.model_dir)
        return None if checkpoint is None else checkpoint.path

    def get_variable_names(self) -> list[str]:
        """Returns the names of all arrays of the newest checkpoint: "params/...", "opt_state/..." and "global_step".

        Raises:
          ValueError: if there is no checkpoint.
        """
        return sorted(checkpoints.variable_names(self._trained()))

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns an array of the newest checkpoint. In distributed training, every process must call it.

        Raises:
          ValueError: if there is no checkpoint, or the name is unknown.
        """
        arguments.require_text(name=name)
        checkpoint = self._trained()
        known = checkpoints.variable_names(checkpoint)
        if name not in known:
            raise errors.unknown_name("variable", name, known)
        return checkpoints.read_variables(checkpoint)[name]

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of the event files of `evaluate`."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    # --- parts -------------------------------------------------------------------------------------------------------

    def _input(self, input_fn: InputFn, mode: Mode) -> InputBatches:
        return InputBatches(call_input_fn(input_fn, mode, self.params, self.config))

    def _model(self, mode: Mode, batches: InputBatches, is_new: bool = False) -> tuple[EstimatorSpec, EstimatorModel]:
        labels = None if mode == ModeKeys.PREDICT else batches.labels
        return self._model_of(mode, batches.features, labels, is_new)

    def _model_of(self, mode: Mode, features: PyTree, labels: PyTree,
                  is_new: bool = False) -> tuple[EstimatorSpec, EstimatorModel]:
        """Returns the spec and the model of a mode, cached while the form of the input stays the same."""
        key = mode, str(jax.tree.map(_form_of, (features, labels)))
        if is_new or key not in self._models:
            self._models = {other: made for other, made in self._models.items() if other[0] != mode}
            spec = call_model_fn(self._model_fn, features, labels, mode, self.params, self.config)
            mapped = mapped_batch(spec.batch_map, features, labels)[0]
            self._models[key] = spec, make_model(spec, self._strategy(mode), self.config.seed, mapped)
        return self._models[key]

    def _strategy(self, mode: Mode) -> Strategy | None:
        return self.config.train_distribute if mode == ModeKeys.TRAIN else self.config.eval_distribute

    def _checkpoint(self, path: str | os.PathLike[str] | None) -> Checkpoint | None:
        return checkpoints.newest(self.model_dir) if path is None else checkpoints.opened(path)

    def _trained(self) -> Checkpoint:
        checkpoint = checkpoints.newest(self.model_dir)
        if checkpoint is None:
            raise ValueError(f"There is no checkpoint in {self.model_dir!r}. Train first.")
        return checkpoint

    def _restored(self, mode: Mode, batches: InputBatches, path: str | os.PathLike[str] | None,
                  ) -> tuple[EstimatorSpec, EstimatorModel, int]:
        """Returns the spec and the model of a mode with a checkpoint's variables, and the global step."""
        checkpoint = self._checkpoint(path)
        spec, model = self._model(mode, batches, is_new=checkpoint is None)
        if checkpoint is not None:
            model.state = checkpoints.with_variables(checkpoint, model.state)
            return spec, model, checkpoints.step_of(checkpoint)
        warnings.warn(f"Could not find trained model in model_dir: {self.model_dir}, running initialization to "
                      "evaluate or predict with fresh weights.", stacklevel=user_stacklevel())
        self._begin(mode, model)
        return spec, model, 0

    def _begin(self, mode: Mode, model: EstimatorModel) -> None:
        """Sets the initial weights of a model without a checkpoint."""
        if self._warm_start is not None:
            taken = warm_start(model, self._warm_start)
            LOGGER.info("Warm-starting %d variables: %s", len(taken), ", ".join(taken))


def _with_model_dir(config: RunConfig, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    if model_dir is None:
        return config if config.model_dir else config.replace(model_dir=tempfile.mkdtemp())
    path = arguments.as_path("model_dir", model_dir, "the path of a folder")
    if config.model_dir is not None and config.model_dir != path:
        raise ValueError("`model_dir` are set both in constructor and `RunConfig`, but with different values. In "
                         f"constructor: {path!r}, in `RunConfig`: {config.model_dir!r}.")
    return config.replace(model_dir=path)


def _form_of(leaf: ArrayLike) -> tuple[str, tuple[int, ...]]:
    array = np.asarray(leaf)
    return array.dtype.kind, array.shape[1:]


def _named(outputs: PyTree, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(outputs, Mapping):
        raise ValueError(f"`predict_keys` argument is not valid in case of non-dict predictions. Received: {names}.")
    found = {name: outputs[name] for name in names if name in outputs}
    if not found:
        raise ValueError(f"Expected to run at least one output from {sorted(outputs)}, provided {names}.")
    return found


def _rows(outputs: PyTree) -> Iterator[Any]:
    leaves, structure = jax.tree.flatten(outputs)
    for row in zip(*leaves, strict=True):
        yield jax.tree.unflatten(structure, row)
