"""Names of models of Keras, PyTorch and Lightning that models here lack, and methods that nothing here calls."""

from __future__ import annotations

import warnings

_MODE = "`fit` trains, `evaluate` and `predict` do not: they pass the module its flag."
_PLACE = "A strategy places a model: make it in `with trainer.distribute.OneDeviceStrategy(\"gpu:0\").scope():`."
_OF_LIGHTNING = {
    "training_step": "Override `train_step(self, state, batch)`.",
    "validation_step": "Override `test_step(self, state, batch)`.",
    "configure_optimizers": "Give the optimizer to `compile`.",
}
#: Sentences that end the errors for these attributes.
NAMES = {
    "_core": "Its `__init__` has to call `super().__init__(module)` first, with the Flax module that has the layers.",
    "params": "Instead: `model.state.params`; `set_weights(weights)` sets them.",
    "lora": "Instead: `trainer.lora(model, rank=8)`, which returns a model with adapters.",
    "forward": "Outputs are `predict(x)`, or `model(x)`.",
    "call": "Outputs are `predict(x)`, or `model(x)`.",
    "save_pretrained": "Instead: `save_weights(path)`, or `trainer.models.save_hf_weights(model, folder)`.",
    "save_model": "Instead: `save(path)`.",
    "save_checkpoint": "Instead: `save(path)`, or the callback `ModelCheckpoint(path)`.",
    "load_from_checkpoint": "Instead: `trainer.load(path, model)`; `BackupAndRestore(folder)` resumes a run.",
    "opt_state": "Instead: `state.opt_state`.",
    "tx": "Instead: `optimizer`.",
    "freeze": "Instead: `compile(freeze=[...])`, with patterns of paths.",
    "tabulate": "Instead: `summary()`.",
    "lr": "Instead: `optimizer.learning_rate`.", "learning_rate": "Instead: `optimizer.learning_rate`.",
    "device": _PLACE,
    "init": "Instead: `build(x)` makes the variables, which `state.params` and `state.model_state` hold.",
    "generate": "Instead: `trainer.models.generate(model, prompts, max_new_tokens)`.",
    "add_loss": "In the module: `self.sow(\"losses\", name, value)`; or override `compute_loss`.",
    "add_metric": "Instead: `compile(metrics=[...])`, or a metric that `train_step` updates.",
    "log": "A step returns its logs: `return {\"loss\": loss, \"my_log\": value}, state`.",
    "fit_generator": "`fit` takes generators.",
    "evaluate_generator": "`evaluate` takes generators.",
    "predict_generator": "`predict` takes generators.",
    "predict_classes": "Instead: `predict(x).argmax(axis=-1)`.",
    "predict_proba": "Instead: `predict(x)`.",
    "to_json": "Configurations are the arguments of the Flax module; `save(path)` saves weights and state, "
               "`export(path)` the program.",
    **dict.fromkeys(("inputs", "outputs", "input_shape", "output_shape", "input", "output"),
                    "Shapes of inputs come from the data, for each call anew; `summary()` shows the layers."),
    "resume": "Instead: `fit` with the callback `BackupAndRestore(folder)`, twice with the same arguments.",
    "quantize": "Instead: `compile(precision=\"mixed_bfloat16\")`, or `export` and a quantizer of that format.",
    "step": "Instead: `state.step`, the number of updates; `train_on_batch(x, y)` makes a step.",
    **dict.fromkeys(("zero_grad", "backward"), "`fit` computes and applies the gradients; `train_on_batch(x, y)` makes "
                    "a step."),
    "add": "A module has its layers: `trainer.Sequential([...])` takes all of them.",
    "reset_states": "Metrics begin anew in each epoch; states of recurrent layers are arguments in Flax.",
    **_OF_LIGHTNING,
    "score": "Instead: `evaluate(x, y)`.",
    "plot": "Instead: `history.plot()` of what `fit` returns, or `trainer.utils.plot_model(model)`.",
    "train": _MODE, "eval": _MODE,
    "to": _PLACE, "cuda": _PLACE, "cpu": _PLACE,
    "load": "Instead: `trainer.load(path, model)`, or `load_weights(path)` for weights alone.",
    "from_pretrained": "Instead: `trainer.Model(trainer.models.from_hf(folder))`, and `models.load_hf_weights`.",
    "named_parameters": "Instead: `state.params`, a tree; `summary()` prints it.",
    "parameters": "Instead: `trainable_weights`, or `state.params` for the tree.",
    "state_dict": "Instead: `save_weights(path)`, or `get_weights()`.",
    "load_state_dict": "Instead: `load_weights(path)`, or `set_weights(weights)`.",
}
_UNCALLED = {
    "call": "The `__call__` of the Flax module computes the outputs.",
    "forward": "The `__call__` of the Flax module computes the outputs.",
    **_OF_LIGHTNING,
}


def warn_of_uncalled_methods(subclass: type) -> None:
    """Warns of methods that a subclass defines for another library to call."""
    for name in _UNCALLED.keys() & vars(subclass).keys():
        warnings.warn(f"`fit` does not call `{subclass.__name__}.{name}`. {_UNCALLED[name]}", stacklevel=3)
