"""EstimatorSpec: what a `model_fn` returns, and the modes that it is called in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from trainer.core import arguments, errors
from trainer.data.sources.batches import Batch
from trainer.estimator.training.hooks import check_hooks
from trainer.model.types import Losses, Metrics, ModuleLike, Optimizers

Mode: TypeAlias = Literal["train", "eval", "infer"]
BatchMap: TypeAlias = Callable[[Any, Any], Batch]
"""From the features and labels of a batch, on the host, to `(x, y)` or `(x, y, sample_weight)` of numeric arrays."""


ModelFn: TypeAlias = "Callable[..., EstimatorSpec]"
"""A function `(features, labels, mode, params, config)`, of which it may leave out all but `features`."""


class ModeKeys:
    """The modes that a `model_fn` is called in."""

    TRAIN: Mode = "train"
    EVAL: Mode = "eval"
    PREDICT: Mode = "infer"


_OF_COMPILE = {"optimizer", "loss", "metrics", "weighted_metrics"}
_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
# Arguments of TensorFlow's EstimatorSpec, and what says the same here.
_OTHER_NAMES = {
    "train_op": "give `optimizer`: the gradients are those of `loss`.",
    "eval_metric_ops": "give `metrics`, as `Model.compile` takes them.",
    "scaffold": "leave it out: there is no graph to prepare.",
}


class EstimatorSpec:
    """What to train, to evaluate or to predict with, in one mode.

    In TensorFlow a spec holds tensors of a graph that was built; here it holds the parts that such a graph is made of.

    Args:
      mode: the mode that `model_fn` was given: "train", "eval" or "infer".
      module: a Flax module, from the features of a batch to outputs.
      loss: as in `Model.compile`, from labels and outputs. Needed to train and to evaluate.
      optimizer: as in `Model.compile`. Needed to train; with `ema_decay`, or an optimizer that keeps averages, also to
        evaluate with them.
      metrics: as in `Model.compile`; of `evaluate`.
      weighted_metrics: the same, for metrics that use the weights of rows.
      predictions: a function from the module's outputs to what `predict` yields, a dict of arrays, rows first. It is
        compiled with the module. None yields the outputs as they are.
      decode_predictions: a function on the host from a batch of these, as numpy arrays, to what `predict` yields: for
        class names, which are no numbers.
      batch_map: a function `(features, labels)` on the host to the `(x, y)` or `(x, y, sample_weight)` that module and
        loss get, all numeric: for features that are text, or weights among the features. `labels` is None in "infer".
      export_outputs: names of the predictions that an export has; None for all.
      training_hooks, training_chief_hooks, evaluation_hooks, prediction_hooks: hooks or callbacks of that mode, besides
        those of the call.
      compile_options: further arguments of `Model.compile`, such as `{"precision": "mixed_bfloat16"}`.

    Raises:
      ValueError: for an unknown mode, or if something is missing that the mode needs.
      TypeError: for an argument of another type.

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
            raise ValueError("Missing module. Give `module=`, a Flax module from the features of a batch to outputs.")
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
