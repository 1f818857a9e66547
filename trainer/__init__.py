"""A Keras-style trainer for Flax modules: the same numbers on any number of devices."""

import os as _os

# A file of Coqui's `trainer` and `coqui-tts-trainer`, which install a package with this name.
_FOREIGN = "trainer_utils.py"
if _os.path.exists(_os.path.join(_os.path.dirname(__file__), _FOREIGN)):
    from trainer.core.errors import page_url

    raise ImportError(
        f"Two distributions have installed a package `trainer` into {_os.path.dirname(__file__)!r}: trainer-jax and "
        "another one, such as Coqui's `trainer` or `coqui-tts-trainer`. Each has replaced files of the other. Give "
        "each an environment of its own: `pip uninstall trainer coqui-tts-trainer trainer-jax`, then install the one "
        f"that is needed here. See {page_url('errors', 'other-distribution')}")

from trainer.core.calls.public_names import attach_stub  # noqa: E402

# Names of other libraries: the sentences that end their errors.
_MISSING = {
    **dict.fromkeys(("fit", "evaluate", "predict", "compile", "save", "load_weights", "save_weights", "export",
                     "summary"), "It is a method of `trainer.Model`: `model = trainer.Model(MyModule())`."),
    **dict.fromkeys(("set_seed", "seed_everything", "random_seed", "manual_seed"),
                    "Instead: `trainer.utils.set_random_seed(0)`."),
    **dict.fromkeys(("layers", "nn", "Dense", "Conv2D", "Linear", "Module"),
                    "Layers are Flax's: `from flax import linen as nn`"),
    "keras": "Keras's names are in `trainer` itself, such as `trainer.Model` and `trainer.callbacks.EarlyStopping`",
    "activations": "Activations are Flax's, such as `flax.linen.relu`",
    "initializers": "Initializers are JAX's: `jax.nn.initializers`",
    "ops": "Use `jax.numpy`",
    "backend": "Use `jax.numpy`",
    "applications": "Models with pretrained weights are in `trainer.models`",
    "Input": "There is no functional API: the call of a Flax module is the graph, and `trainer.Model(MyModule())` "
             "takes the shapes of its inputs from the first batch",
    "mixed_precision": "Use `compile(precision=\"mixed_bfloat16\")`",
    "save_model": "Use `model.save(path)`",
    "saving": "Use `trainer.load_model` and `Model.save`",
    "preprocessing": "Use `trainer.data.preprocessing`",
    "Trainer": "A model trains itself: `model = trainer.Model(module)`, `model.compile(...)`, `model.fit(...)`",
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments", "TrainerConfig"),
                    "They are arguments of `model.compile(...)`, `model.fit(...)` and callbacks"),
    "LightningModule": "Write a Flax module, and give it to `trainer.Model`",
    "DataLoader": "Give arrays, a generator or PyTorch's loader to `fit`, or make a `trainer.data.Dataset`",
}

# Imported when they are first used: the launcher, which lives in this package too, must start at once and without JAX.
# `import *` must work without scikit-learn.
_load, __dir__, __all__ = attach_stub(__name__, hidden=["TrainerClassifier", "TrainerRegressor"],
                                      missing=_MISSING)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("trainer-jax")
    return _load(name)
