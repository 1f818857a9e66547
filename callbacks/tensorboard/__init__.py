"""TensorBoard: event files, embeddings, and the callback that writes them."""

from trainer.callbacks.tensorboard.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
