"""The sections of a report from `run.json` and from the model."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from trainer.callbacks.record.curves import curves, metric_names
from trainer.core.modules import summary_cells, totals
from trainer.core.units import readable_bytes, readable_number
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.forward import table_of_layers
from trainer.tools.report.page import UNKNOWN, Picture, Section, Table

if TYPE_CHECKING:
    from trainer.engine.model.model import Model

_ALSO_ARGUMENTS = ("strategy", "seed", "compile", "trainer", "run", "backup")  # sections of a configuration
# Description and color of each part of a run's time, in the order of drawing.
TIME_PARTS = {"device": ("waiting for the device", "#1f6fb4"), "compile": ("compiling", "#d9722b"),
              "data": ("waiting for data", "#c23b4e"), "checkpoint": ("checkpoints", "#7a5ba6"),
              "callbacks": ("callbacks, and the logs that they wait for", "#3a9466"),
              "host": ("the loop itself", "#97a3b1")}


def facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the most important numbers of a run, with their names."""
    history, timing = record.get("history", {}), record.get("timing", {})
    found = []
    for log in ("val_loss", "loss"):
        if values := _numbers(history.get(log, [])):
            found.append((f"{log}, at its best", f"{min(values):.4g}"))
            break
    for metric in metric_names(history)[1:3]:
        log = f"val_{metric}" if f"val_{metric}" in history else metric
        if values := _numbers(history[log]):
            found.append((f"{log}, at the end", f"{values[-1]:.4g}"))
    if record.get("epochs"):
        found.append(("epochs", str(len(record["epochs"]))))
    if timing.get("total"):
        found.append(("time", readable_time(timing["total"])))
    if timing.get("rows_per_sec"):
        found.append(("training rows a second", f"{timing['rows_per_sec']:,.0f}"))
    if parameters := record.get("model", {}).get("parameters"):
        found.append(("parameters", f"{parameters:,}"))
    return found


def curves_section(record: Mapping[str, Any]) -> Section:
    """Returns the curves of the metrics, and a table of their first, best and last values."""
    history = record.get("history", {})
    if not metric_names(history):
        return Section("Metrics", [str(record["error"])] if record.get("error") else ["No epoch has ended yet."])
    epochs = {log: record.get("epochs_of", {}).get(log, record.get("epochs", [])) for log in history}
    epochs = {log: found if len(found) == len(history[log]) else list(range(len(history[log])))
              for log, found in epochs.items()}
    rows = []
    for log, values in history.items():
        if numbers := _numbers(values):
            least, most = min(numbers), max(numbers)
            rows.append([log, f"{numbers[0]:.4g}", f"{least:.4g}", str(epochs[log][values.index(least)] + 1),
                         f"{most:.4g}", str(epochs[log][values.index(most)] + 1), f"{numbers[-1]:.4g}"])
    table = Table(rows, ["log", "first", "least", "in epoch", "greatest", "in epoch", "last"])
    error = [f"The run ended by an exception. {record['error']}"] if record.get("error") else []
    picture = Picture("curves", "The metrics over the epochs", curves(history, epochs))
    return Section("Metrics", [*error, picture, table])


def time_section(record: Mapping[str, Any]) -> Section:
    """Returns the distribution of time."""
    timing = record.get("timing", {})
    parts = {name: timing[name] for name in TIME_PARTS if timing.get(name)}
    if not parts or not timing.get("total"):
        return Section("Time", [])
    rows = [[TIME_PARTS[name][0], readable_time(secs), f"{secs / timing['total']:.1%}"] for name, secs in parts.items()]
    rows.append(["all", readable_time(timing["total"]), ""])
    found: list[Table | Picture | str] = [Picture("time", "Where the time went", _time_figure(parts)),
                                          Table(rows, ["part", "time", "share"])]
    if record.get("earlier"):
        found.append(Table([[str(each.get("begin")), str(each.get("status")),
                             readable_time((each.get("timing") or {}).get("total", 0.0))]
                            for each in record["earlier"]], ["begin", "status", "time"], "Before, the run was"))
    return Section("Time", found)


def memory_section(record: Mapping[str, Any], model: Model | None) -> Section:
    """Returns the known numbers on memory and operations."""
    rows = [[f"peak of {device}", readable_bytes(peak)] for device, peak in record.get("peak_memory", {}).items()]
    if model is not None and model.built:
        state = model.state
        trees = {"parameters": state.params, "model state": state.model_state, "optimizer's state": state.opt_state}
        rows += [[f"{name}, on all devices together", readable_bytes(sum(
            leaf.nbytes for leaf in jax.tree.leaves(tree)))] for name, tree in trees.items()]
    if flops := record.get("train_step_flops"):
        rows.append(["operations of a train step, on all devices", readable_number(flops, "FLOP")])
    return Section("Memory and operations", [Table(rows)] if rows else [])


def model_section(model: Model) -> Section:
    """Returns the table of a model's layers."""
    if not model.built:
        return Section("Model", [repr(model)])
    layers, name, total, trainable, state_count = table_of_layers(core_of(model), model.name)
    heading, *rows = summary_cells(layers, name)
    below = [line.partition(": ") for line in totals(layers, total, trainable, state_count)]
    return Section("Model", [Table(rows, heading, is_code=True),
                             Table([[before, after] for before, _, after in below])])


def settings_section(record: Mapping[str, Any]) -> Section:
    """Returns the arguments of `compile` and `fit`, the seed, the strategy, and the rest of the configuration."""
    rows = [[name, _text(record[name])] for name in ("strategy", "replicas", "seed") if name in record]
    rows += [[f"config: {name}", _text(value)] for name, value in record.get("config", {}).items()
             if name not in _ALSO_ARGUMENTS]
    for method in ("compile", "fit"):
        rows += [[f"{method}: {name}", _text(value)] for name, value in record.get(method, {}).items()]
    return Section("Settings", [Table(rows)] if rows else [])


def data_section(record: Mapping[str, Any]) -> Section:
    """Returns the known facts about the data."""
    data = {name: value for name, value in (record.get("data") or {}).items() if value}
    keys = list(dict.fromkeys(key for value in data.values() for key in value))
    rows = [[key, *(_text(value.get(key)) for value in data.values())] for key in keys]
    return Section("Data", [Table(rows, ["", *data])] if rows else [])


def environment_section(record: Mapping[str, Any]) -> Section:
    """Returns the environment of the run."""
    git, rows = record.get("git"), [["begin", _text(record.get("begin"))], ["end", _text(record.get("end"))]]
    rows += [["command", " ".join(record.get("command", []))]] if record.get("command") else []
    if git:
        state = {True: ", with changes", False: "", None: ", perhaps with changes"}[git.get("is_dirty")]
        rows.append(["commit", f"{git['commit']}{state}"])
    rows += [[name, _text(record[name])] for name in ("machine", "devices", "versions") if record.get(name)]
    return Section("Environment", [Table(rows)])


def readable_time(secs: float) -> str:
    """Returns seconds in suitable units.

    >>> readable_time(0.0123), readable_time(75.2), readable_time(7265)
    ('0.012 s', '1 min 15 s', '2 h 1 min')
    """
    if secs < 60:
        return f"{secs:.3f} s" if secs < 1 else f"{secs:.1f} s"
    minutes, left = divmod(round(secs), 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _time_figure(parts: Mapping[str, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 1.35), layout="constrained")
    axis = figure.subplots()
    begin = 0.0
    for name, secs in parts.items():
        text, color = TIME_PARTS[name]
        axis.barh(0, secs, left=begin, color=color, label=text, height=0.8)
        begin += secs
    axis.set(xlim=(0, begin), yticks=[], xlabel="seconds")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(ncols=len(parts), loc="lower left", bbox_to_anchor=(-0.005, 1.0), frameon=False, fontsize=9,
                handlelength=1.0, columnspacing=1.2, borderaxespad=0.2)
    return figure


def _numbers(values: Any) -> list[float]:
    return [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]


def _text(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or UNKNOWN
    if isinstance(value, str) and "T" in value and value[:4].isdecimal():
        try:
            return f"{datetime.datetime.fromisoformat(value):%Y-%m-%d %H:%M:%S %Z}"
        except ValueError:
            return value
    return str(value)
