"""Metrics with Keras 3's names, arguments and numbers, as objects and as pure functions of their accumulators.

A new metric is one class in the module it fits (see `Metric`, `MeanMetricWrapper` and `LossMetric`), listed in
`registry.CLASSES` and in the stub beside this file.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
