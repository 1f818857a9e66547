"""Names of Keras and scikit-learn that estimators lack: the sentences that end their errors."""

from __future__ import annotations

from collections.abc import Mapping

INPUT = "`lambda: trainer.data.Dataset.from_arrays((features, labels)).batch(32)`"
_TRAIN = f"Call `train(input_fn)`, whose function returns the data, such as {INPUT}."

# : Of estimators.
METHODS: Mapping[str, str] = {
    "compile": "The estimator takes its optimizer, and the `EstimatorSpec` or the head its loss.",
    "export_savedmodel": "Its new name: `export_saved_model`.",
    "fit": _TRAIN,
    "partial_fit": _TRAIN,
    "predict_classes": "`predict(input_fn)` yields dicts, which have the classes.",
    "predict_proba": "`predict(input_fn)` yields dicts, which have the probabilities.",
    "score": f"Call `evaluate(input_fn)`, whose function returns the data, such as {INPUT}.",
    "summary": "`get_variable_names()` lists the weights.",
}

_REPEATED = "Let `input_fn` return `dataset.repeat(epochs)`."
# : Arguments of `train`, `evaluate` and `predict`, and of the constructors.
CALLS: Mapping[str, str] = {
    "input_fn": f"It is a function that returns the data, such as {INPUT}.",
    "x": f"Give `input_fn`, a function that returns the data, such as {INPUT}.",
    "epochs": _REPEATED,
    "num_epochs": _REPEATED,
    "batch_size": f"`input_fn` returns batches: {INPUT}.",
}
EVALUATE: Mapping[str, str] = {**CALLS, "max_steps": "Give `steps`, the batches of an evaluation; None reads all data."}
CONSTRUCTORS: Mapping[str, str] = {
    "feature_columns": "They say how features become numbers: `[trainer.estimator.numeric_column(\"age\")]`.",
    "columns": "Give `feature_columns`.",
    "units": "Give `hidden_units`.",
    "num_classes": "Give `n_classes`.",
    "learning_rate": "Give it to the optimizer: `optimizer=trainer.optimizers.Adam(learning_rate=...)`.",
}
TRAIN_SPEC: Mapping[str, str] = {**CALLS, "steps": "Give `max_steps`, the global step to train to."}
