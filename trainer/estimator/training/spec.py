"""EstimatorSpec: the result of a `model_fn`, and its modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from trainer.core import arguments, errors
from trainer.data.sources.arrays import Batch
from trainer.engine.model.types import Losses, Metrics, ModuleLike, Optimizers
from trainer.estimator.training.hooks import check_hooks

Mode: TypeAlias = Literal["train", "eval", "infer"]
BatchMap: TypeAlias = Callable[[Any, Any], Batch]
"""Host function from a batch's features and labels to numeric `(x, y)` or `(x, y, sample_weight)`."""


ModelFn: TypeAlias = "Callable[..., EstimatorSpec]"
"""A function `(features, labels, mode, params, config)`, with all arguments except `features` optional."""


class ModeKeys:
    """The modes of a `model_fn` call."""

    TRAIN: Mode = "train"
    EVAL: Mode = "eval"
    PREDICT: Mode = "infer"


_OF_COMPILE = {"optimizer", "loss", "metrics", "weighted_metrics"}
_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
# Arguments of TensorFlow's EstimatorSpec, and their replacements.
_OTHER_NAMES = {
    "train_op": "give `module`, `loss` and `optimizer`, which applies the gradients.",
    "eval_metric_ops": "give `metrics`, as `Model.compile` takes them.",
    "scaffold": "leave it out: there is no graph to prepare.",
}


class EstimatorSpec:
    """The model, loss, optimizer and metrics of a mode.

    In TensorFlow, a spec holds tensors of a graph. Here it holds the components of the computation.

    Args:
      mode: mode of the `model_fn` call: "train", "eval" or "infer".
      module: Flax module from the features of a batch to outputs.
      loss: as in `Model.compile`, of labels and outputs. Required to train and evaluate.
      optimizer: as in `Model.compile`. Required to train, and to evaluate with averaged weights (`ema_decay`, or an
        optimizer that keeps averages).
      metrics: as in `Model.compile`, for `evaluate`.
      weighted_metrics: like `metrics`, for metrics that use row weights.
      predictions: function from the module's outputs to the predictions of `predict`, a dict of arrays, rows first. It
        is compiled with the module. None yields the outputs unchanged.
      decode_predictions: host function from a batch of predictions, as NumPy arrays, to the final predictions; for
        non-numeric values such as class names.
      batch_map: host function `(features, labels)` that returns `(x, y)` or `(x, y, sample_weight)` for module and
        loss, all numeric; for text features, or weights among the features. `labels` is None in mode "infer".
      export_outputs: names of the predictions to export; None for all.
      training_hooks, training_chief_hooks, evaluation_hooks, prediction_hooks: hooks or callbacks of the mode, in
        addition to the hooks of the call.
      compile_options: additional arguments of `Model.compile`, such as `{"precision": "mixed_bfloat16"}`.

    Raises:
      ValueError: if the mode is unknown, or an argument that the mode requires is missing.
      TypeError: if an argument has the wrong type.

    Example:
      >>> from flax import linen as nn
      >>> EstimatorSpec(ModeKeys.TRAIN, module=nn.Dense(1), loss="mse", optimizer="sgd").mode
      'train'

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/EstimatorSpec
    """

    def __init__(
        self,
        mode: Mode,
        module: ModuleLike | None = None,
        loss: Losses | None = None,
        optimizer: Optimizers | None = None,
        metrics: Metrics = None,
        predictions: Callable[[Any], Any] | None = None,
        export_outputs: Sequence[str] | None = None,
        *,
        weighted_metrics: Metrics = None,
        decode_predictions: Callable[[Any], Any] | None = None,
        batch_map: BatchMap | None = None,
        training_hooks: Sequence[Any] = (),
        training_chief_hooks: Sequence[Any] = (),
        evaluation_hooks: Sequence[Any] = (),
        prediction_hooks: Sequence[Any] = (),
        compile_options: Mapping[str, Any] | None = None,
        **others: Any,
    ):
        for name in others:
            if name in _OTHER_NAMES:
                raise TypeError(f"`EstimatorSpec` has no `{name}`: {_OTHER_NAMES[name]}")
            raise TypeError(f"`EstimatorSpec` has no argument `{name}`.")
        if mode not in _MODES:
            raise errors.unknown_name("mode", str(mode), _MODES)
        if module is None:
            raise ValueError("Missing module. Give `module=`, a Flax module from the features of a batch to outputs, "
                             "and not its outputs: `module=nn.Dense(3)`.")
        if mode != ModeKeys.PREDICT and loss is None:
            raise ValueError(f"Missing loss. Mode {mode!r} needs `loss=`, such as \"mse\".")
        if mode == ModeKeys.TRAIN and optimizer is None:
            raise ValueError("Missing optimizer. Mode 'train' needs `optimizer=`, such as \"adam\" or an optax one.")
        for name, function in (("predictions", predictions), ("decode_predictions", decode_predictions),
                               ("batch_map", batch_map)):
            if function is not None and not callable(function):
                raise errors.wrong_type(name, function, "a function, or None")
        if export_outputs is not None:
            export_outputs = arguments.as_names("export_outputs", export_outputs)
        if compile_options is not None and not isinstance(compile_options, Mapping):
            raise errors.wrong_type("compile_options", compile_options, "a dict of arguments of `Model.compile`")
        twice = sorted(set(compile_options or ()) & _OF_COMPILE)
        if twice:
            raise ValueError(f"`compile_options` has {', '.join(twice)}, which `EstimatorSpec` has arguments for. Give "
                             "them there.")
        self.mode: Mode = mode
        self.module = module
        self.loss = loss
        self.optimizer = optimizer
        self.metrics = metrics
        self.weighted_metrics = weighted_metrics
        self.predictions = predictions
        self.decode_predictions = decode_predictions
        self.batch_map = batch_map
        self.export_outputs = export_outputs
        self.training_hooks = check_hooks("training_hooks", training_hooks)
        self.training_chief_hooks = check_hooks("training_chief_hooks", training_chief_hooks)
        self.evaluation_hooks = check_hooks("evaluation_hooks", evaluation_hooks)
        self.prediction_hooks = check_hooks("prediction_hooks", prediction_hooks)
        self.compile_options = dict(compile_options or {})
