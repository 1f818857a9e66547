"""A checkpoint appears whole or not at all, and gives back the same bits on any devices."""

import json
import os
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.support.waiting import GUARD_SECS
from trainer.engine.saving.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    array_shards,
    disk,
    open_checkpoint,
    writer,
)

DTYPES = ["bool", "int4", "uint2", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16",
          "bfloat16", "float32", "complex64", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e8m0fnu", "float4_e2m1fn"]
NAMES = ["a/b", "a.b", "a", "a//b", "", "..", "/", "ü κ", "%2F", "a%2Fb", "0/.zarray", "0", "\ud800", "None", "x" * 300]


def save(path, arrays, document=None, **options) -> None:
    with CheckpointWriter() as checkpoints:
        checkpoints.save(path, arrays, document, **options)


def bits_of(dtype: str, count: int = 6) -> np.ndarray:
    """Returns arbitrary bit patterns, NaNs included; ones and zeros for dtypes of less than a byte."""
    if dtype in ("bool", "int4", "uint2", "uint4", "float4_e2m1fn"):
        return (np.arange(count) % 2).astype(dtype)
    width = np.dtype(dtype).itemsize
    return np.random.default_rng(0).integers(0, 256, count * width, np.uint8).view(dtype)


def struct(array, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def same_bits(first, second) -> bool:
    return (first.shape, first.dtype, np.asarray(first).tobytes()) == (second.shape, second.dtype,
                                                                      np.asarray(second).tobytes())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step_3"


@pytest.mark.slow
def test_every_dtype_comes_back_bit_for_bit(path):
    arrays = {dtype: jnp.asarray(bits_of(dtype)).reshape(2, 3) for dtype in DTYPES}
    save(path, arrays)
    restored = open_checkpoint(path).restore(arrays)
    assert [dtype for dtype in DTYPES if not same_bits(restored[dtype], arrays[dtype])] == []


def test_names_are_told_apart_whatever_characters_they_have(path):
    arrays = {name: jnp.full(2, index) for index, name in enumerate(NAMES)}
    save(path, arrays)
    restored = open_checkpoint(path).restore(arrays)
    assert {name: int(array[0]) for name, array in restored.items()} == {name: i for i, name in enumerate(NAMES)}


def test_scalars_and_arrays_without_elements_keep_shape_dtype_and_sharding(path, devices):
    split = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"))
    arrays = {"scalar": jnp.float32(3), "empty": jnp.zeros((0, 3), jnp.bfloat16),
              "split": jax.device_put(jnp.zeros((16, 0), jnp.int8), split)}
    save(path, arrays)
    restored = open_checkpoint(path).restore(arrays)
    assert all(same_bits(restored[name], arrays[name]) for name in arrays)
    assert restored["split"].sharding == split


def test_a_checkpoint_can_have_no_arrays_and_no_elements(path):
    save(path, {}, {"only": "this"})
    assert open_checkpoint(path).restore({}) == {} and open_checkpoint(path).document == {"only": "this"}
    save(path, {"x": jnp.zeros(0)}, replace=True)
    assert open_checkpoint(path).restore({"x": jnp.zeros(0)})["x"].shape == (0,)


def test_the_document_comes_back_with_its_types(path):
    document = {"history": {"loss": [0.5, float("inf")]}, "best": np.float32(0.1), "span": (1, None), 3: b"\0",
                "metric": np.arange(3, dtype=np.int16)}
    save(path, {"x": jnp.ones(3)}, document)
    checkpoint = open_checkpoint(path)
    np.testing.assert_equal(checkpoint.document, document)
    assert type(checkpoint.document["best"]) is np.float32 and checkpoint.document["metric"].dtype == np.int16
    assert checkpoint.specs == {"x": ((3,), np.dtype("float32"))} and checkpoint.path == str(path)


@pytest.mark.parametrize(("saved_on", "read_on"), [(8, 1), (8, 2), (1, 8), (2, 8), (4, 4)])
def test_arrays_are_restored_on_another_number_of_devices(path, devices, saved_on, read_on):
    def shardings(count):
        mesh = Mesh(np.array(devices[:count]), ("d",))
        return {"rows": NamedSharding(mesh, P("d")), "columns": NamedSharding(mesh, P(None, "d")),
                "all": NamedSharding(mesh, P()), "one": SingleDeviceSharding(devices[count - 1])}

    values = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    save(path, {name: jax.device_put(values, sharding) for name, sharding in shardings(saved_on).items()})
    wanted = shardings(read_on)
    restored = open_checkpoint(path).restore({name: struct(values, sharding) for name, sharding in wanted.items()})
    for name, array in restored.items():
        assert array.sharding == wanted[name] and np.array_equal(array, values)


def test_arrays_in_pinned_host_memory_are_saved_and_restored_there(path, devices):
    pinned = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"), memory_kind="pinned_host")
    array = jax.device_put(np.arange(16.0, dtype=np.float32), pinned)
    save(path, {"pinned": array, "other": jnp.ones(2)})
    restored = open_checkpoint(path).restore({"pinned": array, "other": jnp.ones(2)})["pinned"]
    assert restored.sharding == pinned and same_bits(restored, array)


@pytest.mark.slow
def test_arrays_may_be_donated_as_soon_as_save_returns(path, devices):
    step = jax.jit(lambda arrays: [array * 0 - 7 for array in arrays], donate_argnums=0)
    places = [SingleDeviceSharding(devices[0]), NamedSharding(Mesh(np.array(devices), ("d",)), P("d")),
              NamedSharding(Mesh(np.array(devices), ("d",)), P())]
    with CheckpointWriter() as checkpoints:
        for sharding in places:
            for _ in range(2):
                values = [np.random.default_rng(index).random((256, 512), np.float32) for index in range(6)]
                arrays = [jax.device_put(value, sharding) + 0 for value in values]
                checkpoints.save(path, {str(index): array for index, array in enumerate(arrays)}, None, replace=True)
                after = step(arrays)
                assert all(array.is_deleted() for array in arrays)  # nothing of the save holds on to their buffers
                jax.block_until_ready(step(after))
                checkpoints.wait()
                restored = open_checkpoint(path).restore(
                    {str(index): struct(values[0], sharding) for index in range(6)})
                assert all(np.array_equal(restored[str(index)], value) for index, value in enumerate(values))


def test_save_returns_before_anything_is_fetched_and_later_steps_do_not_reach_what_is_saved(path, devices):
    go_on, write_shards = threading.Event(), array_shards.write_shards

    def write_later(*arguments):
        go_on.wait(GUARD_SECS)
        return write_shards(*arguments)

    step = jax.jit(lambda array: array * 2 + 1, donate_argnums=0)
    array = jax.device_put(jnp.arange(64.0), NamedSharding(Mesh(np.array(devices), ("d",)), P("d")))
    with mock.patch.object(array_shards, "write_shards", write_later), CheckpointWriter() as checkpoints:
        checkpoints.save(path, {"x": array}, None)
        for _ in range(3):
            array = jax.block_until_ready(step(array))
        assert not path.exists()
        go_on.set()
    assert np.array_equal(open_checkpoint(path).restore({"x": array})["x"], np.arange(64.0))


def test_arrays_of_devices_without_room_are_on_the_host_before_save_returns(path, devices):
    kinds, write_shards = [], array_shards.write_shards

    def note(folder, process, arrays):
        kinds.extend(array.sharding.memory_kind for array in arrays.values())
        return write_shards(folder, process, arrays)

    class Device:
        def __init__(self, **stats):
            self.memory_stats = lambda: stats or None

    step = jax.jit(lambda array: array * 0, donate_argnums=0)
    array = jax.device_put(jnp.arange(64.0), NamedSharding(Mesh(np.array(devices), ("d",)), P("d")))
    with (mock.patch.object(writer, "_is_on_host", return_value=False),
          mock.patch.object(array_shards, "write_shards", note)):
        with mock.patch.object(writer, "_free_bytes", return_value=31), CheckpointWriter() as checkpoints:  # of 32
            checkpoints.save(path, {"x": array}, None)
            jax.block_until_ready(step(array))
        array = open_checkpoint(path).restore({"x": array})["x"]
        assert np.array_equal(array, np.arange(64.0))
        with mock.patch.object(writer, "_free_bytes", return_value=32):
            save(path, {"x": array}, replace=True)
    assert kinds == ["pinned_host", array.sharding.memory_kind] and kinds[1] != "pinned_host"
    assert writer._free_bytes(Device(bytes_limit=10, peak_bytes_in_use=7, bytes_in_use=1)) == 3
    assert writer._free_bytes(Device()) == 0


def test_the_document_may_be_changed_as_soon_as_save_returns(path):
    document = {"values": np.zeros(1000), "epochs": [1]}
    with CheckpointWriter() as checkpoints:
        checkpoints.save(path, {"x": jnp.ones(3)}, document)
        document["values"][:] = 1
        document["epochs"].append(2)
    found = open_checkpoint(path).document
    assert not found["values"].any() and found["epochs"] == [1]


def test_save_returns_before_the_files_are_in_place_and_wait_after(path):
    go_on = threading.Event()
    with mock.patch.object(writer, "write_manifest", side_effect=lambda *_: go_on.wait(GUARD_SECS)):
        checkpoints = CheckpointWriter()
        checkpoints.save(path, {"x": jnp.ones(3)}, None)
        assert not path.exists()
        go_on.set()
        checkpoints.wait()
    assert path.is_dir()


def test_a_second_save_waits_for_the_first(path, tmp_path):
    order = []
    with CheckpointWriter() as checkpoints:
        checkpoints.save(path, {}, None, on_saved=lambda: (time.sleep(0.1), order.append("first is saved")))
        checkpoints.save(tmp_path / "step_4", {}, None)
        order.append("second save returned")
    assert order == ["first is saved", "second save returned"]


def test_what_is_called_after_a_save_finds_it_in_place_and_its_error_is_raised(path):
    def fail():
        raise RuntimeError(f"called, in place: {path.is_dir()}")

    checkpoints = CheckpointWriter()
    checkpoints.save(path, {"x": jnp.ones(3)}, {"kept": True}, on_saved=fail)
    with pytest.raises(RuntimeError, match="called, in place: True"):
        checkpoints.wait()
    checkpoints.close()
    assert open_checkpoint(path).document == {"kept": True}


def test_a_checkpoint_is_replaced_only_if_asked_for_and_nothing_but_a_checkpoint_is(path):
    save(path, {}, "old")
    with pytest.raises(FileExistsError, match=r"step_3.*`replace=True`"):
        save(path, {}, "new")
    assert open_checkpoint(path).document == "old"
    save(path, {"x": jnp.ones(3)}, "new", replace=True)
    assert open_checkpoint(path).document == "new" and os.listdir(path.parent) == ["step_3"]
    notes = path.parent / "notes"
    notes.mkdir()
    with pytest.raises(FileExistsError, match="notes' is not a checkpoint, so it is not replaced"):
        save(notes, {}, "new", replace=True)


def test_a_checkpoint_is_replaced_where_two_names_cannot_be_exchanged(path):
    save(path, {}, "old")
    with mock.patch.object(disk, "_exchange", return_value=False):
        save(path, {}, "new", replace=True)
    assert open_checkpoint(path).document == "new" and os.listdir(path.parent) == ["step_3"]


def test_a_failed_replacement_leaves_the_old_checkpoint(path):
    save(path, {}, "old")
    with mock.patch.object(disk, "_exchange", side_effect=OSError(5, "Input/output error")), \
            pytest.raises(OSError, match=r"step_3' could not be saved: Input/output error"):
        save(path, {}, "new", replace=True)
    assert open_checkpoint(path).document == "old" and os.listdir(path.parent) == ["step_3"]


def test_an_error_in_the_background_is_raised_once_by_the_next_save(path, tmp_path):
    save(path, {}, "old")
    checkpoints = CheckpointWriter()
    with mock.patch.object(writer, "write_manifest", side_effect=OSError(28, "No space left on device")):
        checkpoints.save(tmp_path / "step_4", {"x": jnp.ones(3)}, None)
        with pytest.raises(OSError, match=r"step_4' could not be saved: No space left on device") as caught:
            checkpoints.save(tmp_path / "step_5", {}, None)
    assert caught.value.errno == 28 and os.listdir(tmp_path) == ["step_3"] and open_checkpoint(path).document == "old"
    checkpoints.save(tmp_path / "step_5", {}, "later")
    checkpoints.close()
    assert open_checkpoint(tmp_path / "step_5").document == "later"


def test_another_error_in_the_background_names_the_checkpoint(path):
    with mock.patch.object(writer, "write_manifest", side_effect=RuntimeError("odd")), \
            pytest.raises(CheckpointError, match=r"step_3' could not be saved: RuntimeError: odd"):
        save(path, {"x": jnp.ones(3)})
    assert os.listdir(path.parent) == []


def test_an_error_before_save_returns_names_the_checkpoint_and_leaves_nothing(path):
    with mock.patch.object(writer, "_out_of_reach", side_effect=OSError(28, "No space left on device")), \
            pytest.raises(OSError, match=r"step_3' could not be saved: No space left on device"):
        save(path, {"x": jnp.ones(3)})
    assert os.listdir(path.parent) == []


def test_parent_folders_are_made_and_relative_paths_are_of_the_time_of_the_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointWriter() as checkpoints:
        checkpoints.save("runs/a/step_1", {"x": jnp.ones(3)}, 1)
        monkeypatch.chdir("/")
    assert open_checkpoint(tmp_path / "runs" / "a" / "step_1").document == 1


@pytest.mark.parametrize(("arrays", "message"), [
    ({"x": np.ones(3)}, r"`arrays\['x'\]` must be a JAX array. Received: a value of type ndarray"),
    ({3: 1.0}, "`arrays` must be a mapping from names"),
])
def test_anything_but_arrays_by_name_is_refused(path, arrays, message):
    with pytest.raises(TypeError, match=message):
        save(path, arrays)
    assert os.listdir(path.parent) == []


def test_what_cannot_be_saved_is_refused_before_anything_is_written(path):
    with pytest.raises(TypeError, match=r"'key' is a random key.*key_data"):
        save(path, {"key": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"`document\['f'\]` is of type"):
        save(path, {}, {"f": len})
    assert os.listdir(path.parent) == []


def test_other_names_shapes_and_dtypes_are_refused_and_listed(path):
    save(path, {"up/kernel": jnp.ones((2, 3)), "up/bias": jnp.ones(3), "step": jnp.int32(1), "same": jnp.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).restore({"up/kernels": jnp.ones((2, 3)), "up/bias": jnp.ones(4), "step": jnp.float32(1),
                                       "same": jnp.ones(1)})
    assert str(caught.value).splitlines() == [
        f"The arrays of the checkpoint {str(path)!r} do not match the wanted arrays.",
        "1 missing from the checkpoint: up/kernels (near: up/kernel)",
        "1 in the checkpoint but not wanted: up/kernel",
        "2 of another shape or dtype: up/bias (checkpoint: float32(3,), wanted: float32(4,)), "
        "step (checkpoint: int32(), wanted: float32())",
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_no_dtype_is_cast(path, dtype):
    save(path, {"x": jnp.ones(3)})
    with pytest.raises(CheckpointError, match=rf"x \(checkpoint: float32\(3,\), wanted: {dtype}\(3,\)\)"):
        open_checkpoint(path).restore({"x": jnp.ones(3, dtype)})


@pytest.mark.parametrize("target", [jax.ShapeDtypeStruct((3,), jnp.float32), np.ones(3, np.float32), None])
def test_a_target_needs_a_sharding(path, target):
    save(path, {"x": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"`targets\['x'\]` must be a `jax.ShapeDtypeStruct` with a sharding"):
        open_checkpoint(path).restore({"x": target})


def test_a_checkpoint_that_is_not_there_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint '.*step_3'"):
        open_checkpoint(path)


def test_nothing_that_is_written_is_a_pickle(path):
    save(path, {"x": jnp.ones(3)}, {"a": (1, b"x", np.float32(1))})
    assert sorted(os.listdir(path)) == ["arrays.safetensors", "document.json", "manifest.json", "state"]
    assert json.loads((path / "document.json").read_text())["arrays"] == {"x": {"shape": [3], "dtype": "float32"}}
