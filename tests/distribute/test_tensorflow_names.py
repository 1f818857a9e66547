"""Scripts of `tf.distribute` find its names and arguments, or an error that says what to use instead."""

from __future__ import annotations

import re

import jax
import pytest

from trainer import distribute
from trainer.distribute import CommunicationImplementation, CommunicationOptions, MultiWorkerMirroredStrategy
from trainer.distribute.replica import strategy_names
from trainer.distribute.replica.collectives import NcclAllReduce, RingAllReduce
from trainer.distribute.replica.tensorflow_names import MISSING

RING, NCCL = CommunicationImplementation.RING, CommunicationImplementation.NCCL
TASK = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
RESOLVER = distribute.cluster_resolver.TFConfigClusterResolver(TASK)


def test_a_strategy_of_several_processes_without_a_cluster_is_a_mirrored_strategy():
    alone = MultiWorkerMirroredStrategy()
    assert alone.num_replicas_in_sync == len(jax.local_devices()) > 1
    assert alone.mesh == distribute.MirroredStrategy().mesh


@pytest.mark.parametrize(("args", "kwargs", "reduction", "bytes_per_pack"), [
    ((RING,), {}, RingAllReduce, 0),
    ((), {"communication": RING}, RingAllReduce, 0),
    ((), {"communication": "ring"}, RingAllReduce, 0),
    ((distribute.experimental.CollectiveCommunication.AUTO,), {}, NcclAllReduce, 0),
    ((RING, RESOLVER), {}, RingAllReduce, 0),  # as in `tf.distribute.experimental`
    ((RESOLVER, CommunicationOptions(64, implementation=RING)), {}, RingAllReduce, 64),  # as in `tf.distribute`
    ((RESOLVER,), {}, NcclAllReduce, 0),
    ((), {"cluster_resolver": RESOLVER, "communication": NCCL}, NcclAllReduce, 0),
    ((), {"communication_options": distribute.experimental.CollectiveHints(bytes_per_pack=64)}, NcclAllReduce, 64),
])
def test_arguments_have_the_places_and_names_of_tensorflow(args, kwargs, reduction, bytes_per_pack):
    made = MultiWorkerMirroredStrategy(*args, **kwargs)._cross_device_ops
    assert type(made) is reduction and made.options.bytes_per_pack == bytes_per_pack


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), [
    ((CommunicationOptions(),), {"communication": RING}, ValueError, "old name of `communication_options`"),
    ((), {"communication": "rings"}, ValueError, "Did you mean 'RING'"),
    ((), {"communication": 3}, TypeError, "CommunicationImplementation or its name"),
    ((), {"cluster_resolver": "slurm"}, TypeError, "must be a TFConfigClusterResolver.*SLURM"),
    (("ring",), {}, TypeError, "CommunicationOptions or None"),
])
def test_arguments_without_a_meaning_are_refused(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        MultiWorkerMirroredStrategy(*args, **kwargs)


def test_the_cluster_is_that_of_the_resolver(monkeypatch):
    evaluator = distribute.TFConfigClusterResolver({**TASK, "task": {"type": "evaluator", "index": 0}})
    with pytest.raises(distribute.ClusterError, match="'evaluator', which does not train"):
        MultiWorkerMirroredStrategy(cluster_resolver=evaluator)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    MultiWorkerMirroredStrategy(cluster_resolver=RESOLVER)
    two = distribute.TFConfigClusterResolver({**TASK, "cluster": {"worker": ["a:1", "b:1"]}})
    with pytest.raises(distribute.ClusterError, match=r"number 0 of 2, but it has joined.*as number 0 of 1"):
        MultiWorkerMirroredStrategy(cluster_resolver=two)


def owner_of(name):
    """Returns what has the attribute in a script: a module, a strategy, or the context of a replica in `run`."""
    owner = name.rpartition(".")[0]
    if owner in ("Strategy", "TPUStrategy"):
        return distribute.TPUStrategy(devices=["cpu:0"])
    return getattr(distribute, owner) if owner else distribute


@pytest.mark.parametrize("name", [name for name in MISSING if not name.startswith("ReplicaContext.")])
def test_a_name_that_is_missing_says_what_to_use(name):
    with pytest.raises(AttributeError) as raised:
        getattr(owner_of(name), name.rpartition(".")[2])
    assert str(raised.value).endswith(f". Instead of `tf.distribute.{name}`: {MISSING[name]}.")


def test_a_name_of_a_replicas_context_that_is_missing_says_what_to_use():
    with pytest.raises(AttributeError, match=r"merge_call`: .*use `all_reduce`"):
        distribute.OneDeviceStrategy().run(lambda: distribute.get_replica_context().merge_call(print))


def test_an_attribute_error_inside_of_a_property_stays_itself():
    class Own(distribute.Strategy):
        @property
        def broken(self):
            return self.nothing_of_this_name

    with pytest.raises(AttributeError, match=r"'Own' object has no attribute 'nothing_of_this_name'\. All"):
        _ = Own(jax.local_devices()[:1]).broken


@pytest.mark.parametrize("name", strategy_names.MISSING)
def test_a_name_of_pytorch_lightning_or_keras_says_what_to_use(name):
    with pytest.raises(AttributeError) as raised:
        getattr(distribute, name)
    assert str(raised.value).endswith(f" has no attribute {name!r}. {strategy_names.MISSING[name]}")
    for used in re.findall(r"`(\w+Strategy|get_\w+)\(", strategy_names.MISSING[name]):
        assert hasattr(distribute, used)


@pytest.mark.parametrize("strategy", [
    distribute.OneDeviceStrategy, distribute.MirroredStrategy, distribute.FullyShardedStrategy,
    distribute.CentralStorageStrategy])
def test_a_strategy_is_no_context_manager(strategy):
    message = rf"Received: {strategy.__name__}\. Write `with strategy\.scope\(\):`"
    with pytest.raises(TypeError, match=message), strategy():
        pass


@pytest.mark.parametrize(("make", "argument"), [
    (distribute.MirroredStrategy, "devices"), (distribute.FullyShardedStrategy, "devices"),
    (distribute.CentralStorageStrategy, "compute_devices")])
@pytest.mark.parametrize(("received", "count"), [(3, 3), (0, 2), (2.0, 2)])
def test_a_number_of_devices_is_refused_with_the_list_that_is_meant(make, argument, received, count):
    with pytest.raises(TypeError, match=rf"`{argument}` must be .* `jax.local_devices\(\)\[:{count}\]` for the first "
                                        rf"{count}\. Received: a value of type {type(received).__name__}"):
        make(received)
