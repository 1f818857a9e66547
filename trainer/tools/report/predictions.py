"""The section of a report on a model's predictions: a confusion matrix, or residuals.

Owns the choice between both by the model, its loss and its labels. If neither suits, a sentence explains why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.core.errors import brief, describe
from trainer.core.types import Data
from trainer.engine.model.core.model_core import core_of
from trainer.tools.report.page import UNKNOWN, Picture, Section, Table

if TYPE_CHECKING:
    from trainer.engine.model.model import Model

MAX_MATRIX_CLASSES = 40  # for more classes, only the most frequent confusions are listed
MAX_NUMBERED_CLASSES = 15  # for more classes, cells have a color and no number
MAX_LISTED = 12
MAX_POINTS = 5000  # in a scatter plot
COLOR = "#1f6fb4"


def section_of(model: Model, data: Data, class_names: Sequence[str] | None) -> Section:
    """Returns the section on a model's predictions for some data."""
    labels, outputs = labels_and_outputs(model, data)
    title = f"Predictions for {len(labels) if labels is not None else 0:,} rows"
    if labels is None or outputs is None:
        return Section("Predictions", ["There is nothing to compare: the model has several outputs, or the data have "
                                       "no single array of labels."])
    kind = core_of(model).configuration.loss.kinds if core_of(model).configuration.is_compiled else None
    classes = as_classes(labels, outputs, kind if isinstance(kind, str) else "")
    if classes is not None:
        return Section(title, _of_classes(*classes, class_names))
    if labels.size == outputs.size and np.issubdtype(labels.dtype, np.number):
        return Section(title, _of_numbers(labels.reshape(-1).astype(float), outputs.reshape(-1).astype(float)))
    return Section(title, [f"Labels ({describe(labels)}) and outputs ({describe(outputs)}) are neither "
                           "classes nor numbers to subtract."])


def labels_and_outputs(model: Model, data: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the labels of all rows, and the model's outputs for them; None if they are not a single array.

    Args:
      data: `(x, y)`, or batches of these, which are read once.

    Raises:
      ValueError: for other data, or if the numbers of labels and rows differ.
    """
    if isinstance(data, (tuple, list)) and len(data) in (2, 3) and not _is_batch(data[0]):
        outputs = model.predict(data[0], verbose=0)
        _check_rows(data[1], outputs)
        return _one_array([data[1]]), _one_array([outputs])
    all_labels, all_outputs = [], []
    for batch in data:
        if not _is_batch(batch):
            raise ValueError("`data` must be `(x, y)`, or batches of these. Received: batches of "
                             f"{describe(batch)}.")
        all_labels.append(batch[1])
        all_outputs.append(model.predict_on_batch(batch[0]))
        _check_rows(all_labels[-1], all_outputs[-1])
    return _one_array(all_labels), _one_array(all_outputs)


def as_classes(labels: np.ndarray, outputs: np.ndarray, loss: str) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Returns the classes of the rows, the predicted classes, and the number of classes; None without classes.

    Args:
      labels: shape (rows,), (rows, 1) or, for one-hot labels, (rows, classes).
      outputs: shape (rows, classes), or (rows,) or (rows, 1) for two classes.
      loss: the kind of the loss, such as "BinaryCrossentropy(from_logits=True)".

    >>> as_classes(np.array([0, 1]), np.array([[2.0, 1.0], [3.0, 0.0]]), "")
    (array([0, 1]), array([0, 0]), 2)
    """
    rows = len(labels)
    if loss.startswith(("Binary", "Hinge", "SquaredHinge")) and labels.size == outputs.size == rows:
        threshold = 0.0 if "from_logits=True" in loss or "Hinge" in loss else 0.5
        return (labels.reshape(-1) > 0.5).astype(int), (outputs.reshape(-1) > threshold).astype(int), 2
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        return None
    count = outputs.shape[1]
    if labels.size == rows:
        flat = labels.reshape(-1)
        is_whole = np.issubdtype(flat.dtype, np.integer) or (
            loss.startswith("Sparse") and bool((flat == np.round(flat)).all()))
        if not is_whole or flat.min(initial=0) < 0 or flat.max(initial=0) >= count:
            return None
        return flat.astype(int), outputs.argmax(-1), count
    is_one_hot = labels.shape == outputs.shape and np.isin(labels, (0, 1)).all() and (labels.sum(-1) == 1).all()
    return (labels.argmax(-1), outputs.argmax(-1), count) if is_one_hot else None


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, count: int) -> np.ndarray:
    """Returns the number of rows for each pair of actual class (first axis) and predicted class (second axis).

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.bincount(labels * count + predicted, minlength=count * count).reshape(count, count)


def _of_classes(labels: np.ndarray, predicted: np.ndarray, count: int,
                class_names: Sequence[str] | None) -> list[Table | Picture | str]:
    if class_names is not None and len(class_names) != count:
        raise ValueError(f"`class_names` must be the names of the {count} classes. Received: {len(class_names)} names.")
    names = [str(name) for name in class_names] if class_names is not None else [str(index) for index in range(count)]
    matrix = confusion_matrix(labels, predicted, count)
    right = int(np.trace(matrix))
    share = right / max(len(labels), 1)
    parts: list[Table | Picture | str] = [f"{right:,} of {len(labels):,} rows are right: {share:.2%}."]
    if count <= MAX_MATRIX_CLASSES:
        parts.append(Picture("confusion", "Confusion matrix: classes down, predictions across", _matrix(matrix, names)))
    wrong = matrix * (1 - np.eye(count, dtype=int))
    pairs = sorted(zip(*np.nonzero(wrong), strict=True), key=lambda pair: -wrong[pair])[:MAX_LISTED]
    if count <= MAX_MATRIX_CLASSES:
        hits, of_class, of_prediction = np.diag(matrix), matrix.sum(1), matrix.sum(0)
        parts.append(Table([[names[index], f"{of_class[index]:,}", _share(hits[index], of_prediction[index]),
                             _share(hits[index], of_class[index])] for index in range(count)],
                           ["class", "rows", "precision", "recall"]))
    if pairs and count > 2:
        parts.append(Table([[names[true], names[other], f"{wrong[true, other]:,}"] for true, other in pairs],
                           ["class", "taken for", "rows"], "What is confused most"))
    return parts


def _matrix(matrix: np.ndarray, names: list[str]) -> Any:
    from matplotlib.figure import Figure

    count = len(names)
    side = min(max(2.8, 0.38 * count + 1.2), 8.0)
    figure = Figure(figsize=(side + 0.9, side), layout="constrained")
    axis = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="class", xticks=range(count), yticks=range(count))
    is_long = max(map(len, names)) > 3
    names = list(map(brief, names))
    axis.set_xticklabels(names, parse_math=False, rotation=45 if is_long else 0, ha="right" if is_long else "center",
                         rotation_mode="anchor" if is_long else None)
    axis.set_yticklabels(names, parse_math=False)
    if count <= MAX_NUMBERED_CLASSES:
        for row, column in np.ndindex(matrix.shape):
            if matrix[row, column]:
                axis.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", fontsize=7.5,
                          color="white" if shares[row, column] > 0.55 else "#1c2430")
    figure.colorbar(image, ax=axis, shrink=0.8, label="share of the class")
    return figure


def _of_numbers(labels: np.ndarray, outputs: np.ndarray) -> list[Table | Picture | str]:
    from matplotlib.figure import Figure

    finite = np.isfinite(labels) & np.isfinite(outputs)
    parts: list[Table | Picture | str] = []
    if not finite.all():
        parts.append(f"{int((~finite).sum()):,} of {len(finite):,} values are not finite, and left out.")
    labels, outputs = labels[finite], outputs[finite]
    if not len(labels):
        return [*parts, "There is no value to show."]
    residuals = outputs - labels
    variance = float(np.var(labels))
    rows = [["mean of the residuals", f"{residuals.mean():.4g}"],
            ["mean absolute error", f"{np.abs(residuals).mean():.4g}"],
            ["root of the mean squared error", f"{np.sqrt(np.square(residuals).mean()):.4g}"],
            ["R²", f"{1 - np.square(residuals).mean() / variance:.4g}" if variance else UNKNOWN]]
    some = np.random.default_rng(0).permutation(len(labels))[:MAX_POINTS]
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = [min(labels.min(), outputs.min()), max(labels.max(), outputs.max())]
    left.plot(ends, ends, color="#8a97a6", linewidth=1)
    left.scatter(labels[some], outputs[some], s=9, alpha=0.5, color=COLOR, linewidths=0)
    left.set(xlabel="label", ylabel="prediction")
    right.hist(residuals, bins=40, color=COLOR)
    right.set(xlabel="prediction minus label", ylabel="values")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    picture = Picture("residuals", "Predictions over labels, and a histogram of the residuals", figure)
    return [*parts, picture, Table(rows)]


def _check_rows(labels: Any, outputs: Any) -> None:
    label_array, output_array = _one_array([labels]), _one_array([outputs])
    if label_array is not None and output_array is not None and len(label_array) != len(output_array):
        raise ValueError(f"`data` must be `(x, y)` with a label for each row. Received: {len(output_array)} rows, and "
                         f"{len(label_array)} labels.")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else UNKNOWN


def _is_batch(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) in (2, 3) and not np.isscalar(value[0])


def _one_array(parts: list[Any]) -> np.ndarray | None:
    if not parts or not all(hasattr(part, "shape") or isinstance(part, list) for part in parts):
        return None
    return np.concatenate([np.asarray(part) for part in parts])
