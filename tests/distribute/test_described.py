"""Topologies by name, strategies made again over other devices, and what stands for arrays on described devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import distribute
from trainer.data.sources.groups import Group
from trainer.distribute.placement import described, placement
from trainer.distribute.placement.described import Topology, described_devices
from trainer.distribute.placement.gpu_kinds import GPU_KINDS


@given(hosts=st.integers(1, 8), gpus=st.integers(1, 64), kind=st.sampled_from(sorted(GPU_KINDS)))
def test_a_topology_is_read_as_it_is_written(hosts, gpus, kind):
    topology = Topology(hosts, gpus, kind)
    assert Topology.of(str(topology)) == Topology.of(str(topology).upper()) == Topology.of(topology) == topology
    assert topology.size == hosts * gpus


@pytest.mark.parametrize(("text", "message"), [
    ("h100", "GPUs x kind, such as '8xh100'"), ("8h100", "GPUs x kind"), ("x8xh100", "GPUs x kind"),
    ("8xh10", "Did you mean 'h100'"), ("0xh100", "1 to 4096 GPUs. Received: '0xh100', of 0"),
    ("64x1024xh100", "of 65536"), ("2x2x8xh100", "hosts x GPUs x kind"),
])
def test_another_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Topology.of(text)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="`topology` must be a text such as '8xh100'"):
        Topology.of(8)


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch):
    def no_plugin(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(described.topologies, "get_topology_desc", no_plugin)
    monkeypatch.setattr(described, "_PLUGINS", ("jax_plugins.none", "none.at_all"))
    assert not described.is_plugin_installed()
    with pytest.raises(ImportError, match=r"pip install 'trainer-jax\[gpu-programs\]'"):
        described_devices("8xh100")


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_what_xla_is_told_of_a_gpu_is_what_the_estimate_uses(kind):
    gpu = GPU_KINDS[kind]
    for line in (f"device_memory_size: {gpu.memory_bytes}", f"memory_bandwidth: {int(gpu.memory_bandwidth)}",
                 f'device_description_str: "{gpu.name}"'):
        assert line in gpu.target_config


def test_devices_of_this_machine_are_there(devices):
    assert not described.is_described(devices[0])
    assert not distribute.MirroredStrategy(devices[:2]).is_described


def over_four(strategy, devices):
    made = strategy.over(devices[4:])
    assert type(made) is type(strategy) and list(made.mesh.devices.flat)[:1] == devices[4:5]
    return made


def test_a_strategy_keeps_its_options_over_other_devices(devices):
    ring = distribute.RingAllReduce()
    mirrored = over_four(distribute.MirroredStrategy(devices[:2], ring), devices)
    assert mirrored.num_replicas_in_sync == 4 and mirrored._cross_device_ops is ring
    assert over_four(distribute.OneDeviceStrategy("cpu:0"), devices).num_replicas_in_sync == 1
    sharded = over_four(distribute.FullyShardedStrategy(devices[:2], level="optimizer", min_shard_bytes=0), devices)
    assert sharded._rule == (4, 0, False, "replica")


def test_a_replica_keeps_its_size_over_other_devices(devices):
    strategy = distribute.ModelParallelStrategy({"model": 2}, devices[:2], {"kernel": (None, "model")})
    made = over_four(strategy, devices)
    assert dict(made.mesh.shape) == {"replica": 2, "model": 2} and made.layout_map is strategy.layout_map
    with pytest.raises(ValueError, match=r"2 devices in each replica, which do not divide 3\. Give another"):
        strategy.over(devices[:3])


@pytest.mark.slow
def test_a_strategy_made_again_trains(devices):
    from flax import linen as nn

    import trainer

    with distribute.FullyShardedStrategy(devices[:2], min_shard_bytes=0).over(devices[2:6]).scope():
        model = trainer.Model(nn.Dense(4))
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 4), np.float32), np.ones((8, 4), np.float32), verbose=0)
    assert len(model.state.params["kernel"].sharding.device_set) == 4


@pytest.fixture
def nowhere(monkeypatch, devices):
    """A sharding whose devices are taken for described devices."""
    monkeypatch.setattr(placement, "is_described", lambda device: True)
    return distribute.MirroredStrategy(devices[:2])._whole


def test_nothing_is_placed_on_described_devices(nowhere):
    tree = {"x": np.zeros((2, 3), np.float64), "key": jax.eval_shape(jax.random.key, 0)}
    shapes = placement.to_devices(tree, nowhere)
    assert (shapes["x"].shape, shapes["x"].dtype, shapes["x"].sharding) == ((2, 3), jnp.float32, nowhere)
    assert shapes["key"].dtype == tree["key"].dtype
    assert placement.to_devices(tree, dict.fromkeys(tree, nowhere)) == shapes


def test_no_batches_are_placed_on_described_devices(nowhere, devices, monkeypatch):
    strategy = distribute.MirroredStrategy(devices[:2])
    monkeypatch.setattr(strategy, "is_described", True)
    placed = strategy.place_group(Group(np.zeros((1, 4, 3)), count=1, rows=4, first=0)).data
    assert isinstance(placed, jax.ShapeDtypeStruct) and placed.shape == (1, 4, 3)


def test_variables_in_a_described_hosts_memory_are_refused(devices):
    device = types.SimpleNamespace(client=types.SimpleNamespace(runtime_type="compile_only_runtime"))
    with pytest.raises(ValueError, match=r"described devices have no host\. Plan `FullyShardedStrategy\(\)`"):
        distribute.CentralStorageStrategy(devices[:1]).over([device])


def test_no_weights_are_placed_on_described_devices(devices, monkeypatch):
    from flax import linen as nn

    import trainer

    strategy = distribute.MirroredStrategy(devices[:1])
    monkeypatch.setattr(strategy, "is_described", True)
    with strategy.scope():
        model = trainer.Model(nn.Dense(4))
    with pytest.raises(ValueError, match=r"described only: no weights can be placed there\. Use `strategy\.plan"):
        model.build(np.ones((1, 4)))
