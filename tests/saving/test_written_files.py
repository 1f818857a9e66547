"""Files that commit 4f300b6 wrote are read by this version; `reference/make_files.py` says how they were made."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import trainer
from tests.reference import make_files
from trainer.core.tree_paths import named_leaves
from trainer.engine.saving.checkpoint import open_checkpoint

FILES = pathlib.Path(__file__).parent / "files"
EXPECTED = dict(np.load(FILES / "expected.npz"))
STATE = [EXPECTED[f"state_{number}"] for number in range(sum(name.startswith("state_") for name in EXPECTED))]
# The compiler and the instructions of the processor may round otherwise than where the files were made.
TOLERANCES = {"rtol": 1e-4, "atol": 1e-6}
RESUME = "import sys, jax, numpy, make_files; model, history = make_files.train(sys.argv[1], verbose=2); " \
         "state = {f'state_{n}': leaf for n, leaf in enumerate(jax.tree.leaves(model.state))}; " \
         "numpy.savez(sys.argv[2], **state, **{f'log_{k}': v for k, v in history.history.items()})"


def built_model():
    model = make_files.new_model()
    model.build(make_files.X)
    return model


@pytest.mark.parametrize("name", ["state", "state.safetensors"])
def test_a_training_state_is_loaded_bit_for_bit_and_predicts_the_same(name):
    model = trainer.load(str(FILES / name), make_files.new_model())
    assert int(model.state.step) == 12  # 16 rows in batches of 4, 3 epochs
    for ours, theirs in zip(jax.tree.leaves(model.state), STATE, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(model.predict(make_files.X, verbose=0), EXPECTED["predictions"], **TOLERANCES)


def test_a_checkpoint_is_restored_on_more_devices(devices):
    checkpoint = open_checkpoint(FILES / "state")
    everywhere = NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec())
    restored = checkpoint.restore({name: jax.ShapeDtypeStruct(*spec, sharding=everywhere)
                                   for name, spec in checkpoint.specs.items()})
    assert all(array.sharding == everywhere for array in restored.values())
    for name, array in checkpoint.restore(checkpoint.targets_here()).items():
        np.testing.assert_array_equal(array, restored[name])


@pytest.mark.slow
def test_weights_are_loaded_bit_for_bit():
    model = built_model()
    model.load_weights(str(FILES / "weights.safetensors"))
    expected = trainer.load(str(FILES / "state"), make_files.new_model()).get_weights()
    for ours, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_run_is_where_it_was_saved():
    checkpoint = open_checkpoint(FILES / "backup" / f"step_{make_files.SAVED_AT}")
    document = checkpoint.document
    assert [document[name] for name in ("epoch", "batch", "batches")] == [1, 2, make_files.SAVED_AT]
    assert document["data"]["start"] == (1, 0)
    assert document["callbacks"]["EarlyStopping"]["best"] == document["logs"]["val_loss"]
    state = {name: spec for name, spec in checkpoint.specs.items() if name.startswith("state/")}
    assert state == {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(
        {"state": built_model().state}).items()}


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_to_the_end_of_an_undisturbed_one(tmp_path):
    # In a process without the suite's compiler flags, which change how numbers are rounded.
    shutil.copytree(FILES / "backup", tmp_path / "backup")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = [subprocess.run([sys.executable, "-c", RESUME, str(tmp_path / backup), str(tmp_path / f"{backup}.npz")],
                           cwd=pathlib.Path(make_files.__file__).parent, env=environment, capture_output=True,
                           text=True, timeout=120) for backup in ("backup", "undisturbed")]
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "Resumed at epoch 2, batch 2" in done[0].stdout and "Resumed" not in done[1].stdout
    resumed, undisturbed = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("backup", "undisturbed"))
    assert resumed.keys() == undisturbed.keys() == EXPECTED.keys() - {"predictions"}
    for name, value in resumed.items():
        np.testing.assert_allclose(value, EXPECTED[name], rtol=2e-3, atol=1e-4, err_msg=name)
        # The first half was computed where the files were made, the rest here, whose rounding Adam magnifies.
        np.testing.assert_allclose(value, undisturbed[name], rtol=2e-3, atol=1e-3, err_msg=name)
