"""Feature columns with TensorFlow's names and numbers: from named features to the input of a model.

Owns both halves: `HostTransform`, which converts features to numbers on the host, and the Flax modules that compute the
input of a model from these numbers on the device. Does not depend on models, losses or input pipelines.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
