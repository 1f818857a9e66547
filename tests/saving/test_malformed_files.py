"""Files whose checksums are right and whose content is not what was saved: the error names the file."""

import pathlib

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.callbacks import BackupAndRestore
from trainer.engine.model.core import saved_model
from trainer.engine.saving import export
from trainer.engine.saving.arrays.file_kinds import save_with_text
from trainer.engine.saving.checkpoint import CheckpointWriter, write_manifest


def new_model():
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    return model


def save_folder(path, document):
    with CheckpointWriter() as writer:
        writer.save(path, {}, document)


@pytest.mark.parametrize("text", [
    "", "[" * 9_999, '{"array": "0"}', '{"dict": {"kind": "training state"}}',
    '{"dict": {"kind": "training state", "format_version": "1"}}',
    '{"dict": {"kind": "training state", "format_version": 1, "inputs": 3}}'])
def test_a_training_state(tmp_path, text):
    path = tmp_path / "state.safetensors"
    save_with_text(str(path), saved_model.DOCUMENT_KEY, text, {})
    with pytest.raises(ValueError, match=r"state.safetensors' is malformed \(.*Save it again"):
        trainer.load(path, new_model())


def test_a_training_state_in_a_folder(tmp_path):
    save_folder(tmp_path / "state", {"kind": "training state"})
    with pytest.raises(ValueError, match=r"state' is malformed \(KeyError: 'format_version'\)"):
        trainer.load(tmp_path / "state", new_model())
    for text in ("", "{}", '{"document": {}}'):
        pathlib.Path(tmp_path, "state", "document.json").write_text(text)
        write_manifest(tmp_path / "state")
        with pytest.raises(ValueError, match=r"state' is malformed \("):
            trainer.load(tmp_path / "state", new_model())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 1}'])
def test_an_exported_model(tmp_path, text):
    path = tmp_path / "model.export"
    save_with_text(str(path), export.MANIFEST_KEY, text, {})
    with pytest.raises(ValueError, match=r"model.export' is malformed \("):
        trainer.load_exported(path)


@pytest.mark.parametrize("name", ["step_1", "begun.json"])
def test_what_is_in_a_backup_folder(tmp_path, name):
    if name == "step_1":
        save_folder(tmp_path / name, {"kind": "run", "epoch": 1})
    else:
        (tmp_path / name).write_text("[")
    with pytest.raises(ValueError, match=f"{name}' is (malformed: it lacks batch, |not a file that a run has written)"):
        new_model().fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[BackupAndRestore(tmp_path)])
