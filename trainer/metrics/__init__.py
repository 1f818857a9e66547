"""Metrics with Keras 3's names, arguments and numbers, as objects and as pure functions of their accumulators.

To add a metric, write a class in the module that fits (see `Metric`, `MeanMetricWrapper` and `LossMetric`), and add it
to `registry.CLASSES` and to the stub beside this file.
"""

from trainer.core.calls.public_names import attach_stub

_CONFUSION = "Of predictions: `sklearn.metrics.confusion_matrix(labels, model.predict(x).argmax(-1))`."
_FOREIGN_NAMES = {  # of torchmetrics and scikit-learn
    **dict.fromkeys(("AUROC", "ROCAUC", "BinaryAUROC", "roc_auc_score"), "Instead: `AUC()`."),
    **dict.fromkeys(("AveragePrecision", "BinaryAveragePrecision", "average_precision_score"),
                    "Instead: `AUC(curve=\"PR\")`."),
    **dict.fromkeys(("accuracy_score", "MulticlassAccuracy"), "Instead: `SparseCategoricalAccuracy()`, or `compile("
                    "metrics=[\"accuracy\"])`."),
    **dict.fromkeys(("f1_score", "BinaryF1Score", "MulticlassF1Score"), "Instead: `F1Score()`, of one-hot labels."),
    **dict.fromkeys(("precision_score", "BinaryPrecision"), "Instead: `Precision()`."),
    **dict.fromkeys(("recall_score", "BinaryRecall", "Sensitivity"), "Instead: `Recall()`."),
    **dict.fromkeys(("ConfusionMatrix", "confusion_matrix", "BinaryConfusionMatrix"), _CONFUSION),
    **dict.fromkeys(("MAE", "mae"), "Instead: `MeanAbsoluteError()`."),
    **dict.fromkeys(("MSE", "mse"), "Instead: `MeanSquaredError()`."),
    **dict.fromkeys(("RMSE", "rmse"), "Instead: `RootMeanSquaredError()`."),
    "MeanMetric": "Instead: `Mean()`.",
    "MetricCollection": "Instead: a list, `compile(metrics=[...])`.",
    "Perplexity": "Instead: `float(np.exp(logs[\"loss\"]))` of `evaluate`.",
}

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=_FOREIGN_NAMES)
