"""Every path that a user gives is checked: a URL of an object store is opened there or refused, and makes no folder."""

import importlib
import inspect
import os
import pathlib
import re
import sys

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import project_files
from trainer.callbacks.loggers.tracker import Tracker
from trainer.core import arguments
from trainer.distribute.parameter_server.embedding_table import EmbeddingTable

URL = "gs://bucket/run"
REFUSED = r"must be a path of the local file system. Received: 'gs://bucket/run', a URL. Mount"
NAMED_LIKE_PATHS = re.compile(
    r"path|folder|directory|dir$|dir_|file$|filename|fname|^ckpt|^to_|_to$|^warm_start_from$|artifact")
MODULES = "trainer.models.vision"  # Flax modules, with attributes such as `drop_path_rate`
PRIVATE = ("trainer.core", "trainer.engine")
NO_PATHS = {
    ("Exporter.export", "export_path"): "abstract", ("Exporter.export", "checkpoint_path"): "abstract",
    ("Logger.log_artifact", "path"): "abstract", ("TensorBoardFiles.log_artifact", "path"): "not used",
    ("RemoteMonitor", "path"): "of the URL in `root`", ("get_file", "origin"): "may be a URL",
    ("LayoutMap.get", "path"): "of a weight",
    ("get_file", "fname"): "a name without folders",
    ("RowDataset", "file_paths"): "made by the loaders", ("model_to_dot", "rankdir"): "a direction",
    ("plot_model", "rankdir"): "a direction",
    # Of the protocol through which callbacks reach a run: the folders come from the callbacks' own, checked arguments.
    **{(f"SavePoint.{name}", "folder"): "protocol"
       for name in ("delete", "restore", "roll_back", "save", "start_from")},
    ("Run.save", "filepath"): "protocol", ("Run.save_weights", "filepath"): "protocol",
    ("RunDetails.begin_save", "filepath"): "protocol",
    **{(f"{name}Exporter.export", path): "of the estimator" for name in ("Best", "Final", "Latest")
       for path in ("export_path", "checkpoint_path")},
}
IN_STORES = {
    *((f"StatefulModel.{name}", "filepath") for name in ("save", "save_weights", "load_weights", "export")),
    ("load_model", "filepath"), ("load_exported", "filepath"), ("BackupAndRestore", "backup_dir"),
    ("ModelCheckpoint", "filepath"), ("SpikeGuard", "backup_dir"),
    ("LoraModel.save_adapters", "filepath"), ("LoraModel.load_adapters", "filepath"),
    ("CSVLogger", "filename"), ("JSONLines", "path"), ("TensorBoard", "log_dir"),
    ("TensorBoardFiles", "log_dir"), ("RunRecord", "folder"), ("report", "folder"), ("report", "path"),
    ("enable_compilation_cache", "folder"), ("PreprocessingLayer.save", "filepath"), ("load", "filepath"),
}


def is_path(parameter):
    return "PathLike" in str(parameter.annotation) or NAMED_LIKE_PATHS.search(parameter.name) is not None


def path_arguments(exceptions=NO_PATHS):
    """Returns each public function, class or method with a parameter that is a path, by name and parameter."""
    found = {}
    for module in sorted(project_files.modules().items()):
        if not module[1].with_suffix(".pyi").is_file() or module[0].startswith(PRIVATE):
            continue
        package = importlib.import_module(module[0])
        for name in package.__all__:
            public = getattr(package, name)
            members = inspect.getmembers(public, inspect.isfunction) if inspect.isclass(public) else []
            for owner in [public, *(member for name, member in members if not name.startswith("_"))]:
                is_made = inspect.isfunction(owner) or (
                    inspect.isclass(owner) and not issubclass(owner, (BaseException, dict)))
                if not is_made or not owner.__module__.startswith("trainer.") or owner.__module__.startswith(MODULES):
                    continue
                found |= {(owner.__qualname__, parameter): owner
                          for parameter, described in inspect.signature(owner).parameters.items() if is_path(described)}
    return {key: owner for key, owner in found.items() if key not in exceptions}


ARGUMENTS = path_arguments()


@pytest.fixture(scope="module")
def given():
    """The other arguments that are required, by function; `self` first for methods."""
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    model.build(np.ones((1, 2), np.float32))
    lora = trainer.lora(model, 1)
    column = trainer.estimator.numeric_column("x")
    estimator = trainer.estimator.BaselineRegressor()
    head, units, image = trainer.estimator.RegressionHead(), [1], np.zeros((2, 2, 3))
    input_fn = {"self": estimator, "input_fn": lambda: (None, np.ones((1, 1)))}
    table = EmbeddingTable.__new__(EmbeddingTable)  # without servers, which a refused path does not reach
    tracker = Tracker.__new__(trainer.callbacks.loggers.MLflow)  # without its package
    return {
        **{f"StatefulModel.{name}": {"self": model} for name in ("save", "save_weights", "load_weights", "export")},
        **{f"EmbeddingTable.{name}": {"self": table} for name in ("save", "restore")},
        **{f"Estimator.{name}": input_fn for name in ("evaluate", "predict")},
        "Estimator.export_saved_model": {"self": estimator, "export_dir_base": "exports",
                                             "serving_input_receiver_fn": lambda: np.ones((1, 1))},
        "Estimator": {"model_fn": lambda features, labels, mode: None},
        "model_to_estimator": {"model": model}, "plot_model": {"model": model},
        "PreprocessingLayer.save": {"self": trainer.data.preprocessing.Rescaling(2.0)},
        "load_model": {"model": model}, "SidecarEvaluator": {"model": model, "data": (np.ones((1, 2)), np.ones(1))},
        "BaselineEstimator": {"head": head}, "LinearEstimator": {"head": head, "feature_columns": [column]},
        "DNNEstimator": {"head": head, "hidden_units": units, "feature_columns": [column]},
        "DNNLinearCombinedEstimator": {"head": head, "linear_feature_columns": [column]},
        **{f"Linear{kind}": {"feature_columns": [column]} for kind in ("Regressor", "Classifier")},
        **{f"DNN{kind}": {"hidden_units": units, "feature_columns": [column]} for kind in ("Regressor", "Classifier")},
        **{f"DNNLinearCombined{kind}": {"linear_feature_columns": [column]} for kind in ("Regressor", "Classifier")},
        "categorical_column_with_vocabulary_file": {"key": "x"},
        "sequence_categorical_column_with_vocabulary_file": {"key": "x"},
        "text_dataset_from_directory": {"encode": len}, "save_img": {"x": image}, "report": {"folder": "run"},
        "JSONLines.log_artifact": {"self": trainer.callbacks.loggers.JSONLines("log.jsonl")},
        "Tracker.log_artifact": {"self": tracker}, "Profile": {"steps": (0, 1)},
        "get_file": {"fname": "words.txt", "origin": "words.txt"},
        **{f"load_{kind}_weights": {"model": model} for kind in ("keras", "torch", "hf")},
        "save_hf_weights": {"model": model}, "SpikeGuard": {"rollback_after": 1},
        **{f"LoraModel.{name}": {"self": lora} for name in ("save_adapters", "load_adapters")},
    }


def called(owner, arguments_of, name):
    result = owner(**{**arguments_of, name: URL})
    return list(result) if inspect.isgenerator(result) else result


@pytest.mark.parametrize(("qualname", "name"), sorted(IN_STORES))
def test_a_url_of_a_store_needs_its_driver_and_makes_no_folder(qualname, name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"'gs://bucket/run' is in an object store.*'trainer-jax\[remote\]' gcsfs`"):
        called(ARGUMENTS[qualname, name], given.get(qualname, {}), name)
    assert os.listdir() == []


@pytest.mark.parametrize(("qualname", "name"), [key for key in ARGUMENTS if key not in IN_STORES])
def test_a_url_is_refused_and_makes_no_folder(qualname, name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=REFUSED):
        called(ARGUMENTS[qualname, name], given.get(qualname, {}), name)
    assert os.listdir() == []


def test_the_exceptions_are_of_functions_that_there_are():
    every = path_arguments(exceptions={})
    assert {*NO_PATHS} <= {*every} and {*ARGUMENTS} >= IN_STORES


@pytest.mark.parametrize("url", [
    "gs://b/x", "s3://b", "hdfs://host:1/x", "memory://x", "file:///tmp/x", "S3A://b", b"gs://b", pathlib.Path("gs://b/x")])
def test_every_form_of_a_url_is_refused(url):
    with pytest.raises(ValueError, match=r"`folder` must be a path of the local file system.*, a URL. Mount"):
        arguments.as_path("folder", url)


@pytest.mark.parametrize("path", ["run", "/tmp/run", "C:/run", "a:b/c", "run at 10:00/x", "~/run", "./gs://b"])
def test_local_paths_are_taken_as_they_are(path):
    assert arguments.as_path("folder", path) == path


def test_the_cache_folder_of_the_environment_is_no_url(monkeypatch):
    monkeypatch.setenv("KERAS_HOME", URL)
    with pytest.raises(ValueError, match=f"`KERAS_HOME` {REFUSED}"):
        trainer.utils.get_file("words.txt", "words.txt")


def test_a_file_of_an_embedding_is_no_url(tmp_path):
    for metadata in (URL, {"words": URL}):
        with pytest.raises(ValueError, match=f"`embeddings_metadata` {REFUSED}"):
            trainer.callbacks.TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata=metadata)
