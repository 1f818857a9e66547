"""Calls of public names with one wrong argument, made from good calls, and their outcomes.

A good call is a name of the public surface and its arguments. Each argument is replaced by values that its annotation
does not allow: `wrong_values` has them by kind. `outcome` says whether the call was refused by an error of ours, whose
traceback ends in a file of the trainer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import trainer
from trainer import callbacks, data, distribute, estimator, losses, metrics, models, optimizers, regularizers, utils

ROOT = pathlib.Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) for name in ("trainer", "callbacks", "models"))
_COUNTS: tuple[Any, ...] = ("3", 1.5, True, [], float("nan"), -5, np.array([1, 2]))
_HUGE = 10**400
_NUMBERS: tuple[Any, ...] = ("0.1", True, [], float("nan"), np.zeros(2), _HUGE, np.array([None]))
_ARRAYS: tuple[Any, ...] = (None, "text", np.array([[None, "a"]]), np.array(["a", "b"]), {"a"})


class Unusable:
    """A value of no use for any argument."""

    def __repr__(self) -> str:
        return "Unusable()"


@dataclasses.dataclass(frozen=True)
class Good:
    """A good call: a function, its arguments, and parameters that take any value."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WrongCall:
    """A good call with another value of an argument."""

    good: Good
    parameter: str
    value: Any

    def __str__(self) -> str:
        value = "a tracer" if self.value is TRACER else "10**400" if self.value is _HUGE else repr(self.value)
        return f"{self.good.name}({self.parameter}={value[:40]})"


TRACER = object()


def wrong_values(annotation: str) -> list[Any]:
    """Returns values that an annotation does not allow.

    >>> wrong_values("bool")[:2]
    ['yes', 2]
    """
    words = set(re.findall(r"\w+", annotation))
    if words & {"Any", "object", "PyTree"} and "Callable" not in words:
        return []
    if words & {"ArrayLike", "Array", "ndarray", "ArrayTree"}:
        values: list[Any] = list(_ARRAYS)
    elif "Callable" in words or "Fn" in annotation:
        values = [3, "typo_typo"]
    elif "float" in words:
        values = [*_NUMBERS, TRACER]
    elif "int" in words and not words & {"Sequence", "tuple", "list"}:
        values = [*_COUNTS, TRACER]
    elif "bool" in words:
        values = ["yes", 2, [], None]
    elif words & {"Sequence", "tuple", "list", "Iterable", "Collection"}:
        values = [3, Unusable()]
    elif "Literal" in words or "Mode" in words:
        values = ["typo_typo", 3, []]
    else:
        values = [3, []]
    if "None" in words:
        values = [value for value in values if value is not None]
    else:
        values.append(None)
    if words & {"str", "Literal", "PathLike"}:
        values = [value for value in values if not isinstance(value, str) or value == "typo_typo"]
    if "bool" in words:
        values = [value for value in values if value is not True]
    if words & {"Sequence", "tuple", "list", "Iterable", "Collection", "Array", "ndarray"} and "Callable" not in words:
        values = [value for value in values if not isinstance(value, (list, np.ndarray)) or value is _ARRAYS[2]]
    return [*values, Unusable()]


def wrong_calls(goods: list[Good]) -> Iterator[WrongCall]:
    """Yields wrong calls: each argument of each good call with each wrong value."""
    for good in goods:
        for name, parameter in inspect.signature(good.function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            annotation = (parameter.annotation.__name__ if isinstance(parameter.annotation, type)
                          else str(parameter.annotation))
            if parameter.annotation is not parameter.empty:
                for value in wrong_values(annotation):
                    yield WrongCall(good, name, value)


def outcome(call: WrongCall) -> str:
    """Returns "" for a call that an error of ours refuses, else "silent" or the foreign error."""
    def run(value: Any) -> None:
        call.good.function(**{**call.good.arguments, call.parameter: value})

    if call.value is TRACER:
        return outcome_of(lambda: jax.make_jaxpr(lambda value: (run(value), value)[1])(1.0))
    return outcome_of(lambda: run(call.value))


def outcome_of(function: Callable[[], Any]) -> str:
    """Returns the outcome of a call of a function; see `outcome`."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            function()
    except Exception as error:
        if len(str(error)) > 2500:
            return f"long: {len(str(error))} characters"
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        file = last.tb_frame.f_code.co_filename if last else ""
        if file.startswith(OURS):
            code = last.tb_frame.f_code.co_name if last else ""
            raised = _line(file, last.tb_lineno if last else 0)
            if "raise" in raised or code in ("__getattr__",):
                return ""
            return f"by chance: {error!r:.100} at {pathlib.Path(file).name}: {raised[:60]}"
        return f"foreign: {type(error).__name__}: {str(error)[:100]!r} at {file[-40:]}"
    return "" if any(warning.category is UserWarning for warning in warned) else "silent"


def _line(file: str, number: int) -> str:
    lines = pathlib.Path(file).read_text().splitlines()
    found = lines[number - 1].strip()
    before = " ".join(line.strip() for line in lines[max(0, number - 6):number])
    return f"raise {found}" if re.search(r"\braise\b(?!.*\braise\b).*$", before) and "raise" in before else found


# --- good calls ------------------------------------------------------------------------------------------------------

_PAIR = {"y_true": np.ones((4, 3), np.float32), "y_pred": np.full((4, 3), 0.5, np.float32)}
_NOT_CALLED = ("Loss", "BuiltinLoss", "Metric", "Optimizer", "CommonArguments", "OptimizerState", "Penalty",
               "Regularizer", "Callback", "Registry", "Variable", "LossMetric", "LazyLogs", "Run", "RunDetails",
               "SavePoint", "MonitorCallback", "AnyMetric", "LearningRateSchedule", "LogTo")


def _classes(package: Any, arguments: Mapping[str, Mapping[str, Any]]) -> Iterator[Good]:
    for name in dir(package):
        found = getattr(package, name)
        if (inspect.isclass(found) and found.__module__.startswith("trainer") and not name.startswith("_")
                and name not in _NOT_CALLED and not issubclass(found, (Exception, tuple))
                and not hasattr(found, "__members__")):
            yield Good(f"{package.__name__.removeprefix('trainer.')}.{name}", found, arguments.get(name, {}))


def _functions(package: Any, names: Mapping[str, Mapping[str, Any]]) -> Iterator[Good]:
    for name, arguments in names.items():
        yield Good(f"{package.__name__.removeprefix('trainer.')}.{name}", getattr(package, name), arguments)


def _folder() -> str:
    return tempfile.mkdtemp()


def _network(function: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> Callable[..., Any]:
    def call(**arguments: Any) -> None:
        module = function(**arguments)
        jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros(shape, dtype)))

    call.__signature__ = _of_fields(function)  # type: ignore[attr-defined]
    return call


def _of_fields(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=[
        parameter for name, parameter in signature.parameters.items() if name not in ("parent", "name", "dtype")])


def _networks() -> Iterator[Good]:
    images, tokens = ((1, 64, 64, 3), np.float32), ((1, 8), np.int32)
    for name, shape, arguments in (
            ("MLP", ((1, 8), np.float32), {"num_classes": 3}), ("CNN", images, {"num_classes": 3}),
            ("TransformerEncoder", tokens, {"vocab_size": 9, "num_layers": 1, "features": 8, "num_heads": 2}),
            ("TransformerLM", tokens, {"vocab_size": 9, "num_layers": 1, "features": 8, "num_heads": 2}),
            ("ResNet18", images, {}), ("MobileNetV2", images, {}), ("ConvNeXtTiny", images, {}), ("VGG16", images, {}),
            ("EfficientNetB0", images, {}), ("ViTS16", images, {}), ("UNet", images, {})):
        function = getattr(models, name, None)
        if function is not None:
            known = inspect.signature(function).parameters
            yield Good(f"models.{name}", _network(function, *shape),
                       {key: value for key, value in arguments.items() if key in known})


def _model() -> trainer.Model:
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


_X, _Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def _methods() -> Iterator[Good]:
    model = _model()
    model.fit(_X, _Y, verbose=0)
    saved = f"{_folder()}/d"
    model.save_weights(saved)
    for name, arguments in {
            "fit": {"x": _X, "y": _Y, "verbose": 0}, "evaluate": {"x": _X, "y": _Y, "verbose": 0},
            "predict": {"x": _X, "verbose": 0}, "train_on_batch": {"x": _X, "y": _Y},
            "test_on_batch": {"x": _X, "y": _Y},
            "predict_on_batch": {"x": _X}, "save_weights": {"filepath": f"{_folder()}/a"},
            "export": {"filepath": f"{_folder()}/b"}, "save": {"filepath": f"{_folder()}/c"},
            "load_weights": {"filepath": saved}, "set_weights": {"weights": model.get_weights()},
            "summary": {}, "build": {"sample": _X}}.items():
        method = getattr(model, name, None)
        if method is not None and inspect.signature(method).parameters:
            yield Good(f"Model.{name}", method, arguments)
    yield Good("Model.compile", trainer.Model(nn.Dense(1)).compile, {"optimizer": "sgd", "loss": "mse"})
    yield Good("Model", trainer.Model, {"module": nn.Dense(1)})
    yield Good("Sequential", trainer.Sequential, {})


def good_calls() -> list[Good]:
    """Returns the good calls, the most used names first."""
    kept = {name: _PAIR for name in losses.__all__ if inspect.isfunction(getattr(losses, name)) and {
        "y_true", "y_pred"} <= inspect.signature(getattr(losses, name)).parameters.keys() and name != "ctc"}
    for name in ("categorical_generalized_cross_entropy", "circle", "sparse_categorical_crossentropy"):
        kept[name] = _PAIR | {"y_true": np.arange(4) % 3}
    column = estimator.categorical_column_with_identity("a", 3)
    found = [
        *_methods(),
        *_classes(losses, {"LinearLogits": {
            "features": np.ones((2, 3, 4), np.float32), "kernel": np.ones((4, 5), np.float32), "chunk_size": 2}}),
        *_functions(losses, kept),
        *_classes(metrics, {
            "IoU": {"num_classes": 2, "target_class_ids": [0]}, "MeanIoU": {"num_classes": 2},
            "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]}, "OneHotMeanIoU": {"num_classes": 2},
            "MeanMetricWrapper": {"fn": metrics.accuracy}, "PrecisionAtRecall": {"recall": 0.5},
            "RecallAtPrecision": {"precision": 0.5}, "SensitivityAtSpecificity": {"specificity": 0.5},
            "SpecificityAtSensitivity": {"sensitivity": 0.5}}),
        *_classes(optimizers, {
            "LearningRate": {"value": 0.1}, "LossScaleOptimizer": {"inner_optimizer": optimizers.SGD()}}),
        *_classes(optimizers.schedules, {
            "CosineDecay": {"initial_learning_rate": 0.1, "decay_steps": 9},
            "CosineDecayRestarts": {"initial_learning_rate": 0.1, "first_decay_steps": 9},
            "ExponentialDecay": {"initial_learning_rate": 0.1, "decay_steps": 9, "decay_rate": 0.5},
            "InverseTimeDecay": {"initial_learning_rate": 0.1, "decay_steps": 9, "decay_rate": 0.5},
            "PiecewiseConstantDecay": {"boundaries": [3], "values": [0.1, 0.2]},
            "PolynomialDecay": {"initial_learning_rate": 0.1, "decay_steps": 9}}),
        *_classes(callbacks, {
            "BackupAndRestore": {"backup_dir": _folder()}, "CSVLogger": {"filename": f"{_folder()}/a"},
            "LearningRateScheduler": {"schedule": lambda epoch: 0.1},
            "ValidateEvery": {"steps": 1}, "ModelCheckpoint": {"filepath": f"{_folder()}/a"},
            "OrbaxCheckpoint": {"directory": _folder()}, "Profile": {"log_dir": _folder(), "steps": (1, 2)},
            "RunRecord": {"folder": _folder()}, "TensorBoard": {"log_dir": _folder()}}),
        Good("callbacks.LogTo", functools.partial(callbacks.LogTo, callbacks.loggers.JSONLines(f"{_folder()}/a"))),
        *_functions(regularizers, {"l1": {}, "l2": {}, "l1_l2": {}, "orthogonal_regularizer": {}}),
        *_functions(data, {"timeseries_dataset_from_array": {"data": _X, "targets": _Y, "sequence_length": 2}}),
        *_functions(utils, {
            "to_categorical": {"x": [0, 1]}, "pad_sequences": {"sequences": [[1], [1, 2]]}, "normalize": {"x": _X},
            "split_dataset": {"dataset": _X, "left_size": 0.5}, "set_random_seed": {"seed": 1},
            "array_to_img": {"x": np.ones((2, 2, 3))}, "img_to_array": {"img": np.ones((2, 2, 3))}}),
        *_classes_named(distribute, {
            "OneDeviceStrategy": {}, "MirroredStrategy": {}, "FullyShardedStrategy": {}, "CentralStorageStrategy": {},
            "ModelParallelStrategy": {"mesh_shape": {"model": 1}}}),
        *_functions(estimator, {
            "numeric_column": {"key": "a"}, "categorical_column_with_identity": {"key": "a", "num_buckets": 3},
            "categorical_column_with_hash_bucket": {"key": "a", "hash_bucket_size": 3},
            "categorical_column_with_vocabulary_list": {"key": "a", "vocabulary_list": ["b"]},
            "embedding_column": {"categorical_column": column, "dimension": 2},
            "indicator_column": {"categorical_column": column}}),
        *_networks(),
    ]
    return found


def _classes_named(package: Any, names: Mapping[str, Mapping[str, Any]]) -> Iterator[Good]:
    return _functions(package, {name: arguments for name, arguments in names.items() if hasattr(package, name)})


def _fit(model: trainer.Model, **arguments: Any) -> Callable[[], None]:
    return lambda: model.fit(**{"x": _X, "y": _Y, "verbose": 0, **arguments})


def _fit_with(**arguments: Any) -> Callable[[], None]:
    def call() -> None:
        model = trainer.Model(nn.Dense(1))
        model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
        model.fit(_X, _Y, verbose=0)
    return call


def misfits() -> dict[str, Callable[[], Any]]:
    """Returns calls whose arguments are wrong together, or by their content, by the fault."""
    model, rows = _model(), data.Dataset.from_arrays((_X, _Y))
    model.fit(_X, _Y, verbose=0)
    return {
        "fewer rows than labels": _fit(model, x=_X[:5]), "no rows": _fit(model, x=_X[:0], y=_Y[:0]),
        "texts": _fit(model, x=np.array([["a", "b"]] * 8)), "objects": _fit(model, x=np.array([[None, 1]] * 8, object)),
        "dates": _fit(model, x=np.full((8, 2), "2020-01-01", "M8[D]")), "complex": _fit(model, x=_X.astype(complex)),
        "a number for rows": _fit(model, x=np.float32(1)), "more features": _fit(model, x=np.ones((8, 5), np.float32)),
        "wider labels": _fit(model, y=np.ones((8, 7), np.float32)), "lists of two lengths": _fit(model, x=[[1, 2],
        [1]]),
        "parts of other rows": _fit(model, x={"a": _X, "b": _X[:3]}), "rows of None": _fit(model, x=[None, None]),
        "fewer weights": _fit(model, sample_weight=np.ones(3)), "weights of text": _fit(
            model, sample_weight=np.array(["a"] * 8)),
        "classes of text": _fit(model, class_weight={"a": 1.0}), "a list of classes": _fit(model, class_weight=[1.0]),
        "a class of None": _fit(model, class_weight={0: None}), "a class of NaN": _fit(model, class_weight={0: np.nan}),
        "validation of four": _fit(model, validation_data=(_X, _Y, _Y, _Y)),
        "validation of nothing": _fit(model, validation_data=()),
        "validation of more features": _fit(model, validation_data=(np.ones((8, 5)), _Y)),
        "all for validation": _fit(model, validation_split=1.0), "a batch of a dataset": _fit(
            model, x=rows.batch(4), y=None, batch_size=4),
        "labels beside a dataset": _fit(model, x=rows.batch(4)), "an empty iterator": _fit(model, x=iter([]), y=None),
        "an iterator of four": _fit(model, x=iter([(_X, _Y, _Y, _Y)]), y=None),
        "an iterator of text": _fit(model, x=iter(["a", "b"]), y=None),
        "an iterator of None": _fit(model, x=iter([None]), y=None),
        "the class of a callback": _fit(model, callbacks=[callbacks.EarlyStopping]),
        "no callback": _fit(model, callbacks=[None]), "the name of a callback": _fit(model,
        callbacks=["EarlyStopping"]),
        "a function for a callback": _fit(model, callbacks=[lambda epoch: 0]),
        "a log that is not there": _fit(model, callbacks=[callbacks.EarlyStopping(monitor="val_los")]),
        "the class of an optimizer": _fit_with(optimizer=optimizers.Adam), "an unknown optimizer": _fit_with(
            optimizer="addam"),
        "an unknown loss": _fit_with(loss="msee"), "two losses": _fit_with(loss=["mse", "mse"]),
        "a loss of text": _fit_with(loss=lambda y_true, y_pred: "x"),
        "a loss of nothing": _fit_with(loss=lambda y_true, y_pred: None),
        "a loss without a gradient": _fit_with(loss=lambda y_true, y_pred: y_true > y_pred),
        "a loss of whole numbers": _fit_with(loss=lambda y_true, y_pred: jnp.round(y_pred).astype(int)),
        "an unknown metric": _fit_with(metrics=["acc_uracy"]), "a metric of text": _fit_with(
            metrics=[lambda y_true, y_pred: "x"]),
        "a metric of nothing": _fit_with(metrics=[lambda y_true, y_pred: None]), "a set": _fit_with(metrics={"mae"}),
        "two weights": _fit_with(loss_weights=[1, 2]), "the class of a module": lambda: trainer.Model(nn.Dense),
        "no input": lambda: model.predict(None), "a text": lambda: model.predict("abc"),
        "inputs of more features": lambda: model.predict(np.ones((3, 9))), "no labels": lambda: model.evaluate(_X),
        "fewer arrays": lambda: model.set_weights(model.get_weights()[:1]),
        "arrays of other shapes": lambda: model.set_weights([np.ones((9, 9)), np.ones(1)]),
        "arrays of text": lambda: model.set_weights([np.array([["a"], ["b"]]), np.ones(1)]),
        "two clips": lambda: optimizers.SGD(clipnorm=1.0, clipvalue=1.0),
            "a class beyond": lambda: utils.to_categorical(
            [5], 3),
        "numbers for sequences": lambda: utils.pad_sequences([1, 2]), "an unknown side": lambda: utils.pad_sequences(
            [[1]], padding="left"),
        "more than all": lambda: utils.split_dataset(_X, 1.5), "fewer predictions": lambda: (
            metrics.MeanSquaredError().update_state([1, 2], [1, 2, 3])),
        "texts for numbers": lambda: metrics.Accuracy().update_state(["a"], ["a"]),
        "fractions for words": lambda: _language_model(2, np.float32), "heads that do not divide": lambda: (
            _language_model(3, np.int32)),
        "a small image": lambda: trainer.Model(models.ResNet18(num_classes=2)).build(np.ones((1, 4, 4, 3), np.float32)),
        "a sequence longer than the rows": lambda: data.timeseries_dataset_from_array(_X, None, sequence_length=100),
        "bounds that descend": lambda: estimator.bucketized_column(estimator.numeric_column("a"), [3, 1]),
        "an embedding of numbers": lambda: estimator.embedding_column(estimator.numeric_column("a"), 3),
    }


def _language_model(heads: int, dtype: Any) -> None:
    module = models.TransformerLM(vocab_size=9, num_layers=1, d_model=8, num_heads=heads)
    trainer.Model(module).build(np.ones((1, 4), dtype))
