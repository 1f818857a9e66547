"""`python -m trainer fit`, `evaluate`, `predict` and `export`: runs of a configuration, in the process of the test."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import trainer
from trainer.tools.command_line.commands import main
from trainer.tools.report.sections import settings_section

EXAMPLE = '''
import glob
import os
import signal
import time

import numpy as np
import optax
from flax import linen as nn

import trainer

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(30, 4)).astype(np.float32), rng.normal(size=(30, 2)).astype(np.float32)


class Network(nn.Module):
    """A hidden layer.

    Args:
      width: its units.
    """

    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.tanh(nn.Dense(self.width)(x)))


class Broken(Network):
    def __call__(self, x):
        raise ValueError("a fault of the user's")


def model(width: int = 3) -> trainer.Model:
    return trainer.Model(Network(width))


def data(rows: int = 20) -> dict:
    return {"train": (X[:rows], Y[:rows]), "validation": (X[20:], Y[20:])}


class Data:
    def __init__(self, rows: int = 20):
        self.rows = rows

    @property
    def train(self):
        return trainer.data.Dataset.from_arrays((X[: self.rows], Y[: self.rows])).batch(8)


def untyped(width=3) -> trainer.Model:
    return trainer.Model(Network(width))


def subscripted() -> dict[str, tuple]:
    return data()


def unannotated():
    return data()


def in_a_tuple() -> dict:
    return X, Y


def sets_of_other_names() -> dict:
    return {"training": (X, Y)}


def log() -> trainer.callbacks.LogTo:
    return trainer.callbacks.LogTo(trainer.callbacks.loggers.JSONLines("log.jsonl"))


def distance(y_true, y_pred):
    return abs(y_true - y_pred).mean(-1)


class Kill(trainer.callbacks.Callback):
    """Kills the process before a batch, once, and after the checkpoint of batch 4."""

    def __init__(self, batch: int, folder: str):
        self.batch, self.folder, self.count = batch, folder, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1
        if self.count == self.batch and not os.path.exists(f"{self.folder}/killed"):
            open(f"{self.folder}/killed", "w").close()
            while not glob.glob(f"{self.folder}/killed_run/step_4/manifest.json"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
'''
CONFIG = """
run: first
model: {class_path: configured_example.Network, init_args: {width: 5}}
data: {class_path: configured_example.data}
compile:
  optimizer: {class_path: Adam, init_args: {learning_rate: 0.01}}
  loss: mse
  metrics: [configured_example.distance]
  ema_decay: 0.5
trainer: {epochs: 2, batch_size: 8, verbose: 0}
"""
SMALL = ("--model", "configured_example.model", "--data", "configured_example.data", "--compile.loss", "mse",
         "--trainer.verbose", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the user's file, a configuration and its run."""
    pytest.importorskip("jsonargparse")
    folder = tmp_path_factory.mktemp("configured")
    (folder / "configured_example.py").write_text(EXAMPLE)
    (folder / "run.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert main(["fit", "--config", "run.yaml"]) == 0
        yield folder
    sys.modules.pop("configured_example")


@pytest.fixture(autouse=True)
def in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def own_model():
    import configured_example

    model = trainer.Model(configured_example.Network(5))
    model.compile(trainer.optimizers.Adam(0.01), "mse", metrics=[configured_example.distance], ema_decay=0.5)
    return model


def weights_of(run):
    return trainer.load(f"{run}/model", own_model()).get_weights()


def own_script(epochs):
    import configured_example

    model = own_model()
    sets = configured_example.data()
    model.fit(*sets["train"], batch_size=8, epochs=epochs, validation_data=sets["validation"], verbose=0)
    return model


def rejected(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_run_has_the_bits_of_ones_own_script():
    for ours, theirs in zip(weights_of("first"), own_script(2).get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_folder_has_the_configuration_and_the_record(folder):
    import yaml

    config = yaml.safe_load((folder / "first" / "config.yaml").read_text())
    assert config["model"] == {"class_path": "configured_example.Network", "init_args": {"width": 5, "name": None}}
    assert config["compile"]["optimizer"]["class_path"] == "trainer.optimizers.Adam"
    assert config["compile"]["microbatches"] == 1 and config["backup"]["save_freq"] == "epoch", "defaults are there"
    record = json.loads((folder / "first" / "run.json").read_text())
    assert record["config"] == config and record["status"] == "finished"
    report = str(settings_section(record))
    assert "config: model" in report and "width 5" in report and "config: trainer" not in report


@pytest.mark.slow
def test_the_same_command_ends_at_once_and_one_with_more_epochs_goes_on(folder):
    assert main(["fit", "--config", "run.yaml", "--run", "longer"]) == 0
    before = (folder / "longer" / "model" / "manifest.json").read_text()
    assert main(["fit", "--config", "run.yaml", "--run", "longer"]) == 0
    assert (folder / "longer" / "model" / "manifest.json").read_text() == before
    assert main(["fit", "--config", "longer/config.yaml", "--trainer.epochs", "3"]) == 0
    for ours, theirs in zip(weights_of("longer"), own_script(3).get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "epochs: 3" in (folder / "longer" / "config.yaml").read_text()


@pytest.mark.parametrize(("arguments", "words"), [
    (["--model.width", "6"], 'key "model.init_args.width":\n  \'first\' has a run with another configuration, which '
                             "this command would continue: 5 there, 6 here."),
    (["--compile.optimizer.learning_rate", "1"], "0.01 there, 1.0 here"),
    (["--model", "configured_example.model"], "'configured_example.Network' there, 'configured_example.model' here"),
    (["--trainer.batch_size", "4"], "8 there, 4 here"),
    (["--seed", "1"], "0 there, 1 here"),
])
def test_a_folder_is_not_continued_with_another_configuration(folder, capsys, arguments, words):
    assert words in rejected(capsys, "fit", "--config", "run.yaml", *arguments)
    assert "width: 5" in (folder / "first" / "config.yaml").read_text()


def test_the_model_is_evaluated_with_the_averages_and_the_numbers_of_the_validation(folder, capsys):
    assert main(["evaluate", "--run", "first"]) == 0
    history = json.loads((folder / "first" / "run.json").read_text())["history"]
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"loss": pytest.approx(history["val_loss"][-1]),
                       "distance": pytest.approx(history["val_distance"][-1])}
    assert main(["evaluate", "--config", "first/config.yaml", "--set", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] != printed["loss"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("arguments", "words"), [
    (["--model.width", "6"], 'key "model.init_args.width":\n  \'first\' has a run of another model: 5 there, 6 here. '
                             "Give `--run first` in place of `--config`"),
    (["--model", "configured_example.model"], "'configured_example.Network' there, 'configured_example.model' here"),
    (["--compile.optimizer", "sgd"], 'key "compile.optimizer":'),
    (["--compile.ema_decay", "0.25"], "0.5 there, 0.25 here"),
])
@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_configuration_of_another_model_is_refused(capsys, command, arguments, words):
    assert words in rejected(capsys, command, "--config", "run.yaml", *arguments)


@pytest.mark.slow
def test_arguments_beside_a_run_and_other_metrics_are_taken(capsys):
    assert main(["evaluate", "--config", "run.yaml", "--compile.metrics", "[mae]"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"loss", "mae"}
    assert main(["evaluate", "--run", "first", "--compile.precision", "mixed_bfloat16"]) == 0


@pytest.mark.slow
def test_outputs_are_written_and_the_model_is_exported(folder, capsys):
    import configured_example

    model = own_script(2)
    expected = model.predict(configured_example.X[20:], batch_size=8, verbose=0)
    assert main(["predict", "--run", "first"]) == 0
    assert "first/predictions.npz: outputs float32(10, 2)" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(folder / "first" / "predictions.npz")["outputs"], expected)
    assert main(["export", "--run", "first", "--output", "served.export"]) == 0
    exported = trainer.load_exported(folder / "served.export").predict(configured_example.X[20:])
    np.testing.assert_allclose(exported, expected, rtol=1e-5)


@pytest.mark.slow
def test_the_printed_configuration_has_all_defaults_and_is_one(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *SMALL, "--print_config"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "width: 3" in text and "optimizer: rmsprop" in text and "epochs: 1" in text and "run: run" in text
    (folder / "printed.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["fit", "--config", "printed.yaml", "--print_config"])
    assert capsys.readouterr().out == text


WRONG = {
    "nothing": ([], "required: model, data\n`--config FILE` gives them, such as the `config.yaml` of a run's folder.\n"
                "`model` is a class of Flax"),
    "value": (["--model.width=abc"], "'configured_example.Network':\n    Parser key \"width\":\n      Expected a "
                                     "<class 'int'>. Got value: abc"),
    "argument": (["--model.widht=3"], "Option 'widht' is not accepted. Did you mean 'width'?"),
    "key": (["--trainer.epoch=3"], "--trainer.epoch=3. Did you mean 'trainer.epochs'"),
    "type": (["--trainer.epochs=x"], 'key "trainer.epochs":\n  Expected a <class \'int\'>. Got value: x'),
    "no annotation": (["--model=configured_example.untyped"], "The parameter 'width' of 'configured_example.untyped' "
                      "has no annotation"),
    "no module": (["--model=configured_exampel.model"], "No module named 'configured_exampel'\nDid you mean "
                  "'configured_example'? Modules of your own are found from the folder in which the command runs."),
    "no model": (["--model=configured_example.data"], "`model` is a class of Flax or a `trainer.Model`, or a function"),
    "no data": (["--data=configured_example.subscripted"], "'configured_example.subscripted' is a function whose "
                "result is annotated as dict[str, tuple]\n`data` is a function whose result is annotated as a plain"),
    "no annotation of data": (["--data=configured_example.unannotated"], "'configured_example.unannotated' is a "
                              "function without an annotation of its result\n`data` is a function"),
    "a class of another kind": (["--data=configured_example.Network"], "'configured_example.Network' is the class "
                                "Network\n`data` is a function"),
    "another section": (["--fit.epochs=3"], "--fit.epochs=3. The arguments of `fit` are in the section 'trainer'."),
    "no section": (["--epochs=3"], "--epochs=3. Did you mean 'trainer.epochs'?"),
    "a metric without a list": (["--compile.metrics=accuracy"], "Write a list: `[accuracy]`."),
    "an object without a class": (["--compile.optimizer={name: adam, lr: 0.01}"], "An object is `{class_path: Adam"),
    "rate": (["--learning_rate=0.1"], "It is an argument of the optimizer: `--compile.optimizer Adam --compile"),
    "rate to compile": (["--compile.lr=0.1"], "It is an argument of the optimizer: `--compile.optimizer Adam --c"),
    "no key": (["other.yaml"], "An argument is `--KEY VALUE`; a file is `--config other.yaml`."),
    "no path": (["--model=Network"], "that of its Python file: `my_file.Network`\n`model` is a class of Flax"),
    "no path, as no class has the name": (["--data=mine"], "'mine' is a name without that of its Python file"),
    "optimizer": (["--compile.optimizer=adm"],  # without the errors of the other types
                  "error: Parser key \"compile.optimizer\":\n  Unknown optimizer 'adm'. Did you mean 'adam'"),
    "optimizer's key": (["--compile.optimizer.lr=1"], " Option 'lr' is not accepted. Did you mean 'learning_rate'?\n"),
    "optimizer's value": (["--compile.optimizer.learning_rate=x"], "Expected a <class 'float'>"),
    "loss": (["--compile.loss=msee"], "Unknown loss 'msee'. Did you mean 'mse'"),
    "loss's value": (["--compile.loss=Huber", "--compile.loss.delta=x"], "Parser key \"delta\":\n        Expected a "
                     "<class 'float'>. Got value: x"),
    "metric": (["--compile.metrics=[accurac]"], "Unknown metric 'accurac'. Did you mean 'accuracy'"),
    "word": (["--compile.batch_norm=all"], "Expected a typing.Literal['global', 'per_replica']. Got value: all"),
    "precision": (["--compile.precision=half"], "Unknown precision 'half'"),
    "callback": (["--trainer.callbacks=[{class_path: EarlyStopping, init_args: {patiense: 3}}]"], "'patiense' is not "
                 "accepted. Did you mean 'patience'?"),
    "callback's name": (["--trainer.callbacks+=ReduceLrOnPlateau"], "Did you mean 'ReduceLROnPlateau'"),
    "callback's path": (["--trainer.callbacks+=trainer.callbacks.ReduceLrOnPlateau"], "Did you mean 'ReduceLROnPl"),
    "name in a file": (["--data=configured_example.dat"], "Did you mean 'data'"),
    "seed": (["--seed=-1"], 'key "seed"'),
}


@pytest.mark.sampled
@pytest.mark.every_case
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused_by_its_key(capsys, name):
    arguments, words = WRONG[name]
    given = ["--config", "run.yaml", "--run", "refused", *arguments] if arguments else []
    assert words in rejected(capsys, "fit", *given)
    assert not os.path.exists("refused")


@pytest.mark.parametrize(("text", "words"), [
    ("fit: {epochs: 3}", "Option 'fit.epochs' is not accepted. The arguments of `fit` are in the section 'trainer'."),
    ("modle: {class_path: nothing.model}", "Option 'modle.class_path' is not accepted. Did you mean 'model'"),
    ("trainer: {epoch: 3}", "Group 'trainer' does not accept option 'epoch'. Did you mean 'trainer.epochs'"),
])
def test_a_wrong_key_of_a_file_is_refused(folder, capsys, text, words):
    (folder / "wrong.yaml").write_text(text)
    assert words in rejected(capsys, "fit", "--config", "wrong.yaml", *SMALL)


@pytest.mark.parametrize(("section", "path"), [("model.width", "Network"), ("data.rows", "data")])
def test_an_argument_before_the_class_that_it_is_of_is_refused(capsys, section, path):
    name = section.partition(".")[0]
    words = f"Give `--config FILE`, or `--{name} CLASS` first: options are read in order."
    assert words in rejected(capsys, "fit", f"--{section}", "3", f"--{name}", f"configured_example.{path}")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("arguments", [
    ["--trainer.epochs", "3", "--model.width=7", "--config", "run.yaml"],
    ["--trainer.epochs", "3", "--config=run.yaml", "--model.width=7"],
    ["--config", "run.yaml", "--trainer.epochs", "3", "--model.width=7"]])
def test_arguments_override_the_file_on_both_sides_of_it(capsys, arguments):
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    text = capsys.readouterr().out
    assert "width: 7" in text and "epochs: 3" in text and "run: first" in text


def test_of_two_files_the_later_overrides_the_earlier(folder, capsys):
    (folder / "later.yaml").write_text("trainer: {epochs: 4}")
    with pytest.raises(SystemExit):
        main(["fit", "--config", "run.yaml", "--model.width=7", "--config", "later.yaml", "--print_config"])
    text = capsys.readouterr().out
    assert "width: 7" in text and "epochs: 4" in text and "batch_size: 8" in text


def test_a_function_that_returns_no_dict_is_refused(capsys):
    words = ('no data sets by name. Received: (array of shape (30, 4) and dtype float32, array of shape (30, 2) and '
             'dtype float32). Return a dict, such as `{"train": (x, y)')
    assert words in rejected(capsys, "fit", *SMALL, "--run", "refused", "--data", "configured_example.in_a_tuple")


def test_commands_say_which_run_and_which_data_there_are_not(capsys):
    assert "there is no 'nowhere/config.yaml'" in rejected(capsys, "evaluate", "--run", "nowhere")
    assert "'nowhere' has no trained model" in rejected(capsys, "predict", "--config", "run.yaml", "--run", "nowhere")
    assert "no data set 'test'; there are 'train', 'validation'" in rejected(
        capsys, "evaluate", "--run", "first", "--set", "test")
    with pytest.raises(ValueError, match=r"Unknown data set 'training'. Did you mean 'train'"):
        main(["fit", *SMALL, "--run", "refused", "--data", "configured_example.sets_of_other_names"])


OBJECTS = {
    "a Keras name": (["--compile.optimizer=sgd"], lambda made: made.model.optimizer.learning_rate == 0.01),
    "a schedule": (["--compile.optimizer=SGD", "--compile.optimizer.learning_rate=trainer.optimizers.schedules."
                    "CosineDecay", "--compile.optimizer.learning_rate.initial_learning_rate=0.2",
                    "--compile.optimizer.learning_rate.decay_steps=9"],
                   lambda made: made.model.optimizer.learning_rate == np.float32(0.2)),
    "optax": (["--compile.optimizer=optax.adamw", "--compile.optimizer.learning_rate=0.3"],
              lambda made: made.model.optimizer.learning_rate == np.float32(0.3)),
    "a function as loss": (["--compile.loss=configured_example.distance"],
                           lambda made: made.options.compile.loss.__name__ == "distance"),
    "metrics": (["--compile.metrics=[mae, {class_path: MeanSquaredError, init_args: {name: squares}}]"],
                lambda made: made.options.compile.metrics[0] == "mae"
                and made.options.compile.metrics[1].name == "squares"),
    "a regularizer": (["--compile.regularizers={kernel: {class_path: trainer.regularizers.L2, init_args: {l2: 0.5}}}"],
                      lambda made: made.options.compile.regularizers["kernel"].l2 == 0.5),
    "callbacks": (["--trainer.callbacks=[{class_path: EarlyStopping, init_args: {patience: 7}}]",
                   "--trainer.callbacks+=TerminateOnNaN", "--trainer.callbacks+=configured_example.log"],
                  lambda made: made.options.trainer.callbacks[0].patience == 7
                  and type(made.options.trainer.callbacks[2]) is trainer.callbacks.LogTo),
    "a strategy": (["--strategy=MirroredStrategy"], lambda made: made.model.strategy.num_replicas_in_sync == 8),
    "a model of the zoo": (["--model=trainer.models.MLP", "--model.num_classes=2", "--model.hidden=[4]"],
                           lambda made: made.model.module.hidden in ([4], (4,))
                           and callable(made.model.module.classifier_activation)),
    "a model by a function": (["--model=configured_example.model", "--model.width=9"],
                              lambda made: made.model.module.width == 9),
    "data by a class": (["--data=configured_example.Data", "--data.rows=9"],
                        lambda made: list(made.data) == ["train"] and len(made.data["train"]) == 2),
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_made_of_names_and_class_paths(name):
    from trainer.tools.command_line.configuration import parsed, parser_of
    from trainer.tools.command_line.configured import objects_of

    arguments, holds = OBJECTS[name]
    parser = parser_of("fit", "")
    options = parsed(parser, [*SMALL, *arguments])
    again = parsed(parser, [f"--config={_written(parser.dump(options, skip_unset=False))}"])
    for each in (options, again):  # also from the file that it is written to
        with objects_of(parser, each) as made:
            assert holds(made)


def _written(text):
    with open("written.yaml", "w") as file:
        file.write(text)
    return file.name


@pytest.mark.slow
def test_without_the_extra_the_command_names_it(monkeypatch, capsys):
    for name in ("configuration", "configured"):
        monkeypatch.delitem(sys.modules, f"trainer.tools.command_line.{name}", raising=False)
        monkeypatch.delattr(f"trainer.tools.command_line.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert main(["fit", "--config", "run.yaml"]) == 2
    assert "pip install 'trainer-jax[cli]'" in capsys.readouterr().err


# --- processes -------------------------------------------------------------------------------------------------------


def command(folder, *arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_run_is_continued_by_the_same_command_to_the_bits_of_an_undisturbed_run(folder):
    kill = json.dumps([{"class_path": "configured_example.Kill", "init_args": {"batch": 5, "folder": str(folder)}}])
    fit = ["trainer", "fit", "--config", "run.yaml", "--backup.save_freq", "2", "--trainer.callbacks", kill]
    ended = command(folder, *fit, "--run", "killed_run")
    assert ended.returncode == -9, ended.stderr
    assert not (folder / "killed_run" / "model").exists()
    for run in ("killed_run", "undisturbed"):
        ended = command(folder, *fit, "--run", run, "--trainer.verbose", "1")
        assert ended.returncode == 0, ended.stderr
        assert ("Resumed at epoch 2, batch 1" in ended.stdout) == (run == "killed_run"), ended.stdout
    for path in (folder / "undisturbed" / "model" / "state").iterdir():
        assert path.read_bytes() == (folder / "killed_run" / "model" / "state" / path.name).read_bytes()
    records = [json.loads((folder / run / "run.json").read_text()) for run in ("killed_run", "undisturbed")]
    assert records[0]["history"] == records[1]["history"] and records[0]["earlier"][0]["status"] == "killed"


@pytest.mark.slow
@pytest.mark.processes
def test_an_error_whose_message_says_all_is_printed_without_a_traceback(folder):
    def errors(*arguments, frames="auto"):
        ended = command(folder, "trainer", "fit", "--config", "run.yaml", "--run", "refused", *arguments,
                        JAX_TRACEBACK_FILTERING=frames)
        assert ended.returncode == 1
        return ended.stderr

    names = ("--data", "configured_example.sets_of_other_names")
    assert errors(*names) == "error: Unknown data set 'training'. Did you mean 'train'?\n"
    assert "Traceback" in errors(*names, frames="off")
    of_user = errors("--model", "configured_example.Broken")
    assert "Traceback" in of_user and "raise ValueError(\"a fault of the user's\")" in of_user


@pytest.mark.slow
@pytest.mark.processes
def test_the_launcher_trains_a_configuration_over_processes(folder):
    ended = command(folder, "trainer", "launch", "--workers", "2", "--devices-per-worker", "1", "-m", "trainer", "fit",
                    "--config", "run.yaml", "--run", "two", "--strategy", "MultiWorkerMirroredStrategy")
    assert ended.returncode == 0, ended.stderr
    for ours, theirs in zip(weights_of("two"), weights_of("first"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model_of_a_function_keeps_its_loss(folder):
    (folder / "compiling.py").write_text("from configured_example import *\n\ndef compiled() -> trainer.Model:\n"
                                         "    made = model()\n    made.compile('sgd', 'mse')\n    return made\n")
    arguments = ["--model", "compiling.compiled", "--data", "configured_example.data", "--trainer.verbose", "0"]
    assert main(["fit", *arguments]) == 0
    assert json.loads((folder / "run" / "run.json").read_text())["compile"]["loss"] == "mse"
