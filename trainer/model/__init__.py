"""`Model` and `Sequential`: what users see, and what a model holds: its state, configuration, weights and files."""

from trainer.model.model import Model, Sequential

__all__ = ["Model", "Sequential"]
