"""Partitioners of variables, as in `tf.distribute`. Only tables of `nn.Embed` are split."""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
