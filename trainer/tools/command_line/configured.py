"""`python -m trainer fit`, `evaluate`, `predict` and `export`: the runs of a configuration.

Owns the effects of these commands, and the files in a run's folder:

  config.yaml: the configuration, complete with defaults.
  run.json, step_*: the record and the checkpoints (see `RunRecord` and `BackupAndRestore`).
  model: the training state at the end of `fit`, which the other commands load.

Exit codes: 0 for success, 2 for a rejected configuration; of `fit` also the codes of a script that trains.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jsonargparse
import numpy as np
import yaml

from trainer import callbacks
from trainer.callbacks.base.log_values import as_json
from trainer.core.errors import describe, unknown_name
from trainer.core.files import local_file, open_file, replace_file, storage
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.load import load_model
from trainer.engine.model.model import Model
from trainer.engine.saving.prediction import named
from trainer.tools.command_line.configuration import Parser, parsed, parser_of
from trainer.tools.command_line.parser_errors import MODEL
from trainer.utils import set_random_seed

CONFIG_NAME, MODEL_NAME, PREDICTIONS_NAME = "config.yaml", "model", "predictions.npz"
EXPORT_NAMES = {"jax": "model.export", "stablehlo": "model_stablehlo", "saved_model": "saved_model",
                "onnx": "model.onnx"}
SETS = ("train", "validation", "test", "predict")
_ARRAYS = ("x", "y", "sample_weight")
# A run may continue with another value: more epochs, other devices. `fit` checks callbacks against the checkpoint.
_MAY_CHANGE = ("run", "strategy", "backup", "trainer.epochs", "trainer.max_steps", "trainer.max_time",
               "trainer.verbose", "trainer.callbacks")
# The other commands may compute other losses and metrics of the same model.
_OF_EVALUATION = ("compile.loss", "compile.metrics", "compile.weighted_metrics")
_ABSENT = object()


class Made(NamedTuple):
    """The objects of a configuration.

    Attributes:
      model: the model, compiled.
      data: the data sets by name.
      options: the configuration, with objects instead of class paths.
    """

    model: Model
    data: Mapping[str, Any]
    options: jsonargparse.Namespace


def main(command: str, arguments: Sequence[str]) -> int:
    """Runs a command, and returns the exit code."""
    run = COMMANDS[command]
    parser = parser_of(command, inspect.getdoc(run) or "")
    if command == "fit":
        run(parser, parsed(parser, arguments))
        return 0
    _add_arguments(parser, command)
    given = _with_config_of_run(parser, arguments)
    options = parsed(parser, given)
    if given is arguments:  # the model's arguments are not those of the run, unless they are repeated
        _check_is_model_of_run(parser, options)
    run(parser, options)
    return 0


def _add_arguments(parser: Parser, command: str) -> None:
    group = parser.add_argument_group(f"Arguments of {command}")
    if command == "export":
        group.add_method_arguments(Model, "export", as_group=False, skip={"filepath", "sample"})
    else:
        group.add_argument("--set", type=str, default="validation", help="the data set")
        group.add_argument("--batch_size", type=int | None, default=None, help="rows per batch, if the data set is "
                           "arrays; by default as in the validation of `fit`")
        group.add_argument("--steps", type=int | None, default=None, help="maximum number of batches")
    if command != "evaluate":
        group.add_argument("--output", type=str | None, default=None, help="the path that is written; by default in "
                           "the run's folder")


# --- fit -------------------------------------------------------------------------------------------------------------


def fit(parser: Parser, options: jsonargparse.Namespace) -> None:
    """Trains, or continues the run in the folder, and saves the model."""
    text = parser.dump(options, skip_unset=False)
    _check_is_same_run(parser, options.run, text)
    with objects_of(parser, options) as (model, data, made):
        run = [callbacks.BackupAndRestore(made.run, delete_checkpoint=False, **made.backup),
               callbacks.RunRecord(made.run, config=yaml.safe_load(text)), _SavedConfiguration(made.run, text)]
        arguments = made.trainer.as_dict()
        arguments["callbacks"] = [*arguments["callbacks"], *run]
        model.fit(**_as_arguments(_set(parser, data, "train")), validation_data=data.get("validation"), **arguments)
        model.save(os.path.join(made.run, MODEL_NAME))


class _SavedConfiguration(callbacks.Callback):
    """Writes the configuration once the first step is done: a resumed run may be refused before."""

    runs_on = "chief"
    stops_consistently = True

    def __init__(self, folder: str, text: str):
        self._folder, self._text, self._is_written = folder, text, False

    def on_execution_end(self, phase: Any, batch: int, logs: Any = None) -> None:
        if not self._is_written:
            self._is_written = True
            storage.make_folder(self._folder)
            replace_file(os.path.join(self._folder, CONFIG_NAME), self._text)


def _check_is_same_run(parser: Parser, folder: str, text: str) -> None:
    """Ends the process if the folder has a run whose numbers come from another configuration."""
    before, now = _flat(_configuration_of(folder)), _flat(yaml.safe_load(text))
    for key in [*before, *(key for key in now if before and key not in before)]:
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if old != new and not any(key == name or key.startswith(f"{name}.") for name in _MAY_CHANGE):
            parser.error(f'Parser key "{key}":\n  {folder!r} has a run with another configuration, which this command '
                         f"would continue: {_shown(old)} there, {_shown(new)} here. Give this run another folder by "
                         "--run, or delete that folder.")


def _check_is_model_of_run(parser: Parser, options: jsonargparse.Namespace) -> None:
    """Ends the process if the model or its compilation differs from the run's: the weights might fit all the same.

    An argument that the run's model did not have does not count.
    """
    before, now = _configuration_of(options.run), yaml.safe_load(parser.dump(options, skip_unset=False))
    for key, old, new in _differences(before, now):
        if key.startswith((f"{MODEL}.", "compile.")) and not key.startswith(_OF_EVALUATION):
            parser.error(f'Parser key "{key}":\n  {options.run!r} has a run of another model: {old!r} there, {new!r} '
                         f"here. Give `--run {options.run}` in place of `--config`, for the configuration of that run.")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys that both configurations have with other values, and the values."""
    for name, old in before.items():
        new = now.get(name, old)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def _configuration_of(folder: str) -> dict[str, Any]:
    """Returns the configuration of the run in a folder; an empty dict if there is no run."""
    path = os.path.join(folder, CONFIG_NAME)
    if not storage.is_file(path):
        return {}
    with open_file(path) as file:
        configuration: dict[str, Any] = yaml.safe_load(file.read())
    return configuration


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value})
    return flat


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else repr(value)


# --- evaluate, predict, export ---------------------------------------------------------------------------------------


def evaluate(parser: Parser, options: jsonargparse.Namespace) -> None:
    """Prints the loss and the metrics of a data set as a line of JSON."""
    with _trained(parser, options) as (model, data, made):
        logs = model.evaluate(**_as_arguments(_set(parser, data, made.set)), batch_size=_batch_size(made),
                              steps=made.steps, verbose=made.trainer.verbose)
        if model.strategy.is_chief:
            print(json.dumps(as_json(logs)))


def predict(parser: Parser, options: jsonargparse.Namespace) -> None:
    """Writes the outputs for a data set to an npz file."""
    with _trained(parser, options) as (model, data, made):
        x = _as_arguments(_set(parser, data, made.set))["x"]
        outputs = model.predict(x, batch_size=_batch_size(made), steps=made.steps, verbose=made.trainer.verbose)
        path = made.output or os.path.join(made.run, PREDICTIONS_NAME)
        if model.strategy.is_chief:
            arrays = dict(named(outputs, "outputs"))
            with local_file(path) as local, open(local, "wb") as file:
                np.savez(file, **arrays)
            print(f"{path}: {', '.join(f'{name} {array.dtype}{array.shape}' for name, array in arrays.items())}")


def export(parser: Parser, options: jsonargparse.Namespace) -> None:
    """Exports the model for programs without its code."""
    with _trained(parser, options) as (model, _, made):
        path = made.output or os.path.join(made.run, EXPORT_NAMES[made.format])
        model.export(path, format=made.format, batch_size=made.batch_size, platforms=made.platforms)
        if model.strategy.is_chief:
            print(path)


@contextlib.contextmanager
def _trained(parser: Parser, options: jsonargparse.Namespace) -> Iterator[Made]:
    """Makes the objects of a configuration, and gives the model its state at the end of `fit`."""
    path = os.path.join(options.run, MODEL_NAME)
    if not storage.exists(path):
        parser.error(f'Parser key "run":\n  {options.run!r} has no trained model. The end of `fit` writes it: run '
                     f"`python -m trainer fit` with this configuration, which continues an interrupted run.")
    with objects_of(parser, options) as made:
        load_model(path, made.model)
        yield made


def _with_config_of_run(parser: Parser, arguments: Sequence[str]) -> Sequence[str]:
    """Returns the arguments with the configuration of the folder that `--run` names, unless there is a `--config`."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    finder.add_argument("--run")
    found, _ = finder.parse_known_args(arguments)
    if found.config is not None or found.run is None:
        return arguments
    path = os.path.join(found.run, CONFIG_NAME)
    if not storage.is_file(path):
        parser.error(f'Parser key "run":\n  {found.run!r} is not the folder of a run: there is no {path!r}.')
    return ["--config", path, *arguments]


def _batch_size(made: jsonargparse.Namespace) -> int | None:
    return made.batch_size or made.trainer.validation_batch_size or made.trainer.batch_size


# --- objects ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def objects_of(parser: Parser, options: jsonargparse.Namespace) -> Iterator[Made]:
    """Makes the objects of a configuration in the scope of its strategy, which is made first: it may join a cluster."""
    strategy = parser.instantiate(jsonargparse.Namespace(strategy=options.pop("strategy"))).strategy
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        set_random_seed(options.seed)
        made = parser.instantiate(options)
        model = made.model if isinstance(made.model, Model) else Model(made.model)
        if not (core_of(model).configuration.is_compiled and options.compile == parser.get_defaults().compile):
            try:
                model.compile(**made.compile)
            except (TypeError, ValueError) as error:
                parser.error(f'Parser key "compile":\n  {error}', error)
        yield Made(model, _by_name(parser, made.data), made)


def _by_name(parser: Parser, data: Any) -> Mapping[str, Any]:
    """Returns data sets by name, from a mapping or from the attributes of an object."""
    if not isinstance(data, Mapping):
        found = {name: getattr(data, name) for name in SETS if name in dir(data)}
        if not found:
            parser.error(f'Parser key "data":\n  The function returned no data sets by name. Received: '
                         f'{describe(data)}. Return a dict, such as '
                         '`{"train": (x, y), "validation": (x_val, y_val)}`.')
        return found
    for name in data:
        if name not in SETS:
            raise unknown_name("data set", name, SETS)
    return data


def _set(parser: Parser, data: Mapping[str, Any], name: str) -> Any:
    if name not in data:
        parser.error(f'Parser key "data":\n  There is no data set {name!r}; there are {", ".join(map(repr, data))}.')
    return data[name]


def _as_arguments(data: Any) -> dict[str, Any]:
    """Returns a data set as arguments of `fit`: a tuple is `(x, y)` or `(x, y, sample_weight)`."""
    return dict(zip(_ARRAYS, data, strict=False)) if isinstance(data, tuple) else {"x": data}


COMMANDS: dict[str, Callable[[Parser, jsonargparse.Namespace], None]] = {
    "fit": fit, "evaluate": evaluate, "predict": predict, "export": export}
