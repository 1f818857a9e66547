"""Wrong calls that newcomers make, from Keras, PyTorch and habit, and the words by which their messages help.

A message helps if it names what was received, and the fix. Each call raises before anything trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import trainer
from trainer import callbacks, data, estimator, losses, metrics, models, optimizers
from trainer.data import augmentation

X, Y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
_IMAGES = np.ones((8, 8, 8, 3), np.float32)
IDS = np.arange(8) % 3
VALUE = "asks for the value of an array"
LOOK = r"jax\.debug\.print.*run_eagerly=True"


class Wrong(NamedTuple):
    """A wrong call.

    Attributes:
      call: the call, which raises.
      received: a pattern of the fault in the message or its notes.
      fix: a pattern of the fix.
    """

    call: Callable[[], Any]
    received: str
    fix: str


def _model(units: int = 1, module: Any = None, kind: type = trainer.Model, **compiled: Any) -> trainer.Model:
    model = kind(module or nn.Dense(units))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def _fit(model: trainer.Model | None = None, **arguments: Any) -> Any:
    return (model or _model()).fit(**{"x": X, "y": Y, "verbose": 0, **arguments})


def _with_another_kernel() -> None:
    model = _built()
    model.state.params["kernel"] = jnp.zeros((8, 3))
    model.predict(X, verbose=0)


def _two_networks() -> trainer.Model:
    model = trainer.Model({"first": nn.Dense(1), "last": nn.Dense(1)})
    model.compile({"first": "sgd", "last": "sgd"})
    model.build({"first": X, "last": X})
    return model


def _batches() -> data.Dataset:
    return data.Dataset.from_arrays((X, Y)).batch(4)


def _of_numpy(y_true: Any, y_pred: Any) -> Any:
    return np.asarray(y_true == y_pred).mean()


def _built() -> trainer.Model:
    model = _model()
    model.build(X)
    return model


def _overriding(**methods: Callable[..., Any]) -> trainer.Model:
    return _model(kind=type("Own", (trainer.Model,), methods))


def _step_that(use: Callable[[Any], Any]) -> trainer.Model:
    """Returns a model whose train step does something with its loss."""
    def train_step(self: Any, state: Any, batch: Any) -> Any:
        x, y, weights = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(params: Any) -> Any:
            outputs, model_state = self.apply(params, state, x, training=True)
            return self.compute_loss(x, y, outputs, weights), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        use(loss)
        return {"loss": loss}, state.apply_gradients(grads, model_state=model_state)
    return _overriding(train_step=train_step)


def _step_with(use: Callable[[Any, Any, Any, Any], Any]) -> trainer.Model:
    """Returns a model whose train step calls a function of the model, the state, the inputs and the labels."""
    def train_step(self: Any, state: Any, batch: Any) -> Any:
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)
        return {"loss": use(self, state, x, y)}, state
    return _overriding(train_step=train_step)


def _assigned(state: Any) -> None:
    model = _built()
    model.state = state(model)
def _load_adapters() -> None:
    adapted = trainer.lora(_built(), rank=1)
    adapted.build(X)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_adapters(f"{folder}/adapters.safetensors")
        _built().load_weights(f"{folder}/adapters.safetensors")


def _one_device() -> trainer.distribute.Strategy:
    return trainer.distribute.OneDeviceStrategy("cpu:0")


def _regressor() -> Any:
    return estimator.LinearRegressor(feature_columns=[estimator.numeric_column("age")])


class _WithoutModule(trainer.Model):
    def __init__(self):
        super().__init__()  # type: ignore[call-arg]


class _WithoutSuper(trainer.Model):
    def __init__(self):
        self.dense = nn.Dense(1)


class _Appends(metrics.Metric):
    def __init__(self):
        super().__init__(name="appends")
        self.values = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.append(y_pred)

    def result(self):
        return jnp.mean(jnp.concatenate(self.values))


class _OfLabels(nn.Module):
    @nn.compact
    def __call__(self, x, labels):
        return jnp.mean((nn.Dense(1)(x) - labels) ** 2)


class _ReturnsNothing(nn.Module):
    @nn.compact
    def __call__(self, x):
        nn.Dense(1)(x)


class _HasInit(nn.Module):
    def __init__(self):
        self.dense = nn.Dense(1)

    def __call__(self, x):
        return self.dense(x)


class _HasForward(nn.Module):
    @nn.compact
    def forward(self, x):
        return nn.Dense(1)(x)


class _ReadsNames(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x["size"])


class _Branches(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x if x.mean() > 0 else -x)


class _WithoutLogs(callbacks.Callback):
    def on_epoch_end(self, epoch):  # type: ignore[override]
        pass


class _NamesLoss(callbacks.Callback):
    def on_train_batch_end(self, batch, loss):  # type: ignore[override]
        pass


class _HasBuild(nn.Module):
    def build(self, shape):
        self.w = self.param("w", nn.initializers.ones, (shape[-1], 1))

    def __call__(self, x):
        return x @ self.w


class _OfTokens(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask=None, *, training=False):
        return nn.Dense(1)(nn.Embed(3, 4)(tokens)[:, 0])


class _TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x), nn.Dense(1)(x)


def _reading(log: str) -> callbacks.Callback:
    return callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs[log])


def _rows(**columns: str) -> Any:
    return data.Dataset.from_columns([{"age": 1.0, "city": "Rome", "y": 0.0}] * 4, **columns)  # type: ignore[arg-type]


_BATCHES = data.Dataset.from_arrays((X, Y)).batch(4)
_SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)
_DENSE = losses.CategoricalCrossentropy(from_logits=True)

CALLS = {
    # data
    "fit without targets": Wrong(lambda: _fit(y=None), "`y` was not given", r"`fit\(x, y\)`"),
    "evaluate without targets": Wrong(lambda: _built().evaluate(X, verbose=0), "`y` was not given",
                                      r"Pass `evaluate\(x, y\)`"),
    "validation without targets": Wrong(lambda: _fit(validation_data=X), "about `validation_data`",
                                        r"Pass `validation_data=\(x, y\)`"),
    "fewer targets than rows": Wrong(lambda: _fit(y=Y[:5]), r"`x` of shape \(8, 4\), `y` of shape \(5, 1\)",
                                     "unequal-rows"),
    "transposed targets": Wrong(lambda: _fit(y=Y.T), r"`y` of shape \(1, 8\)", "unequal-rows"),
    "a column of text": Wrong(lambda: _model().fit(_rows(x=["age", "city"], y="y").batch(2), verbose=0),
                              r"`x\[1\]` \(the column 'city'\)", "Make numbers of text"),
    "numbers that are objects": Wrong(lambda: _fit(x=np.array([[1.0, None]] * 8, object)), "dtype object",
                                      r'\.astype\("float32"\)'),
    "an unknown column": Wrong(lambda: _rows(x=["agee"], y="y"), "no column 'agee'", "Did you mean 'age'"),
    "a dataset of rows": Wrong(lambda: _model().fit(data.Dataset.from_arrays((X, Y)), verbose=0),
                               "has rows as elements", r"`batch\(batch_size\)`"),
    "a batch size for batches": Wrong(lambda: _model().fit(_BATCHES, batch_size=4, verbose=0), "batch_size=4",
                                      "should not be passed"),
    "targets beside a dataset": Wrong(lambda: _model().fit(_BATCHES, Y, verbose=0), "y=array of shape",
                                      "should not be passed"),
    "a batch of lists": Wrong(lambda: _model().fit([(X.tolist(), IDS.tolist())], verbose=0), "`x` of type list",
                              r"`\[\(np\.array\(x\), np\.array\(y\)\), \.\.\.\]`"),
    "a split of a dataset": Wrong(lambda: _model().fit(_BATCHES, validation_split=0.2, verbose=0),
                                  r"Received: Dataset", "Pass `validation_data`"),
    "a single row": Wrong(lambda: _built().predict(X[0], verbose=0), r"rows of shape \(\)", r"`x\[None\]`"),
    "more features": Wrong(lambda: _built().predict(np.ones((3, 9)), verbose=0), r"shape \(9,\)",
                           r"built on rows of shape \(4,\)"),
    "a generator of rows": Wrong(lambda: _model().fit(iter([(X[0], Y[0])] * 4), verbose=0), r"`x` of shape \(4,\)",
                                 r"`DataLoader\(data, batch_size=32\)`"),
    "a function for a generator": Wrong(lambda: _model().fit(_rows, verbose=0), "type: function", r"`_rows\(\)`"),
    "the path of a file": Wrong(lambda: _model().fit("data.csv", verbose=0), "type: str", "is read first"),
    "rows of two lengths": Wrong(lambda: _fit(x=[[1.0, 2.0], [1.0]] * 4), "`x` of type list", "pad_sequences"),
    "one-hot labels for sparse ones": Wrong(lambda: _fit(_model(3, loss=_SPARSE), y=np.eye(3)[IDS]), "are one-hot",
                                            "use CategoricalCrossentropy"),
    "sparse labels for one-hot ones": Wrong(lambda: _fit(_model(3, loss=_DENSE), y=IDS), r"y_true\.shape=\(8,\)",
                                            "use SparseCategoricalCrossentropy"),
    "labels from 1": Wrong(lambda: _fit(_model(3, loss=_SPARSE), y=IDS + 1), "has the label 3",
                           "number the labels from 0"),
    "logits for probabilities": Wrong(
        lambda: _fit(_model(3, loss="sparse_categorical_crossentropy"), x=100 * X, y=IDS), "they look like logits",
        "from_logits=True"),
    "a list of class weights": Wrong(lambda: _fit(class_weight=[1.0, 2.0]), "of type list", r"`\{0: 1\.0, 1: 2\.5\}`"),
    "text for epochs": Wrong(lambda: _fit(epochs="3"), "of type str", "whole number"),
    "an argument of old Keras": Wrong(lambda: _fit(nb_epoch=3), "'nb_epoch'", "'epochs'"),
    "Lightning's checkpoint": Wrong(lambda: _fit(ckpt_path="last"), "'ckpt_path'", "BackupAndRestore"),
    "Lightning's trainer": Wrong(lambda: trainer.Trainer(max_epochs=3), "'Trainer'", r"model\.fit"),
    "workers": Wrong(lambda: _fit(workers=3), "'workers'", "`trainer.utils.PyDataset`"),
    "a class that is not there": Wrong(lambda: trainer.utils.to_categorical([5], 3), "indices from 5", "num_classes=6"),
    # compiling
    "fit before compile": Wrong(lambda: trainer.Model(nn.Dense(1)).fit(X, Y), "before `fit`",
                                r"`compile\(optimizer, loss\)`"),
    "an optimizer's name": Wrong(lambda: _model(optimizer="addam"), "'addam'", "'adam'"),
    "an optimizer's class": Wrong(lambda: _model(optimizer=optimizers.Adam), "Adam itself", r"Call it: Adam\("),
    "optax's function": Wrong(lambda: _model(optimizer=optax.adam), "adam itself", r"Call it: adam\("),
    "lr": Wrong(lambda: optimizers.Adam(lr=0.1), "'lr'", "'learning_rate'"),  # type: ignore[call-arg]
    "decay": Wrong(lambda: optimizers.Adam(0.1, decay=1e-6), "'decay'", "InverseTimeDecay"),  # type: ignore[call-arg]
    "a schedule by name": Wrong(lambda: optimizers.Adam(learning_rate="cosine"), "Received: str", "CosineDecay"),
    "a loss's name": Wrong(lambda: _model(loss="mean_square_error"), "'mean_square_error'", "'mean_squared_error'"),
    "PyTorch's name of a loss": Wrong(lambda: _model(loss="cross_entropy"), "'cross_entropy'",
                                      "'categorical_crossentropy'"),
    "a loss of nothing": Wrong(lambda: _fit(_model(loss=lambda y, y_pred: None)), "Received: NoneType",
                               "must be an array of numbers"),
    "swapped losses": Wrong(lambda: _fit(_model(module=_TwoOutputs(), loss=["mse", _SPARSE]), y=[IDS, Y]),
                            r"loss 'mean_squared_error' of the output 'output_1'", "in the order of the outputs"),
    "swapped metrics": Wrong(
        lambda: _fit(_model(module=_TwoOutputs(), loss=[_SPARSE, "mse"], metrics=[["mae"], ["accuracy"]]), y=[IDS, Y]),
        "metric 'mae' of the output 'output_1'", "in the order of the outputs"),
    "a loss with swapped arguments": Wrong(
        lambda: _fit(_model(3, loss=lambda a, b: optax.softmax_cross_entropy_with_integer_labels(a, b)),
                     y=IDS), "loss '<lambda>'",
        r"for \(y_true, y_pred\) = \(array of shape \(8,\) and dtype int32, array of shape \(8, 3\)"),
    "a metric of other shapes": Wrong(
        lambda: _fit(_model(3, loss=_SPARSE, metrics=[lambda a, b: optax.sigmoid_focal_loss(b, a)]), y=IDS),
        "metric '<lambda>'", r"for \(y_true, y_pred\) = \(array of shape \(8,\) and"),
    "a forgotten flatten": Wrong(
        lambda: _fit(_model(3, loss=_SPARSE), x=np.ones((8, 5, 5, 1), np.float32), y=IDS), r"y_true\.shape=\(8,\)",
        r"`lambda x: x\.reshape\(len\(x\), -1\)`"),
    "smoothed class indices": Wrong(
        lambda: losses.SparseCategoricalCrossentropy(label_smoothing=0.1),  # type: ignore[call-arg]
        "'label_smoothing'", "to_categorical"),
    "equality with class indices": Wrong(lambda: _fit(_model(3, metrics=[metrics.Accuracy()], loss=_SPARSE), y=IDS),
                                         r"y_true\.shape=\(8,\)", r'metrics=\["accuracy"\]'),
    "a metric that appends": Wrong(lambda: _fit(_model(metrics=[_Appends()])), r"`self\.values`", "add_weight"),
    "a metric's name": Wrong(lambda: _model(metrics=["acuracy"]), "'acuracy'", "'accuracy'"),
    "one metric": Wrong(lambda: _model(metrics="acc"), "of type str", "must be a list"),
    "a strategy in compile": Wrong(lambda: _model(strategy="mirrored"), "'strategy'", r"`with strategy\.scope\(\):`"),
    "a rate in compile": Wrong(lambda: _model(learning_rate=0.1), "'learning_rate'", "Give it to the optimizer"),
    "a precision's name": Wrong(lambda: _model(precision="fp16"), "'fp16'", "mixed_float16"),
    "a glob in freeze": Wrong(lambda: _built().compile("sgd", "mse", freeze=["kern*"]), r"'kern\*'", r"'kern\.\*'"),
    # models
    "a model without a module": Wrong(_WithoutModule, "'module'", r"`super\(\).__init__\(module\)`"),
    "a model without super": Wrong(lambda: _WithoutSuper().compile("sgd", "mse"), "'_core'",
                                   r"`super\(\).__init__\(module\)`"),
    "params of a model": Wrong(lambda: _built().params, "'params'", r"`model\.state\.params`"),
    "params to a state": Wrong(lambda: setattr(_built().state, "params", {}), "`params`", r"state\.replace\(params="),
    "a parameter of another shape": Wrong(_with_another_kernel, r"shape \(4, 1\)", "was replaced after the model was"),
    "gradients without a name": Wrong(
        lambda: _two_networks().state.apply_gradients({"kernel": X}), "'kernel'. Known names: first, last",
        r"`apply_gradients\(first=grads\)`"),
    "Flax's apply": Wrong(lambda: _built().apply({"params": {}}, X), r"`Model\.apply`.*'x'", r"`model\.predict\(x\)`"),
    "Flax's TrainState.create": Wrong(lambda: trainer.TrainState.create(tx=1), "'create'", r"`model\.build\(x\)`"),
    "PyTorch's zero_grad": Wrong(lambda: _built().optimizer.zero_grad(), "'zero_grad'", "Leave it out"),
    "PyTorch's param_groups": Wrong(lambda: optimizers.Adam().param_groups, "'param_groups'", "learning_rate"),
    "two inputs to layers": Wrong(lambda: _fit(_model(module=[nn.Dense(1)], kind=trainer.Sequential), x=[X, X]),
                                  r"(such|no).*: \[array of shape \(8, 4\)", r"`np\.stack\(x\)`.*`fit\(x, y\)`"),
    "a metric of NumPy": Wrong(lambda: _fit(_model(metrics=[_of_numpy])), "metric '_of_numpy'",
                               r"`model\.predict\(x\)`"),
    "variables to a model": Wrong(lambda: trainer.Model(nn.Dense(1), {}), "`Model` takes 2 positional",  # type: ignore[misc]
                                  "`model.state = model.state.replace"),
    "an NNX layer of other features": Wrong(lambda: _fit(_model(module=nnx.Linear(5, 1, rngs=nnx.Rngs(0)))),
                                            "made for 5 features, and gets 4", r"`nnx\.Linear\(4,"),
    "validation data by position": Wrong(lambda: _model().fit(X, Y, X, Y), "arrays, as the third",  # type: ignore[arg-type]
                                         r"validation_data=\(x_val, y_val\)"),
    "two data sets": Wrong(lambda: _model().fit(_batches(), _batches()), "y=Dataset",
                          r"`fit\(train, validation_data=val\)`"),
    "two lists of batches": Wrong(lambda: _model().fit([(X, Y)] * 2, [(X, Y)] * 2), r"y=2 batches like \(array",
                                  r"`fit\(train, validation_data=val\)`"),
    "a list of batches and a pair": Wrong(lambda: _model().fit([(X, Y)] * 2, (X[:3], Y[:3])),
                                          r"y=\(array of shape \(3, 4\)", r"`fit\(train, validation_data=val\)`"),
    "targets that are a data set": Wrong(lambda: _model().fit(X, _batches()), "y=Dataset",
                                         r"`fit\(train, validation_data=val\)`"),
    "the pair of apply": Wrong(lambda: _model().compute_loss(X, Y, (Y, {"batch_stats": {"mean": Y, "var": Y}})),
                               "the model's outputs are", r"`y_pred, model_state = self\.apply"),
    "arrays for a strategy": Wrong(
        lambda: trainer.distribute.OneDeviceStrategy("cpu:0").experimental_distribute_dataset((X, Y)),
        r"array of shape \(8, 4\)", r"`trainer\.data\.Dataset\.from_arrays\(\(x, y\)\)\.batch"),
    "a module's class": Wrong(lambda: trainer.Model(nn.Dense), "the class Dense", r"Call it: Dense\("),
    "the functional API": Wrong(lambda: trainer.Model(inputs=1, outputs=2), "'inputs'",  # type: ignore[call-arg]
                                r"`trainer\.Model\(MyModule\(\)\)`"),
    "layers without a list": Wrong(lambda: trainer.Sequential(nn.Dense(1), nn.Dense(2)),  # type: ignore[misc]
                                   "2 arguments", r"`Sequential\(\[first, second\]\)`"),
    "a layer by name": Wrong(lambda: trainer.Sequential([nn.Dense(3), "relu"]), "'relu'", r"`nn\.relu`"),
    "a Linen module with __init__": Wrong(lambda: _fit(_model(module=_HasInit())), "'parent'", "as fields"),
    "forward": Wrong(lambda: _fit(_model(module=_HasForward())), "not a callable object", "`__call__`"),
    "a layer's output": Wrong(lambda: _model(module=[nn.Dense(1)], kind=trainer.Sequential).layers[-1].output,
                              "'output'", r"`self\.sow\(\"intermediates\", \"hidden\", h\)`"),
    "PyTorch's load": Wrong(lambda: _built().load("a"), "'load'", r"`trainer\.load\(path, model\)`"),
    "ONNX by its suffix": Wrong(lambda: _built().export("a.onnx"), r"'a\.onnx'", '`format="onnx"`'),
    "logs of a history": Wrong(lambda: _fit()["loss"], "'loss'", r"`history\.history\['loss'\]`"),
    "Keras's build": Wrong(lambda: _fit(_model(module=_HasBuild())), "\"_HasBuild\" object has no attribute \"w\"",
                           r"does not call `build`: make 'w' in `setup\(self\)`"),
    "a tokenizer's dict": Wrong(
        lambda: _fit(_model(module=_OfTokens()), x={"input_ids": IDS[:, None], "attention_mask": IDS[:, None]}),
        "'tokens', 'mask'. Received: 'attention_mask', 'input_ids'", "Rename them or leave them out"),
    "a cell for a layer": Wrong(lambda: _fit(_model(module=[nn.LSTMCell(4)], kind=trainer.Sequential)),
                                "LSTMCell is a cell", r"`nn\.RNN\(nn\.LSTMCell\(\.\.\.\)\)`"),
    "a cell of NNX for a layer": Wrong(lambda: _fit(_model(module=nnx.GRUCell(4, 4, rngs=nnx.Rngs(0)))),
                                       "GRUCell is a cell", r"`nnx\.RNN\(nnx\.GRUCell\(\.\.\.\)\)`"),
    "a module without return": Wrong(lambda: _fit(_model(module=_ReturnsNothing())), "NoneType", "with `return`"),
    "a module that reads names": Wrong(lambda: _fit(_model(module=_ReadsNames())), r"array of shape \(8, 4\)",
                                       "give a dict of arrays"),
    "a branch in a module": Wrong(lambda: _fit(_model(module=_Branches())), VALUE, r"`jnp\.where`"),
    "a shape for build": Wrong(lambda: _model().build((None, 4)), r"\(NoneType, int\)", r"np\.zeros\(\(1, 28, 28\)\)"),
    "build by Keras's argument": Wrong(lambda: _model().build(input_shape=(None, 4)), "'input_shape'",
                                       r"np\.zeros\(\(1, 28, 28\)\)"),
    "a summary before build": Wrong(lambda: _model().summary(), "no weights yet", r"`build\(sample\)`"),
    "fewer weights": Wrong(lambda: _built().set_weights(_built().get_weights()[:1]), "has 1 arrays",
                           r"`get_weights\(\)` returns"),
    "a file that is not there": Wrong(lambda: _built().load_weights("nowhere.safetensors"), "'nowhere.safetensors'",
                                      "working directory"),
    "Keras's format": Wrong(lambda: _built().save("model.keras"), r"'model\.keras'", r"Write 'model\.safetensors'"),
    "fit_generator": Wrong(lambda: _built().fit_generator(iter([])), "'fit_generator'", "`fit` takes generators"),
    "PyTorch's to": Wrong(lambda: _built().to("cuda"), "'to'", "OneDeviceStrategy"),
    "the rate's old name": Wrong(lambda: _built().optimizer.lr, "'lr'", "'learning_rate'"),
    # callbacks
    "a callback's class": Wrong(lambda: _fit(callbacks=[callbacks.EarlyStopping]), "of type type", "Give an instance"),
    "a schedule for a callback": Wrong(
        lambda: _fit(callbacks=[optimizers.schedules.CosineDecay(0.1, 10)]), "CosineDecay", "learning_rate=schedule"),
    "a tracker's own callback": Wrong(lambda: callbacks.WandbLogger, "'WandbLogger'", r"loggers\.WandB"),
    "a callback's name": Wrong(lambda: _fit(callbacks=["EarlyStopping"]), "of type str",
                               r"`trainer\.callbacks\.EarlyStopping\(\)`"),
    "a function for a callback": Wrong(lambda: _fit(callbacks=[lambda epoch, logs: None]), "of type function",
                                       r"LambdaCallback\(on_epoch_end=function\)"),
    "a monitor without validation": Wrong(lambda: _fit(callbacks=[callbacks.EarlyStopping(monitor="val_loss")]),
                                          "'val_loss'", "pass `validation_data`"),
    "a monitor's old name": Wrong(
        lambda: _fit(_model(metrics=["accuracy"]), validation_data=(X, Y),
                     callbacks=[callbacks.EarlyStopping(monitor="val_acc")]), "'val_acc'", "'val_accuracy'"),
    "a hook without logs": Wrong(lambda: _fit(callbacks=[_WithoutLogs()]), r"Received: on_epoch_end\(self, epoch\)",
                                 r"`on_epoch_end\(self, epoch, logs=None\)`"),
    "a function without the epoch": Wrong(
        lambda: _fit(callbacks=[callbacks.LambdaCallback(on_epoch_end=lambda logs: None)]),
        r"Received: on_epoch_end\(logs\)\.", r"`on_epoch_end\(epoch, logs=None\)`"),
    "a hook with a loss": Wrong(lambda: _fit(callbacks=[_NamesLoss()]), r"on_train_batch_end\(self, batch, loss\)",
                                r"`on_train_batch_end\(self, batch, logs=None\)`"),
    "a callback's validation data": Wrong(lambda: callbacks.Callback().validation_data, "'validation_data'",
                                          "Give the data to the callback"),
    "a callback's own model": Wrong(lambda: setattr(callbacks.Callback(), "model", _model()), "`model` of the callback",
                                    r"another name: `self\.other = model`"),
    "a log of no validation": Wrong(lambda: _fit(callbacks=[_reading("val_loss")]), "no log 'val_loss'",
                                    r"give `fit\(\.\.\., validation_data=\(x, y\)\)`"),
    "an unknown log": Wrong(lambda: _fit(_model(metrics=["accuracy"]), callbacks=[_reading("acc")]), "no log 'acc'",
                            "Did you mean 'accuracy'"),
    "write_grads": Wrong(lambda: callbacks.TensorBoard("a", write_grads=True),  # type: ignore[call-arg]
                         "'write_grads'", r"`compile\(log_norms=True\)`"),
    "period": Wrong(lambda: callbacks.ModelCheckpoint("a", period=3), "'period'", "`save_freq`"),  # type: ignore[call-arg]
    # steps
    "Keras's train_step": Wrong(lambda: _fit(_overriding(train_step=lambda self, data: {"loss": 0.0})),
                                r"train_step\(data\)", r"`train_step\(self, state, batch\)`"),
    "a step that returns logs": Wrong(lambda: _fit(_overriding(train_step=lambda self, state, batch: {"loss": 0.0})),
                                      r"Received: \{'loss': float\}", r"state\.apply_gradients\(grads\)"),
    "print(float(loss))": Wrong(lambda: _fit(_step_that(lambda loss: print(float(loss)))), VALUE, LOOK),
    "if loss > 1": Wrong(lambda: _fit(_step_that(lambda loss: 1 if loss > 1 else 0)), VALUE, LOOK),
    "loss.item()": Wrong(lambda: _fit(_step_that(lambda loss: loss.item())), VALUE, LOOK),
    "loss.numpy()": Wrong(lambda: _fit(_step_that(lambda loss: loss.numpy())), VALUE, LOOK),
    "a formatted loss": Wrong(lambda: _fit(_step_that(lambda loss: f"{loss:.3f}")), VALUE, LOOK),
    "a loss in NumPy": Wrong(lambda: _fit(_model(loss=lambda y, y_pred: np.mean(np.square(y - y_pred)))), VALUE, LOOK),
    "a metric that is a float": Wrong(lambda: _fit(_model(metrics=[lambda y, y_pred: float(jnp.mean(y_pred))])), VALUE,
                                      LOOK),
    "compute_loss of two": Wrong(lambda: _fit(_overriding(compute_loss=lambda self, y_true, y_pred: 0.0)),
                                 r"compute_loss\(y_true, y_pred\)", r"`compile\(loss=function\)`"),
    "compute_loss without return": Wrong(
        lambda: _fit(_overriding(compute_loss=lambda self, x, y, y_pred, sample_weight: None)), "Received: NoneType",
        "with `return`"),
    "compute_loss of rows": Wrong(
        lambda: _fit(_overriding(compute_loss=lambda self, x, y, y_pred, sample_weight: y_pred[:, 0])),
        r"array of shape \(8,\)", "Take its mean"),
    "a module that returns its loss": Wrong(
        lambda: _fit(_model(module=_OfLabels())), "none for labels", "leave labels out of its call"),
    "a single number for outputs": Wrong(
        lambda: _fit(_model(module=[nn.Dense(3), jnp.mean])), "returned a single number", "a row for each row of `x`"),
    "lora of a model": Wrong(lambda: _model().lora(rank=2), "'lora'", r"`trainer\.lora\(model"),
    "a name of another package": Wrong(
        lambda: trainer.MirroredStrategy(), "'MirroredStrategy'", r"It is `trainer\.distribute\.MirroredStrategy`"),
    "PyTorch's loss": Wrong(lambda: losses.CrossEntropyLoss(), "'CrossEntropyLoss'", "SparseCategoricalCrossentropy"),
    "a GPU that is not there": Wrong(
        lambda: trainer.distribute.MirroredStrategy(devices=["/tpu:0"]), "no 'tpu' backend", "Leave `devices` out"),
    "a list of dicts": Wrong(
        lambda: _fit(x=[{"image": X, "label": Y}], y=None), "named columns", r"`\(batch\['image'\], batch\['label'"),
    "Flax's init of a model": Wrong(
        lambda: _model().init(jax.random.key(0), X), "no attribute 'init'", r"`build\(x\)`"),
    "a tree of weights as the state": Wrong(
        lambda: _assigned(lambda model: model.state.params), "of type dict", r"state\.replace\(params=params\)"),
    "Flax's TrainState": Wrong(
        lambda: _assigned(lambda model: train_state.TrainState.create(
            apply_fn=None, params=model.state.params, tx=optax.sgd(1.0))),
        r"flax\.training\.train_state\.TrainState", r"state\.replace\(params=params\)"),
    "a replicated state": Wrong(
        lambda: _assigned(lambda model: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), model.state)),
        r"array of shape \(2,\)", "leave `flax.jax_utils.replicate` out"),
    "a compiled predict": Wrong(
        lambda: jax.jit(_built().predict)(X), "being traced, by `jax.jit`", "without `jax.jit`"),
    "generate of a model": Wrong(lambda: _model().generate(IDS), "'generate'", r"`trainer\.models\.generate\(model"),
    "Keras's add_loss": Wrong(lambda: _model().add_loss(1.0), "'add_loss'", r"self\.sow"),
    "Lightning's clipping": Wrong(lambda: _model(gradient_clip_val=1.0), "'gradient_clip_val'", "global_clipnorm"),
    "an optax schedule for the optimizer": Wrong(
        lambda: _model(optimizer=optax.cosine_decay_schedule(0.1, 10)), "a schedule of optax",
        r"optax\.adam\(schedule\)"),
    "a loss with further results": Wrong(
        lambda: _fit(_step_with(lambda self, state, x, y: jax.value_and_grad(
            lambda params: self.apply(params, state, x, training=True))(state.params)[0])),
        "scalar-output functions", "has_aux=True"),
    "PyTorch's backward": Wrong(
        lambda: _fit(_step_that(lambda loss: loss.backward())), "no attribute backward", r"jax\.value_and_grad"),
    "Lightning's log": Wrong(
        lambda: _fit(_step_with(lambda self, state, x, y: self.log("mine", 1.0))), "'log'", "returns its logs"),
    "Flax's rngs for apply": Wrong(
        lambda: _fit(_step_with(lambda self, state, x, y: self.apply(state.params, state, x, rngs={}))),
        "no argument 'rngs'", "Leave it out"),
    "a loss of labels and outputs alone": Wrong(
        lambda: _fit(_step_with(lambda self, state, x, y: self.compute_loss(y, x))),
        "received no outputs: `y_pred`", r"compute_loss\(y=y, y_pred=y_pred\)"),
    "a bound module": Wrong(
        lambda: trainer.Model(nn.Dense(1).bind(nn.Dense(1).init(jax.random.key(0), X))), "a bound Dense", "unbound"),
    "Keras's weights of a zoo model": Wrong(
        lambda: models.ResNet50(weights="imagenet"), "no argument 'weights'", "load_keras_weights"),
    "torchvision's pretrained": Wrong(
        lambda: models.ResNet18(pretrained=True), "no argument 'pretrained'", "load_torch_weights"),
    "Keras's classes": Wrong(lambda: models.MobileNetV2(classes=5), "no argument 'classes'", "Give `num_classes`"),
    "Keras's units of a zoo model": Wrong(lambda: models.MLP(units=[32]),  # type: ignore[call-arg]
                                          "`MLP` has no argument 'units'", "Give `hidden`"),
    "Hugging Face's hidden_size": Wrong(
        lambda: models.TransformerLM(vocab_size=50, hidden_size=20),  # type: ignore[call-arg]
        "`TransformerLM` has no argument 'hidden_size'", "Give `d_model`"),
    "a zoo model's classes by position": Wrong(lambda: models.MobileNetV2(10), "2 were given",  # type: ignore[misc]
                                               "`num_classes=10`"),
    "an unknown argument of a zoo model": Wrong(lambda: models.VAE(latent=3), "'latent'",  # type: ignore[call-arg]
                                                "'latent_dim'"),
    "Hugging Face's do_sample": Wrong(
        lambda: models.generate(None, [[1]], 5, do_sample=True), "'do_sample'",  # type: ignore[call-arg]
        "`temperature=0` takes the most probable"),
    "Hugging Face's eos_token_id": Wrong(
        lambda: models.generate(None, [[1]], 5, eos_token_id=0), "'eos_token_id'",  # type: ignore[call-arg]
        "Give `eos_token`"),
    # augmentation
    "an augmentation in map": Wrong(
        lambda: list(data.Dataset.from_arrays((_IMAGES, Y)).map(augmentation.RandomFlip("horizontal")).batch(4)),
        r"RandomFlip takes a .* first\. Received: array", r"`dataset\.random_map\(RandomFlip"),
    "an augmentation of a batch": Wrong(
        lambda: list(data.Dataset.from_arrays((_IMAGES, Y)).batch(4).random_map(augmentation.RandomFlip())),
        r"array of shape \(4, 8, 8, 3\)", "`random_map` before `batch`"),
    "a call of an augmentation": Wrong(lambda: augmentation.RandomFlip()(_IMAGES),  # type: ignore[call-arg]
                                       "'image'", r"`dataset\.random_map\("),
    "an augmentation in a model": Wrong(
        lambda: trainer.Sequential([augmentation.RandomFlip(), nn.Dense(1)]), "Layer 0 .* a RandomFlip",
        r"`dataset\.random_map\(RandomFlip"),
    "random_map without a function": Wrong(lambda: _batches().random_map(seed=1),  # type: ignore[call-arg]
                                           "missing 1 .*'fn'", "`random_map.lambda rng, x, y"),
    "texts in a model": Wrong(
        lambda: trainer.Sequential([data.preprocessing.TextVectorization(), nn.Dense(1)]), "a TextVectorization",
        r"`dataset\.map\(lambda x, y: \(layer\(x\), y\)\)`"),
    "metrics of fit": Wrong(lambda: _fit(metrics=["mae"]), "no argument 'metrics'", r"`compile\(metrics="),
    "PyTorch's criterion": Wrong(lambda: _model(criterion="mse"), "no argument 'criterion'", "Give `loss`"),
    "a mesh without its shape": Wrong(
        lambda: trainer.distribute.ModelParallelStrategy(), "missing 1 .*'mesh_shape'",  # type: ignore[call-arg]
        '`{"replica": 4, "model": 2}`'),
    # custom loops
    "a step of inputs and labels": Wrong(
        lambda: _one_device().run(_built().train_step, args=(X, Y)), r"Received: array of shape \(8, 4\)",
        r"args=\(model\.state, batch\)"),
    "a step without the state": Wrong(
        lambda: _one_device().run(_built().train_step, args=((X, Y),)), "`Model.train_step` missing",
        r"`strategy\.run\(model\.train_step, args=\(model\.state, batch\)\)`"),
    "arguments of run one by one": Wrong(lambda: _one_device().run(lambda x, y, z: x, X, Y, X),  # type: ignore[arg-type]
                                         "5 were given", r"args=\(x, y\)"),
    "a reduction without its operation": Wrong(
        lambda: _one_device().reduce(_one_device().run(lambda: 1.0)), "missing 1 .*'value'",  # type: ignore[call-arg]
        r'`strategy\.reduce\("mean", value\)`'),
    "a key without the state": Wrong(
        lambda: _fit(_overriding(train_step=lambda self, state, batch: self.make_rng("dropout"))),
        "`Model.make_rng` missing", r'`self\.make_rng\(state, "dropout"\)`'),
    # files, formats and tools
    "adapters for weights": Wrong(_load_adapters, "'.*safetensors' holds adapters of LoRA", r"`load_adapters\(path\)`"),
    "an unknown format of an export": Wrong(
        lambda: _built().export("e.tflite", format="tflite"), "Unknown format 'tflite'",  # type: ignore[arg-type]
        r'"onnx" by onnxruntime'),
    "TensorFlow Lite by its suffix": Wrong(lambda: _built().export("e.tflite"), "'e.tflite', and format='jax'",
                                           '`format="onnx"`'),
    "a folder for a log": Wrong(lambda: callbacks.CSVLogger(tempfile.gettempdir()), "is a folder", "a file in it"),
    "texts to pad": Wrong(lambda: trainer.utils.pad_sequences(["hello", "hi"], maxlen=5), "text at position 0",
                          "TextVectorization"),
    "words to pad": Wrong(lambda: trainer.utils.pad_sequences([["a"], ["b", "c"]]), "strings at position 0",
                          "dtype=object"),
    "a model in an estimator of scikit-learn": Wrong(
        lambda: trainer.TrainerClassifier(_built()).fit(X, IDS), "a Model of the", "`module=model.module`"),
    # schedules and estimators
    "a decay without steps": Wrong(
        lambda: optimizers.schedules.ExponentialDecay(1e-3, decay_rate=0.96),  # type: ignore[call-arg]
        "missing 1 .*'decay_steps'", r"`decay_steps=epochs \* math\.ceil"),
    "a restart without steps": Wrong(
        lambda: optimizers.schedules.CosineDecayRestarts(1e-3),  # type: ignore[call-arg]
        "missing 1 .*'first_decay_steps'", r"`first_decay_steps=math\.ceil"),
    "PyTorch's T_max": Wrong(lambda: optimizers.schedules.CosineDecay(1e-3, T_max=10),  # type: ignore[call-arg]
                             "`CosineDecay` has no argument 'T_max'", "Give `decay_steps`"),
    "steps of a TrainSpec": Wrong(lambda: estimator.TrainSpec(lambda: None, steps=10),  # type: ignore[call-arg]
                                  "`TrainSpec` has no argument 'steps'", "Give `max_steps`"),
    "max_steps of an EvalSpec": Wrong(lambda: estimator.EvalSpec(lambda: None, max_steps=10),  # type: ignore[call-arg]
                                      "`EvalSpec` has no argument 'max_steps'", "Give `steps`"),
    "fit of an estimator": Wrong(lambda: _regressor().fit(X, Y), "'LinearRegressor'.*'fit'", r"`train\(input_fn\)`"),
    "score of an estimator": Wrong(lambda: _regressor().score(X, Y), "'score'", r"`evaluate\(input_fn\)`"),
    "epochs of an estimator": Wrong(
        lambda: _regressor().train(lambda: None, epochs=3),  # type: ignore[call-arg]
        "`LinearRegressor.train` has no argument 'epochs'", r"`dataset\.repeat\(epochs\)`"),
    "Keras's units of an estimator": Wrong(lambda: estimator.DNNClassifier(units=[3]),  # type: ignore[call-arg]
                                           "`DNNClassifier` has no argument 'units'", "Give `hidden_units`"),
}


def message_of(call: Callable[[], Any]) -> str:
    """Returns the message of the error that a call raises, with its notes; an empty string for none."""
    try:
        call()
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""
