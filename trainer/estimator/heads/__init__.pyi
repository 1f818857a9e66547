from trainer.estimator.heads.base import Head as Head
from trainer.estimator.heads.binary_class import BinaryClassHead as BinaryClassHead
from trainer.estimator.heads.multi_class import MultiClassHead as MultiClassHead
from trainer.estimator.heads.multi_head import MultiHead as MultiHead
from trainer.estimator.heads.multi_label import MultiLabelHead as MultiLabelHead
from trainer.estimator.heads.regression import RegressionHead as RegressionHead
