"""Keras's preprocessing layers: text, categories and numbers of tables to arrays that a model takes.

Owns the layers, their statistics and vocabularies, and the JSON file of a layer. Layers run on the host, over NumPy
arrays; layers of numbers also in a module, as constants of its program. The room knows no model.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
