"""A mesh that the script has set for code of its own does not disturb the trainer, and is there again afterwards."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import trainer
from trainer import distribute
from trainer.core.calls.entry_points import with_entry_points

X = np.random.default_rng(0).normal(size=(14, 6)).astype(np.float32)
MESHES = {
    "explicit axes on two devices": lambda: jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2]),
    "automatic axes on four devices": lambda: jax.make_mesh(
        (2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]),
}
STRATEGIES = {
    "one device": lambda: distribute.OneDeviceStrategy("cpu:3"),
    "mirrored": lambda: distribute.MirroredStrategy(jax.devices()[:4]),
    "fully sharded": lambda: distribute.FullyShardedStrategy(jax.devices()[:4], min_shard_bytes=1),
    "model parallel": lambda: distribute.ModelParallelStrategy(
        {"replica": 2, "model": 2}, jax.devices()[:4], {".*kernel": (None, "model")}),
}


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(6, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


def used(module, strategy, **options):
    """Returns numbers from each kind of call that computes."""
    with strategy.scope():
        model = trainer.Model(module)
        model.compile("sgd", "mse", **options)
    numbers = model.fit(X, X, batch_size=7, verbose=0).history["loss"]
    numbers += [model.evaluate(X, X, verbose=0)["loss"], model.predict(X, verbose=0), model(X)]
    model.optimizer.learning_rate = 0.5
    model.set_weights(model.get_weights())
    if not options:
        strategy.explain(model)
        for batch in strategy.experimental_distribute_dataset(trainer.data.Dataset.from_arrays(X).batch(14)):
            rows = strategy.run(lambda x: 2 * x, (batch,))
            numbers += [strategy.reduce("sum", rows, axis=0), strategy.gather(rows)]
    return np.concatenate([np.ravel(np.asarray(number)) for number in numbers])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "module", "options", "mesh"), [
    ("one device", lambda: nn.Dense(6), {"run_eagerly": True}, "explicit axes on two devices"),
    ("one device", lambda: Layers(nnx.Rngs(0)), {}, "automatic axes on four devices"),
    ("mirrored", lambda: Layers(nnx.Rngs(0)), {}, "explicit axes on two devices"),
    ("fully sharded", lambda: nn.Dense(6), {}, "automatic axes on four devices"),
    ("model parallel", lambda: nn.Dense(6), {}, "explicit axes on two devices"),
], ids=["eager", "one device", "mirrored", "fully sharded", "model parallel"])
def test_a_mesh_of_the_script_changes_no_number(strategy, module, options, mesh, capsys):
    expected = used(module(), STRATEGIES[strategy](), **options)
    with jax.set_mesh(MESHES[mesh]()):
        found = used(module(), STRATEGIES[strategy](), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_files_are_written_and_read_beside_a_mesh_of_the_script(tmp_path):
    with STRATEGIES["one device"]().scope():
        model = trainer.Model(nn.Dense(6))
    expected = np.asarray(model(X))
    with jax.set_mesh(MESHES["explicit axes on two devices"]()):
        model.export(tmp_path / "exported")
        model.save(tmp_path / "state")
        exported = trainer.load_exported(tmp_path / "exported")
        loaded = trainer.load(tmp_path / "state", model)
        np.testing.assert_allclose([exported.predict(X), np.asarray(loaded(X))], [expected] * 2, rtol=1e-5)
        np.testing.assert_allclose(np.concatenate(list(model.predict_iter(X, 7))), expected, rtol=1e-5)


def test_the_script_finds_its_mesh_again_after_each_call_and_between_two_values():
    mesh, seen = MESHES["automatic axes on four devices"](), []

    @with_entry_points
    class Counted:
        def values(self):
            try:
                for number in range(2):
                    seen.append(jax.sharding.get_mesh().empty)
                    yield number
            finally:
                seen.append("closed")

        @property
        def fails(self):
            raise KeyError("no value")

    with jax.set_mesh(mesh):
        for _ in Counted().values():
            assert jax.sharding.get_mesh() == mesh
            break
        with pytest.raises(KeyError, match="no value"):
            _ = Counted().fails
        assert jax.sharding.get_mesh() == mesh
        assert list(Counted().values()) == [0, 1]
    assert seen == [True, "closed", True, True, "closed"]
