"""Checkpoints of Orbax: written here and read by a script that knows nothing of the trainer, and the reverse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import trainer
from trainer.callbacks import OrbaxCheckpoint

ocp = pytest.importorskip("orbax.checkpoint")

X, Y = np.random.default_rng(0).normal(size=(16, 4)).astype("f4"), np.ones((16, 8), "f4")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(8)(nn.BatchNorm(use_running_average=not training)(nn.Dense(8)(x)))


def compiled(strategy=None, seed=0):
    with (strategy or trainer.distribute.OneDeviceStrategy()).scope():
        model = trainer.Model(Net(), seed=seed)
        model.compile("adam", "mse")
    return model


def assert_same(model, tree):
    """Compares a model's weights with a tree of Orbax."""
    for name, variable in ((f"params/{path}", leaf) for path, leaf in trainer_leaves(model.state.params)):
        np.testing.assert_array_equal(variable, leaf_of(tree, name), err_msg=name)


def trainer_leaves(tree):
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def leaf_of(tree, name):
    for key in name.split("/"):
        tree = tree[key]
    return tree


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of `OrbaxCheckpoint`, and the model of its last checkpoint."""
    folder = tmp_path_factory.mktemp("orbax") / "run"
    model = compiled(trainer.distribute.FullyShardedStrategy(jax.devices()[:4]))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(folder, max_to_keep=2)])
    return folder, model


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # by a reader that names no sharding
@pytest.mark.parametrize("read", ["manager", "manager by default", "standard", "pytree"])
def test_a_script_of_orbax_reads_what_is_written_here(written, read):
    folder, model = written
    if read.startswith("manager"):
        with ocp.CheckpointManager(folder) as manager:
            assert manager.all_steps() == [0, 1]
            tree = manager.restore(1, args=ocp.args.StandardRestore() if read == "manager" else None)
    else:
        reader = ocp.StandardCheckpointer() if read == "standard" else ocp.PyTreeCheckpointer()
        tree = reader.restore(folder / "1" / "default")
        reader.close()
    assert_same(model, tree)
    assert int(tree["step"]) == 4


def flax_state(params, batch_stats):
    class State(TrainState):
        batch_stats: dict

    return State.create(apply_fn=None, params=params, tx=optax.adam(1e-3), batch_stats=batch_stats)


def write(kind, folder, tree):
    """Writes a tree as scripts of Orbax do; returns the path to read."""
    if kind == "manager":
        with ocp.CheckpointManager(folder) as manager:
            for step in (3, 20):
                content = tree if step == 20 else jax.tree.map(jnp.zeros_like, tree)
                manager.save(step, args=ocp.args.StandardSave(content))
            manager.wait_until_finished()
        return folder
    if kind == "standard":
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder / "tree", tree)
        return folder / "tree"
    options = {"zarr": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}, "pytree": {}}[kind]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
        writer.save(folder / "tree", ocp.args.PyTreeSave(tree))
    return folder / "tree"


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["manager", "standard", "pytree", "zarr", "zarr3"])
@pytest.mark.parametrize("tree", ["params", "variables", "state", "kauldron"])
def test_weights_of_a_script_of_orbax_are_read_into_shards(tmp_path, kind, tree):
    variables = Net().init(jax.random.key(7), X)
    params, stats = variables["params"], jax.tree.map(lambda leaf: leaf + 2, variables["batch_stats"])
    content = {"params": params, "variables": {"params": params, "batch_stats": stats},
               "state": flax_state(params, stats),
               "kauldron": {"step": 3, "params": params, "collections": {"batch_stats": stats},
                            "opt_state": optax.adam(1e-3).init(params)}}[tree]
    path = write(kind, tmp_path, content)
    model = compiled(trainer.distribute.FullyShardedStrategy(jax.devices()[:4]))
    model.build(X)
    before = jax.tree.map(lambda leaf: leaf.sharding, model.state.params)
    report = model.load_weights(path, partial=tree == "params")
    assert len(report.matched) == (6 if tree == "params" else 8) and not report.unexpected
    assert_same(model, {"params": params})
    assert jax.tree.map(lambda leaf: leaf.sharding, model.state.params) == before
    mean = model.state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_array_equal(mean, np.full(8, 0.0 if tree == "params" else 2.0))
    model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_weights_are_cast_and_numbers_that_do_not_fit_are_refused(tmp_path):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), Net().init(jax.random.key(7), X)["params"])
    model = compiled()
    model.build(X)
    model.load_weights(write("standard", tmp_path, params), partial=True)
    assert_same(model, {"params": params})
    assert model.state.params["Dense_0"]["kernel"].dtype == jnp.float32
    params["Dense_0"]["kernel"] = params["Dense_0"]["kernel"][:2]
    with pytest.raises(ValueError, match=r"(?s)another shape or kind of dtype: Dense_0/kernel .*of Orbax"):
        model.load_weights(write("pytree", tmp_path / "b", params), partial=True)


def test_weights_of_nnx_are_read(tmp_path):
    module = nnx.Linear(4, 8, rngs=nnx.Rngs(3))
    path = write("standard", tmp_path, nnx.state(module))
    model = trainer.Model(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    model.build(X)
    model.load_weights(path)
    np.testing.assert_array_equal(model.predict(X, verbose=0), module(X))


@pytest.mark.slow
def test_a_training_state_that_a_script_copied_is_loaded_and_trains_on(written, tmp_path):
    folder, _ = written
    with ocp.StandardCheckpointer() as copier:
        copier.save(tmp_path / "copy", copier.restore(folder / "1" / "default"))
    unbuilt = compiled()
    with pytest.raises(ValueError, match=r"Orbax's checkpoint of another program.*Call `model.build\(sample\)`"):
        trainer.load(tmp_path / "copy", unbuilt)
    unbuilt.build(X)
    loaded, direct = trainer.load(tmp_path / "copy", unbuilt), trainer.load(folder, compiled())
    for each in (loaded, direct):
        each.fit(X, Y, verbose=0, shuffle=False)
    for weight, same in zip(loaded.get_weights(), direct.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)


def test_a_tree_that_is_no_training_state_is_refused(tmp_path):
    model = compiled()
    model.build(X)
    path = write("standard", tmp_path, Net().init(jax.random.key(7), X))
    with pytest.raises(ValueError, match=r"(?s)not match the model's training state.*load_weights` loads only"):
        trainer.load(path, model)
    with ocp.CheckpointManager(tmp_path / "two", item_names=("a", "b")) as manager:
        manager.save(0, args=ocp.args.Composite(**dict.fromkeys("ab", ocp.args.StandardSave({"x": X}))))
        manager.wait_until_finished()
    with pytest.raises(ValueError, match=r"has several trees of Orbax: a, b\. Give the path of one"):
        model.load_weights(tmp_path / "two")


def test_a_flipped_bit_is_found_in_what_is_written_here(tmp_path):
    model = compiled()
    model.fit(X, Y, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run")])
    file = max((tmp_path / "run" / "0" / "default").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for load in (lambda: trainer.load(tmp_path / "run", compiled()), lambda: model.load_weights(tmp_path / "run")):
        with pytest.raises(ValueError, match="has other bytes than were written"):
            load()
