"""What the benchmarks promise of themselves before anything is measured."""

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.support import project_files

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


@pytest.mark.slow
def test_every_contestants_loop_exists(cases):
    for _, loops, *_ in cases:
        for loop in loops:
            module, function = loop.split(":")
            tree = ast.parse((FOLDER / f"{module}.py").read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, loop


def test_the_rows_of_every_case_make_whole_batches(cases):
    for name, *_, rows, batch_size in cases:
        assert rows % batch_size == 0, name


@pytest.mark.slow
def test_a_worker_runs_epochs_on_demand():
    orders = "choose\nrun\n"
    done = subprocess.run([sys.executable, "worker.py", "small_mlp", "by hand", "2"], cwd=FOLDER, input=orders,
                          text=True, capture_output=True, timeout=100)
    ready, chosen, figures = (ast.literal_eval(line.replace("true", "True")) for line in done.stdout.splitlines())
    assert ready["ready"] and ready["seconds"] > 0 and chosen == {"chosen": ""}
    assert figures["steps"] == 2000 and figures["seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("who", "programs"), [("fit", 8), ("by hand", 7)])
def test_the_programs_of_a_session_are_counted(who, programs):
    proofs = who == "fit"  # that the logits are no probabilities: a call of the module
    command = [sys.executable, "sessions.py", "--count", "784-128-10, last batches of other sizes", who]
    done = subprocess.run(command, cwd=FOLDER, text=True, capture_output=True, check=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": str(project_files.ROOT)})
    counts = json.loads(done.stdout)
    assert (counts["programs"], counts["calls"]) == (programs, programs + proofs)
    assert counts["traces"] >= programs and counts["cpu_seconds"] > 0


def test_a_contestant_that_is_not_installed_says_so():
    code = ("import sys; sys.modules['tf_keras'] = sys.modules['tensorflow'] = None; "
            "sys.argv = ['worker.py', 'small_mlp', 'TF-Keras', '1']; import worker; worker.main()")
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, input="", text=True, capture_output=True)
    assert "tensorflow is not installed" in ast.literal_eval(done.stdout)["unavailable"]


ROUNDS = """
import json, cases, workers
class Fake:
    made = []
    def __init__(self, case, name, contestant, epochs, environment):
        self.name, self.order = name, ""
        Fake.made.append(name)
    def ask(self, line):
        self.order = line
    def answer(self):
        if self.name == "broken" and self.order == "run":
            raise workers.WorkerError("failed: it is broken")
        return {"chosen": ""} if self.order == "choose" else {"seconds": 1.0, "steps": 2}
    def close(self):
        pass
workers.Worker = Fake
contestants = {name: cases.Contestant("module:function") for name in ("fit", "by hand", "broken")}
case = cases.Case("A case", "", cases.Workload("mlp", 32, 32), contestants, (), processes=3)
outcome = workers.Outcome({}, {})
workers.measure("case", case, workers.Machine("cpu", 1, ""), 7, None, outcome)
print(json.dumps([Fake.made, {who: len(rounds) for who, rounds in outcome.rounds.items()}, outcome.notes]))
"""


def test_rounds_are_shared_by_sets_of_processes_and_who_fails_once_has_no_other():
    done = subprocess.run([sys.executable, "-c", ROUNDS], cwd=FOLDER, check=True, capture_output=True, text=True)
    made, rounds, notes = json.loads(done.stdout)
    assert made == ["fit", "by hand", "broken", "fit", "by hand", "fit", "by hand"]
    assert rounds == {"fit": 7, "by hand": 7}
    assert notes == {"broken": "failed: it is broken"}


@pytest.mark.slow
def test_a_worker_of_the_scaling_benchmark_stays_on_its_core():
    core = max(os.sched_getaffinity(0))
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, "scaling_worker.py", str(core), "mlp", "3", "global"], cwd=FOLDER, env=environment,
        input="run 32\nrun 16\n", text=True, capture_output=True, timeout=100)
    ready, *answers = map(json.loads, done.stdout.splitlines())
    assert ready["cores"] == [core]
    assert [answer["steps"] for answer in answers] == [3, 3]


THROUGHPUT = """
import json, scaling
class Fake:
    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []
    def ask(self, line):
        self.asked.append(line)
    def answer(self):
        return {"steps": 3, "seconds": self.seconds, "cpu_seconds": 0.5}
workers = [Fake(1.0), Fake(2.0)]
turns = {name: scaling.Turn(workers, 16, is_job) for name, is_job in (("alone", False), ("job", True))}
rates = scaling.take_turns(turns, 2)
collective = scaling.Collective("all-reduce", "f32", (1000,), 4000, "name", 2)
kinds = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute")
print(json.dumps([rates, [turn.rows_per_worker for turn in turns.values()], workers[0].asked,
                  [scaling.ring_bytes([collective._replace(kind=kind)], 4) for kind in kinds],
                  scaling.calm_rounds([3.0, 1.0, 2.0, 5.0, 4.0, 0.5])]))
"""


@pytest.mark.slow
def test_a_job_is_as_fast_as_its_slowest_worker_and_independent_workers_add():
    done = subprocess.run([sys.executable, "-c", THROUGHPUT], cwd=FOLDER, check=True, capture_output=True, text=True)
    rates, rows_per_worker, asked, ring_bytes, calm = json.loads(done.stdout)
    assert rates == {"alone": [[48 + 24, 96]] * 2, "job": [[24, 48]] * 2}
    assert rows_per_worker == [16, 8] and asked == ["run 16"] * 8
    assert ring_bytes == [2 * 3 / 4 * 8000, 3 * 8000, 3 / 4 * 8000, 8000]
    assert calm == [3, 4]


@pytest.mark.slow
def test_a_step_over_512_replicas_sends_the_gradients_bytes_around_a_ring():
    done = subprocess.run([sys.executable, "scaling.py", "--quick", "bytes"], cwd=FOLDER, check=True, text=True,
                          capture_output=True, timeout=100)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| 784")]
    gradients = 4 * (784 * 128 + 128 + 128 * 10 + 10) / 1e6
    for row, replicas in zip(rows, (2, 512), strict=True):
        _, _, count, collectives, _, sent, theory, *_, hops = row
        assert (int(count), int(collectives), int(hops)) == (replicas, 1, 2 * (replicas - 1))
        assert float(theory) == pytest.approx(2 * (replicas - 1) / replicas * gradients, rel=5e-3)
        assert float(sent) == pytest.approx(float(theory), rel=5e-3)
