"""A path that is no safetensors file is refused with what is there, and what may have been meant."""

import zipfile

import numpy as np
import pytest

from trainer.engine.saving.arrays.file_kinds import checked_path, open_arrays
from trainer.engine.saving.arrays.safetensors_file import save_arrays


def opened(path):
    return open_arrays(str(path), "a file of weights", "Use something else for folders.")


def test_a_safetensors_file_is_opened(tmp_path):
    save_arrays(tmp_path / "weights.h5", {"up/bias": np.ones(3)})
    with opened(tmp_path / "weights.h5") as file:
        assert list(file) == ["up/bias"]


def test_a_missing_file_names_those_like_it(tmp_path):
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"There is no file .*weight\.safetensors'. Did you mean "
                                                r"'.*weights\.safetensors'\?"):
        opened(tmp_path / "weight.safetensors")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*xyz'\.$"):
        opened(tmp_path / "xyz")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nor its folder '.*missing'"):
        opened(tmp_path / "missing" / "weights.safetensors")


def test_a_missing_file_of_the_working_folder_names_those_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'weights\.safetensors'\?"):
        opened("weight.safetensors")


def test_a_folder_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder. Expected: a file of weights. Use something else"):
        opened(tmp_path)


@pytest.mark.parametrize(("start", "kind"), [
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x80\x04\x95", "a Python pickle"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"hello, world", "is not a safetensors file"),
    (b"", "was cut short"),
])
def test_files_of_other_kinds_are_named(tmp_path, start, kind):
    path = tmp_path / "weights.h5"
    path.write_bytes(start + bytes(40) * bool(start))
    with pytest.raises(ValueError, match=rf"{kind}.*Expected: a file of weights"):
        opened(path)


def test_a_safetensors_file_that_begins_like_another_kind_is_read(tmp_path):
    path = tmp_path / "weights"
    save_arrays(path, {"x": np.ones(3)}, {"padding": "." * (0x80 - 88)})
    assert path.read_bytes()[:1] == b"\x80"
    with opened(path) as file:
        assert list(file) == ["x"]


def test_a_path_is_a_string_or_a_path_object(tmp_path):
    assert checked_path("filepath", tmp_path) == str(tmp_path)
    with pytest.raises(TypeError, match=r"`filepath` must be a path.*type int"):
        checked_path("filepath", 3)


@pytest.mark.parametrize(("names", "kind"), [
    (["metadata.json", "config.json", "model.weights.h5"], "is a model that Keras saved"),
    (["arr_0.npy"], "is an archive of NumPy"),
    (["model/data.pkl", "model/version"], "is a file of PyTorch"),
    (["notes.txt"], "is a zip archive"),
])
def test_archives_are_told_apart(tmp_path, names, kind):
    path = tmp_path / "model"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    with pytest.raises(ValueError, match=rf"{kind}.*Expected: a file of weights.*`set_weights`"):
        opened(path)
