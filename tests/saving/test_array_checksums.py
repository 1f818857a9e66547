"""A file with checksums is refused wherever a bit of an array, or of what describes it, is another."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.engine.saving.arrays.safetensors_file import read_arrays, save_arrays


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def read_all(path):
    with read_arrays(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", ["x", "größer/y"])
def test_an_array_with_another_bit_is_refused_by_its_checksum(path, name):
    arrays = {"x": np.arange(5), "größer/y": np.ones((2, 3), jnp.bfloat16), "none": np.ones(0)}
    save_arrays(path, arrays, checksums=True)
    assert read_all(path).keys() == {"x", "größer/y", "none"}
    with read_arrays(path) as arrays:
        assert arrays.metadata == {}
        place = arrays._data_start + arrays._offsets[name][0]
    flip(path, place)
    with read_arrays(path) as arrays:
        for other in arrays.keys() - {name}:
            arrays[other]
        with pytest.raises(ValueError, match=rf"weights.safetensors' is damaged: the array '{name}' does not have the"):
            arrays[name]


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_bit_of_a_header_with_checksums_matters(path):
    save_arrays(path, {"one": np.ones(2, np.int8)}, checksums=True)
    expected = read_all(path)
    for place in range(8, path.stat().st_size):
        flip(path, place)
        with contextlib.suppress(ValueError):
            read = read_all(path)
            assert read.keys() == expected.keys() and read["one"].tolist() == [1, 1] and read["one"].dtype == np.int8
        flip(path, place)


@pytest.mark.parametrize("text", ["", "[]", '{"other": ""}', "[" * 100_000])
def test_checksums_of_other_arrays_are_refused(path, text):
    save_arrays(path, {"x": np.ones(1)}, {"sha256_of_arrays": text})
    with pytest.raises(ValueError, match=r"weights.safetensors' is damaged: its checksums do not match its arrays"):
        read_arrays(path)
