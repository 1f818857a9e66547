"""Metrics with Keras 3's names, arguments and numbers, as objects and as pure functions of their accumulators.

To add a metric, write a class in the module that fits (see `Metric`, `MeanMetricWrapper` and `LossMetric`), and add it
to `registry.CLASSES` and to the stub beside this file.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
