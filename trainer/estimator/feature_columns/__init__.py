"""Feature columns with TensorFlow's names and numbers: how named features become the input of a model.

Owns the two halves: `HostTransform`, which makes numbers of a batch's strings on the host, and Flax modules, which make
the input of a model of these numbers on the device. It must not know of models, losses or input pipelines.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
