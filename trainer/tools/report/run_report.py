"""The report of a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import jax

from trainer.callbacks.record.run_record import FILE_NAME, FORMAT
from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import naming_file, wrong_type
from trainer.core.files import read_json, replace_file, storage
from trainer.core.types import Data
from trainer.tools.report import predictions, sections
from trainer.tools.report.html_page import HtmlPath, as_html
from trainer.tools.report.markdown import as_markdown, folder_of
from trainer.tools.report.page import Page

if TYPE_CHECKING:
    from trainer.engine.model.model import Model

SUFFIXES = {"html": ".html", "markdown": ".md"}


@explains_arguments
def report(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    model: Model | None = None,
    data: Data | None = None,
    class_names: Sequence[str] | None = None,
    format: Literal["html", "markdown"] = "html",
) -> str:
    """Writes a page about a run, and returns its path, which a notebook shows as the page.

    It contains the curves of the metrics, the distribution of time, memory, the arguments of `compile` and `fit`, the
    data and the environment. With a model, it contains the table of layers; with data too, a confusion matrix for
    labels that are classes, or residuals for labels that are numbers.

    Args:
      folder: the folder of the run, with the `run.json` that `fit` keeps with a `TensorBoard`, `LogTo`,
        `BackupAndRestore` or `RunRecord`; or the path of that file. The run may still be in progress.
      path: the file to write; by default "report.html" or "report.md" in the folder.
      model: a built model, either trained or loaded. If its name or number of parameters differs from the run's, it is
        shown with a warning.
      data: `(x, y)`, or batches of these, for predictions of the model; it must be compiled, so that its loss is known.
      class_names: names of the classes, for the confusion matrix.
      format: "html" is a single self-contained file; "markdown" has its figures in a folder next to it.

    Raises:
      FileNotFoundError: if the folder has no `run.json`.
      NotADirectoryError: for another file.
      ImportError: if matplotlib or Jinja2 is not installed.
      TypeError: if the names of classes are not a list.
      ValueError: if `run.json` is not of this package, for data without a model, if the numbers of rows and labels
        differ, or for an unknown format.

    Example:

    >>> import numpy as np, trainer
    >>> from flax import linen as nn
    >>> model = trainer.Model(nn.Dense(1))
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((8, 2)); y = np.ones((8, 1))
    >>> record = trainer.callbacks.RunRecord("run")
    >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[record])
    >>> report("run", model=model, data=(x, y))
    'run/report.html'
    """
    folder = storage.as_place("folder", folder, "the path of a folder")
    if storage.is_file(folder):
        if os.path.basename(folder) != FILE_NAME:
            raise NotADirectoryError(f"`folder` must be the folder of a run, or its {FILE_NAME}. Received: {folder!r}, "
                                     "which is another file.")
        folder = os.path.dirname(folder) or os.curdir
    arguments.check_word("format", format, SUFFIXES)
    if data is not None and model is None:
        raise ValueError("`data` is for a model to predict. Give it as `model`, too.")
    if model is not None and not hasattr(model, "predict_on_batch"):
        raise wrong_type("model", model, "a `trainer.Model`")
    if class_names is not None and (isinstance(class_names, (str, bytes, Set, Mapping)) or not hasattr(
            class_names, "__len__")):
        raise wrong_type("class_names", class_names, "a list of names, in the order of the classes")
    if class_names is not None and data is None:
        raise ValueError("`class_names` is for the confusion matrix. Give `data`, too.")
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"A report is made with matplotlib and Jinja2, and {error.name} cannot be imported. Install "
                          "both with `pip install 'trainer-jax[plot]'`.") from error
    target = os.path.join(folder, f"report{SUFFIXES[format]}") if path is None else storage.as_place("path", path)
    record = _read(folder)
    if model is not None:
        _compare(model, record.get("model", {}), folder)
    page = _page(folder, record, model, data, class_names)
    footer = f"From {FILE_NAME} in {storage.absolute(folder)}."
    if format == "html":
        html = as_html(page, footer)
        _write(target, html.encode())
        return HtmlPath(target, html)
    text, files = as_markdown(page, footer, folder_of(target))
    for name, content in files.items():
        _write(os.path.join(os.path.dirname(target), folder_of(target), name), content)
    _write(target, text.encode())
    return target


def _page(folder: str, record: dict[str, Any], model: Model | None, data: Data | None,
          class_names: Sequence[str] | None) -> Page:
    with naming_file(os.path.join(folder, FILE_NAME)):
        curves, time = sections.curves_section(record), sections.time_section(record)
        others = [sections.memory_section(record, model), sections.settings_section(record),
                  sections.data_section(record), sections.environment_section(record)]
        facts, name = sections.facts(record), record.get("model", {}).get("name") or "Run"
    found = [curves]
    if model is not None and data is not None:
        found.append(predictions.section_of(model, data, class_names))
    found.append(time)
    if model is not None:
        found.append(sections.model_section(model))
    return Page(name, record.get("status", "unknown"), facts, [section for section in found + others if section.parts])


def _compare(model: Model, recorded: Mapping[str, Any], folder: str) -> None:
    """Warns if a model differs from the model of the run."""
    here = {"name": model.name,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.state.params)) if model.built else None}
    differ = [f"{name} (received {here[name]!r}, in {FILE_NAME} {recorded[name]!r})" for name in here
              if here[name] is not None and recorded.get(name) and here[name] != recorded[name]]
    if differ:
        warnings.warn(f"`model` does not match the run in {folder!r}: it differs in {' and '.join(differ)}. The page "
                      "has the curves of the run, and the layers and predictions of this model.",
                      stacklevel=user_stacklevel())


def _read(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, FILE_NAME)
    if not storage.exists(path):
        raise FileNotFoundError(
            f"{folder!r} has no {FILE_NAME}, of which a report is made. `fit` keeps it in the folder of "
            "`RunRecord(folder)`, `TensorBoard`, `LogTo` of `JSONLines` or `TensorBoardFiles`, or `BackupAndRestore("
            "delete_checkpoint=False)`; trackers such as W&B keep none.")
    record = read_json(path, folder)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path!r} is not what this version of the trainer writes.")
    return record


def _write(path: str, content: bytes) -> None:
    storage.make_folder(os.path.dirname(path))
    replace_file(path, content)
