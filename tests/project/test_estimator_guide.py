"""docs/migration/from_tf_estimator.md gives TensorFlow's numbers: its programs run in TensorFlow and here.

TENSORFLOW_PYTHON names a Python whose TensorFlow still has Estimator, such as 2.15.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support import pages, project_files

GUIDE = "docs/migration/from_tf_estimator.md"
PYTHON = os.environ.get("TENSORFLOW_PYTHON")
RESULTS = ["metrics", "logs", "metrics_of_table", "metrics_of_rows", "outputs", "served"]
# The same numbers in Keras style, by the name of TensorFlow's.
IN_KERAS_STYLE = {"logs_of_table": "metrics_of_table", "logs_of_rows": "metrics_of_rows",
                  "logs_of_carried": "metrics_of_rows", "served_by_model": "served"}
CARRIED = re.compile(r"^weights = .*$", re.MULTILINE)

pytestmark = [
    pytest.mark.slow, pytest.mark.processes,
    pytest.mark.skipif(not PYTHON, reason="needs TENSORFLOW_PYTHON, a Python with TensorFlow 2.15"),
]

_END = """
import json
def numbers(value):
    if isinstance(value, dict):
        return {name: float(number) for name, number in value.items()}
    return np.asarray(value).ravel().tolist()
print("\\nRESULTS " + json.dumps({name: numbers(globals()[name]) for name in %r}))
"""

_OPTIMIZERS = """
import numpy as np
import tensorflow.compat.v1 as tf1
rate, results = 0.05, {}
for text in %r:
    with tf1.Graph().as_default(), tf1.Session() as session:
        weights = tf1.get_variable("weights", initializer=np.array([1.0, -2.0, 0.3], np.float32))
        loss = tf1.reduce_sum(tf1.square(weights - 0.5) * [1.0, 0.1, 5.0])
        step = eval(text).minimize(loss)
        session.run(tf1.global_variables_initializer())
        for _ in range(10):
            session.run(step)
        results[text] = session.run(weights)
globals().update(results)
"""

_OUR_OPTIMIZERS = """
import jax
import numpy as np
import optax
import trainer
rate, results = 0.05, {}
gradient = jax.grad(lambda weights: (np.array([1.0, 0.1, 5.0]) * (weights - 0.5) ** 2).sum())
for text in %r:
    weights = jax.numpy.array([1.0, -2.0, 0.3])
    optimizer = eval(text)
    state = optimizer.init(weights)
    for _ in range(10):
        updates, state = optimizer.update(gradient(weights), state, weights)
        weights = weights + updates
    results[text] = weights
globals().update(results)
"""


def results_of(python: str, program: str, names: list[str], folder: pathlib.Path) -> dict:
    """Returns what the names stand for after a program has run in a folder, on one CPU device."""
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    if python == sys.executable:
        environment["PYTHONPATH"] = str(project_files.ROOT)
    run = subprocess.run([python, "-c", program + _END % (names,)], cwd=folder, capture_output=True, text=True,
                         timeout=300, env={**environment, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"})
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(re.findall(r"^RESULTS (.*)$", run.stdout, re.MULTILINE)[-1])


def assert_same(ours, theirs, name):
    if isinstance(ours, dict):
        common = sorted(set(ours) & set(theirs))
        assert "loss" in common
        ours, theirs = ([each[key] for key in common] for each in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)


def test_the_programs_of_the_guide_give_tensorflows_numbers(tmp_path):
    theirs = results_of(PYTHON, "\n".join(pages.blocks(GUIDE, "py")), RESULTS, tmp_path / "theirs")
    program = "\n".join(pages.blocks(GUIDE))
    assert len(CARRIED.findall(program)) == 1
    program = CARRIED.sub('weights = np.load("weights.npz")', program)
    (tmp_path / "ours").mkdir()
    shutil.copy(tmp_path / "theirs" / "weights.npz", tmp_path / "ours")
    ours = results_of(sys.executable, program, [*RESULTS, *IN_KERAS_STYLE], tmp_path / "ours")
    for name, result in ours.items():
        assert_same(result, theirs[IN_KERAS_STYLE.get(name, name)], name)
    for name in RESULTS[:4]:
        assert set(ours[name]) == set(theirs[name])
    text = pages.read(GUIDE)
    rows = theirs["metrics_of_rows"]
    for number in (theirs["metrics"]["loss"], theirs["logs"]["loss"], theirs["metrics_of_table"]["loss"],
                   theirs["metrics_of_table"]["average_loss"], rows["loss"], rows["mae"], theirs["outputs"][0],
                   theirs["outputs"][-1]):
        assert f"{number:#.5g}" in text
    assert f"step {rows['global_step']:.0f}," in text


def test_the_optimizers_of_the_table_train_to_the_same_numbers(tmp_path):
    rows = [[cell.strip("`") for cell in row[:2]] for row in pages.rows_of_tables(GUIDE) if "Optimizer(rate" in row[0]]
    assert len(rows) == 7
    names, our_names = map(list, zip(*rows, strict=True))
    theirs = results_of(PYTHON, _OPTIMIZERS % (names,), names, tmp_path / "theirs")
    ours = results_of(sys.executable, _OUR_OPTIMIZERS % (our_names,), our_names, tmp_path / "ours")
    for name, our_name in rows:
        np.testing.assert_allclose(ours[our_name], theirs[name], rtol=1e-5, err_msg=name)
