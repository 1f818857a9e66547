"""Saves to a real S3 server: several processes, kills, failures of the network, and what a killed upload leaves."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import object_stores, project_files
from trainer.core.files import storage

pytestmark = pytest.mark.processes
pytest.importorskip("moto")
pytest.importorskip("s3fs")

ONE_OF_TWO = """
import sys
path, port, index, as_orbax = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "orbax"
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter, open_checkpoint
mesh = Mesh(np.array(jax.devices()), ("d",))
values = np.arange(32, dtype=np.float32).reshape(8, 4)
def on(spec):
    return jax.make_array_from_callback((8, 4), NamedSharding(mesh, spec), lambda part: values[part])
arrays = {"a/rows": on(P("d")), "a/all": on(P()), "none": jax.make_array_from_callback(
    (0, 4), NamedSharding(mesh, P()), lambda part: np.zeros((0, 4)))}
folder = CheckpointFolder(path, keep=2)
folder.acquire()
with CheckpointWriter() as writer:
    for step in (1, 2, 3, 3):
        writer.save(folder.path_of(step), arrays, {"step": step}, replace=True, on_saved=folder.prune,
                    as_orbax=as_orbax)
checkpoint = open_checkpoint(folder.newest_whole(), verify=False)
wanted = {"a/rows": on(P()), "a/all": on(P(None, "d")), "none": arrays["none"]}
for name, array in checkpoint.restore(wanted).items():
    assert array.sharding == wanted[name].sharding and array.dtype == np.float32
    assert name == "none" or all(np.array_equal(shard.data, values[shard.index]) for shard in array.addressable_shards)
folder.release()
print(folder.steps(), checkpoint.document, checkpoint.processes)
"""


@pytest.fixture(scope="module")
def server():
    with object_stores.s3_server() as variables:
        yield variables


@pytest.fixture
def place(server, monkeypatch, request):
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_stores.BUCKET}/{request.node.name}"


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["shards", "orbax"])
def test_two_processes_save_and_restore_one_checkpoint(place, tmp_path, form):
    path = tmp_path / "run" if form == "orbax" else place
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [subprocess.Popen([sys.executable, "-c", ONE_OF_TWO, str(path), str(port), str(index), form],
                                  cwd=project_files.ROOT, text=True, env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE) for index in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [output for output, _ in results] == ["[2, 3] {'step': 3} 2\n"] * 2, results
    if form == "orbax":
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(path / "step_3" / "default", {"a": {
                "rows": np.zeros((8, 4), "f4"), "all": np.zeros((8, 4), "f4")}})
        np.testing.assert_array_equal(found["a"]["rows"], np.arange(32).reshape(8, 4))
    else:
        assert object_stores.leftovers(place) == []


def test_kills_during_saves_leave_whole_checkpoints(place):
    for saved in object_stores.kill_during_saves(place, kills=3):
        object_stores.check(place, saved)


def compiled():
    model = trainer.Model(nn.Dense(1), seed=0)
    model.compile("adam", "mse")
    return model


def test_a_run_resumes_exactly_from_s3(place):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("f4")

    def run(epochs):
        model = compiled()
        history = model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=[
            trainer.callbacks.BackupAndRestore(f"{place}/run", delete_checkpoint=False)])
        return model, history.history

    run(2)
    resumed, its_history = run(3)
    model = compiled()
    history = model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0).history
    assert history == its_history
    for weight, same in zip(resumed.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)


def test_the_parts_of_an_upload_that_was_killed_are_removed(place):
    import s3fs

    store = s3fs.S3FileSystem()
    key = place.removeprefix(f"s3://{object_stores.BUCKET}/") + "/step_1/data.0123456789ab/state/0.bytes"
    store.call_s3("create_multipart_upload", Bucket=object_stores.BUCKET, Key=key)

    def keys():
        return [upload["Key"] for upload in store.list_multipart_uploads(object_stores.BUCKET)]

    assert keys() == [key]
    storage.abort_uploads(f"{place}/step_2")
    assert keys() == [key]
    storage.abort_uploads(f"{place}/step_1")
    assert keys() == []


@pytest.mark.usefixtures("place")
def test_a_bucket_that_is_not_there_is_named():
    model = compiled()
    model.build(np.zeros((1, 3)))
    with pytest.raises(OSError, match=r"s3://no-such-bucket/w\.safetensors.*bucket"):
        model.save_weights("s3://no-such-bucket/w.safetensors")


def test_the_compilation_cache_of_jax_is_in_s3(place):
    script = f"""
import trainer, jax, jax.numpy as jnp
print(trainer.enable_compilation_cache("{place}/cache"))
jax.jit(lambda x: x * 3)(jnp.ones(3))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                           cwd=project_files.ROOT, env=environment, check=True)
    assert found.stdout == f"{place}/cache\n"
    assert any(name.startswith("jit__lambda") for name in storage.names(f"{place}/cache"))
