"""Parts of arrays: which process writes which, and what is read of them."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.engine.saving.checkpoint import array_shards

VALUES = np.arange(16 * 8, dtype=np.int16).reshape(16, 8)


def placed(devices, *names, shape=(4, 2)):
    mesh = Mesh(np.array(devices).reshape(shape), ("a", "b"))
    return jax.device_put(VALUES, NamedSharding(mesh, P(*names)))


def target(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


@pytest.mark.parametrize("names", [(), ("a",), (None, "b"), ("a", "b"), ("b", "a"), (("a", "b"),)])
@pytest.mark.parametrize("block", [1, 48, 10**6])
def test_any_part_is_read_from_any_others(tmp_path, devices, monkeypatch, names, block):
    monkeypatch.setattr(array_shards, "_READ_BYTES", block)
    layouts = [(), ("a",), (None, "a"), ("a", "b"), (("b", "a"),)]
    array_shards.write_shards(str(tmp_path), 0, {str(saved): placed(devices, *saved) for saved in layouts})
    index = array_shards.read_index(str(tmp_path), 1)
    wanted = placed(devices, *names)
    for saved in layouts:
        with array_shards.ShardFiles() as files:
            found = array_shards.read_array(index[str(saved)], target(wanted), files)
        assert np.array_equal(found, VALUES) and found.sharding == wanted.sharding


def test_of_replicas_one_is_written_and_arrays_are_let_go(tmp_path, devices):
    arrays = {"all": placed(devices), "rows": placed(devices, "a"), "none": jnp.zeros((0, 3))}
    summary = array_shards.write_shards(str(tmp_path), 3, arrays)
    assert arrays == {} and summary["3.bytes"]["size"] == os.path.getsize(tmp_path / "3.bytes") == 2 * VALUES.nbytes
    index = json.loads((tmp_path / "3.json").read_text())
    assert index["none"] == [] and index["all"] == [{"offset": 0, "window": [[0, 16], [0, 8]]}]
    assert [part["window"][0] for part in index["rows"]] == [[0, 4], [4, 8], [8, 12], [12, 16]]


def test_files_that_hold_less_than_an_array_are_an_error(tmp_path, devices):
    array_shards.write_shards(str(tmp_path), 0, {"x": placed(devices, "a")})
    found, wanted = array_shards.read_index(str(tmp_path), 1)["x"], target(placed(devices))
    with pytest.raises(ValueError, match=r"The 3 parts of an array of shape \(16, 8\) do not cover each of its values"):
        array_shards.read_array(found[1:], wanted, array_shards.ShardFiles())
    os.truncate(tmp_path / "0.bytes", VALUES.nbytes - 1)
    with array_shards.ShardFiles() as files, pytest.raises(ValueError, match=r"0.bytes' is cut short"):
        array_shards.read_array(found, wanted, files)
