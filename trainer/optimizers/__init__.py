"""Optimizers with Keras's names and numbers, and wrappers of optax transformations."""

from trainer.core.calls.public_names import attach_stub

_FOREIGN_NAMES = {
    **{f"{name}Optimizer": f"It is `trainer.optimizers.{name}`."  # of TensorFlow 1
       for name in ("Adadelta", "Adagrad", "Adam", "Ftrl", "RMSprop")},
    **dict.fromkeys(("GradientDescentOptimizer", "MomentumOptimizer"), "Instead: `SGD(0.01, momentum=0.9)`."),
    "RMSPropOptimizer": "It is `trainer.optimizers.RMSprop`.",
    **dict.fromkeys(("lr_scheduler", "learning_rate_schedule"), "They are in `trainer.optimizers.schedules`."),
    **dict.fromkeys(("chain", "clip_by_global_norm"), "Give `clipnorm`, `clipvalue` or `global_clipnorm` to an "
                    "optimizer, or an `optax.chain(...)` to `compile`."),
    **dict.fromkeys(("RAdam", "Rprop", "LBFGS", "Sophia", "Shampoo", "LARS"),
                    "`compile` takes optax's transformations, such as `optax.radam(0.001)`."),
}

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=_FOREIGN_NAMES)
