"""A name that promises the format of another program is refused with the name to write."""

import pathlib

import pytest

from trainer.core.files import check_suffix


@pytest.mark.parametrize("suffix", [
    ".h5", ".hdf5", ".keras", ".KERAS", ".onnx", ".pb", ".tflite", ".pt", ".pth", ".pkl", ".npz",
    ".msgpack", ".gguf", ".zip"])
def test_the_suffix_of_another_format_is_refused(suffix):
    with pytest.raises(ValueError, match=rf"`filepath` has the suffix '\{suffix}' of .*Received: 'runs/a{suffix}'\. "
                                         r"Write 'runs/a.safetensors', or 'runs/a' for a folder\.$"):
        check_suffix("filepath", pathlib.Path("runs", f"a{suffix}"), ".safetensors", or_folder=True)


@pytest.mark.parametrize("name", ["a", "a.safetensors", "a.export", "a.h5/b", "epoch-{epoch}-{val_loss:.2f}", ".keras"])
def test_other_names_are_taken(name):
    check_suffix("filepath", name, ".safetensors")
