"""Files that an older version wrote are read by this one; `reference/make_files.py` says how they were made."""

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
from trainer.saving.checkpoint import open_checkpoint

FILES = pathlib.Path(make_files.__file__).parent / "files"
EXPECTED = dict(np.load(FILES / "expected.npz"))
WEIGHTS = [EXPECTED[f"weight_{number}"] for number in range(sum(name.startswith("weight_") for name in EXPECTED))]
# The compiler and the instructions of the processor may round otherwise than where the files were made.
TOLERANCES = {"rtol": 1e-4, "atol": 1e-6}
RESUME = "import sys, numpy, make_files; model, history = make_files.train(sys.argv[1], verbose=2); " \
         "numpy.savez(sys.argv[2], *model.get_weights(), **{f'log_{k}': v for k, v in history.history.items()})"


def built_model():
    model = make_files.new_model()
    model.build(make_files.X)
    return model


@pytest.mark.parametrize("name", ["state", "state.safetensors"])
def test_a_training_state_is_loaded_bit_for_bit_and_predicts_the_same(name):
    model = trainer.load(str(FILES / name), make_files.new_model())
    assert int(model.state.step) == 12  # 16 rows in batches of 4, 3 epochs
    for ours, theirs in zip(model.get_weights(), WEIGHTS, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(model.predict(make_files.X, verbose=0), EXPECTED["predictions"], **TOLERANCES)


def test_a_checkpoint_is_restored_on_more_devices(devices):
    checkpoint = open_checkpoint(FILES / "state")
    everywhere = NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec())
    restored = checkpoint.restore({name: jax.ShapeDtypeStruct(*spec, sharding=everywhere)
                                   for name, spec in checkpoint.specs.items()})
    assert checkpoint.processes is None and all(array.sharding == everywhere for array in restored.values())
    for name, array in checkpoint.restore(checkpoint.targets_here()).items():
        np.testing.assert_array_equal(array, restored[name])


def test_weights_are_loaded_bit_for_bit():
    model = built_model()
    report = model.load_weights(str(FILES / "weights.safetensors"))
    assert len(report.matched) == len(WEIGHTS)
    for ours, theirs in zip(model.get_weights(), WEIGHTS, strict=True):
        np.testing.assert_array_equal(ours, theirs)


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
    assert resumed.keys() == undisturbed.keys()
    for name, value in resumed.items():
        expected = EXPECTED[name if name.startswith("log_") else name.replace("arr_", "weight_")]
        np.testing.assert_allclose(value, expected, rtol=2e-3, atol=1e-4, err_msg=name)
        # The first half was computed where the files were made, the rest here; this is what follows from it.
        np.testing.assert_allclose(value, undisturbed[name], rtol=2e-3, atol=1e-4, err_msg=name)
