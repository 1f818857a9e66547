"""What the benchmarks promise of themselves before anything is measured."""

import ast
import subprocess
import sys

import pytest

from tests import project_files

FOLDER = project_files.ROOT / "benchmarks"
QUERY = ("import json, sys, cases; print(json.dumps([[name, [c.loop for c in case.contestants.values()], "
         "[[r.ours, r.theirs] for r in case.comparisons], list(case.contestants), case.workload.rows, "
         "case.workload.batch_size] for name, case in cases.all_cases().items()])); assert 'jax' not in sys.modules")


@pytest.fixture(scope="module")
def cases():
    done = subprocess.run([sys.executable, "-c", QUERY], cwd=FOLDER, capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)  # the query also asserts that cases can be read without JAX


def test_every_comparison_is_between_contestants_of_its_case(cases):
    assert cases
    for name, _, comparisons, contestants, _, _ in cases:
        for ours, theirs in comparisons:
            assert {ours, theirs} <= set(contestants), name


def test_every_contestants_loop_exists(cases):
    for _, loops, *_ in cases:
        for loop in loops:
            module, function = loop.split(":")
            tree = ast.parse((FOLDER / f"{module}.py").read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, loop


def test_the_rows_of_every_case_make_whole_batches(cases):
    for name, *_, rows, batch_size in cases:
        assert rows % batch_size == 0, name


def test_a_worker_runs_epochs_on_demand():
    orders = "choose 2\nrun 2\n"
    done = subprocess.run([sys.executable, "worker.py", "small_mlp", "by hand"], cwd=FOLDER, input=orders, text=True,
                          capture_output=True, timeout=100)
    ready, chosen, figures = (ast.literal_eval(line.replace("true", "True")) for line in done.stdout.splitlines())
    assert ready == {"ready": True} and chosen == {"chosen": ""}
    assert figures["steps"] == 2000 and figures["seconds"] > 0


def test_a_contestant_that_is_not_installed_says_so():
    code = ("import sys; sys.modules['tf_keras'] = sys.modules['tensorflow'] = None; "
            "sys.argv = ['worker.py', 'small_mlp', 'TF-Keras']; import worker; worker.main()")
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, input="", text=True, capture_output=True)
    assert "tensorflow is not installed" in ast.literal_eval(done.stdout)["unavailable"]
