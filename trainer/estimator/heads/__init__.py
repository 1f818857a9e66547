"""Heads: loss, metrics, predictions and label encoding of a task, from logits."""

from trainer.estimator.heads.base import Head
from trainer.estimator.heads.binary_class import BinaryClassHead
from trainer.estimator.heads.multi_class import MultiClassHead
from trainer.estimator.heads.multi_head import MultiHead
from trainer.estimator.heads.multi_label import MultiLabelHead
from trainer.estimator.heads.regression import RegressionHead

__all__ = ["BinaryClassHead", "Head", "MultiClassHead", "MultiHead", "MultiLabelHead", "RegressionHead"]
