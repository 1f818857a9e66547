"""`Model` and `Sequential`, the state, configuration and weights that they hold, and their files."""

from trainer.model.model import Model, Sequential

__all__ = ["Model", "Sequential"]
