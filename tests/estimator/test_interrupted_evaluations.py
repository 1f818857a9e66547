"""Evaluations and exports of a `train_and_evaluate` that ends at any place, and goes on in another process."""

import json
import os
import signal

import numpy as np
import pytest

from tests.support.small_estimators import StopWithError, X, dataset, spec_fn
from trainer import estimator as est
from trainer.estimator.training import exporters, serving
from trainer.estimator.training.evaluation_record import EVALUATOR_FILE_NAME, FILE_NAME, EvaluationRecord

LAST = 6


class Killed(BaseException):
    """Ends a process."""


class Noted(est.Exporter):
    name = "noted"

    def __init__(self):
        self.calls = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.calls.append((eval_result["global_step"], eval_result["loss"], is_the_final_export))


def run(folder, noted, exporting=True, max_steps=LAST, hooks=None, repeat=True, throttle_steps=None):
    estimator = est.Estimator(spec_fn(), config=est.RunConfig(folder, save_checkpoints_steps=2))
    of_weights = [est.BestExporter("best", lambda: X[:1]), est.FinalExporter("final", lambda: X[:1])]
    spec = est.EvalSpec(dataset, throttle_secs=0, throttle_steps=throttle_steps,
                        exporters=[noted, *(of_weights if exporting else ())])
    return est.train_and_evaluate(estimator, est.TrainSpec(lambda: dataset(repeat=repeat), max_steps, hooks), spec)


def counts(folder):
    return {name: len(serving.exports_in(str(folder / "export" / name))) for name in ("best", "final")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder, noted = tmp_path_factory.mktemp("undisturbed"), Noted()
    metrics, exports = run(folder, noted)
    assert [step for step, _, _ in noted.calls] == [2, 4, 6]
    assert not (folder / FILE_NAME).exists()
    return noted.calls, metrics, [path and os.path.basename(os.path.dirname(path)) for path in exports], counts(folder)


def before(step):
    """Ends the process before a call for a step."""
    def ends(function, *args, **kwargs):
        if current_step(args) == step:
            raise Killed
        return function(*args, **kwargs)
    return ends


def after(step):
    """Ends the process after a call for a step."""
    def ends(function, *args, **kwargs):
        result = function(*args, **kwargs)
        if current_step(args) == step:
            raise Killed
        return result
    return ends


def current_step(args):
    for arg in args:
        if isinstance(arg, est.Estimator):
            return int(arg.get_variable_value("global_step"))
        if isinstance(arg, EvaluationRecord):
            return arg.began_step
    raise AssertionError("no argument knows the step")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("step", [4, LAST])
@pytest.mark.parametrize(("owner", "name", "when"), [
    (est.Estimator, "evaluate", before), (est.Estimator, "evaluate", after),
    (est.Estimator, "export_saved_model", after), (exporters.BestExporter, "export", after),
    (EvaluationRecord, "end_evaluation", before), (EvaluationRecord, "end_evaluation", after),
], ids=["before", "evaluated", "exported", "best noted", "before the record", "after the record"])
def test_each_evaluation_and_export_is_made_once(tmp_path, monkeypatch, undisturbed, owner, name, when, step):
    noted = Noted()
    whole = getattr(owner, name)
    with monkeypatch.context() as killed:
        killed.setattr(owner, name, lambda *args, **kwargs: when(step)(whole, *args, **kwargs))
        with pytest.raises(Killed):
            run(tmp_path, noted)
    metrics, exports = run(tmp_path, noted)
    calls, expected_metrics, expected_exports, expected_counts = undisturbed
    assert list(dict.fromkeys(noted.calls)) == calls
    assert metrics == expected_metrics
    assert [path and os.path.basename(os.path.dirname(path)) for path in exports] == expected_exports
    assert counts(tmp_path) == expected_counts
    assert not (tmp_path / FILE_NAME).exists()


# --- the decisions, with evaluations that cost nothing ----------------------------------------------------------------


@pytest.fixture
def evaluated(monkeypatch):
    """The steps that are evaluated. An evaluation of `killed_at` ends the process."""
    class Steps(list):
        killed_at = None

    steps = Steps()

    def evaluate(estimator, input_fn, steps_per_evaluation, hooks, path, name):
        step = int(os.path.basename(path).removeprefix("step_"))
        steps.append(step)
        if step == steps.killed_at:
            steps.killed_at = None
            raise Killed
        return {"loss": 1 / step, "confusion": np.eye(2, dtype=np.float32), "global_step": step}

    monkeypatch.setattr(est.Estimator, "evaluate", evaluate)
    return steps


def ends(folder, exception=Killed, **options):
    with pytest.raises(exception):
        run(folder, Noted(), exporting=False, **options)


def test_a_throttle_of_steps_counts_from_the_evaluation_before_the_interruption(tmp_path, evaluated):
    ends(tmp_path, KeyboardInterrupt, max_steps=12, throttle_steps=5, hooks=StopWithError(5))
    run(tmp_path, Noted(), exporting=False, max_steps=12, throttle_steps=5)
    assert evaluated == [2, 8, 12]


def test_the_last_evaluation_returns_its_results_and_a_longer_training_is_another_call(tmp_path, evaluated):
    evaluated.killed_at = LAST
    ends(tmp_path)
    noted = Noted()
    assert run(tmp_path, noted, exporting=False, max_steps=10)[0]["global_step"] == 10
    assert evaluated == [2, 4, 6, 6, 8, 10]
    assert [(step, is_final) for step, _, is_final in noted.calls] == [(6, True), (8, False), (10, True)]
    assert run(tmp_path, noted, exporting=False, max_steps=10) == (None, None)


def test_a_training_that_ended_with_the_data_is_not_repeated_for_its_evaluation(tmp_path, evaluated):
    evaluated.killed_at = 3
    ends(tmp_path, max_steps=None, repeat=False)
    metrics, exports = run(tmp_path, Noted(), exporting=False, max_steps=None, repeat=False)
    assert (metrics["global_step"], exports) == (3, [None])
    assert evaluated == [2, 3, 3]


def test_results_of_an_evaluation_before_the_interruption_are_returned(tmp_path, evaluated, monkeypatch):
    whole = EvaluationRecord.close
    monkeypatch.setattr(EvaluationRecord, "close", lambda record: ends_process())
    ends(tmp_path)
    monkeypatch.setattr(EvaluationRecord, "close", whole)
    metrics, _ = run(tmp_path, Noted(), exporting=False)
    np.testing.assert_array_equal(metrics.pop("confusion"), np.eye(2, dtype=np.float32), strict=True)
    assert metrics == {"loss": 1 / LAST, "global_step": LAST}
    assert evaluated == [2, 4, 6]


def ends_process():
    raise Killed


@pytest.mark.slow
def test_the_checkpoint_of_a_preempted_process_is_not_evaluated(tmp_path, evaluated):
    class Preempted(est.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_values.results["global_step"] == 3:
                signal.raise_signal(signal.SIGTERM)

    ends(tmp_path, SystemExit, hooks=Preempted())
    assert est.Estimator(spec_fn(), tmp_path).get_variable_value("global_step") == 3
    run(tmp_path, Noted(), exporting=False)
    assert evaluated == [2, 4, 6]


@pytest.mark.slow
def test_another_training_ends_an_interrupted_call(tmp_path, evaluated):
    ends(tmp_path, KeyboardInterrupt, hooks=StopWithError(3))
    est.Estimator(spec_fn(), tmp_path).train(lambda: dataset(repeat=True), steps=3)
    assert not (tmp_path / FILE_NAME).exists()


def test_an_evaluator_that_was_killed_in_the_last_evaluation_makes_it_and_ends(tmp_path, evaluated, monkeypatch):
    estimator = est.Estimator(spec_fn(), tmp_path).train(dataset, steps=2)
    record = EvaluationRecord(estimator.model_dir, EVALUATOR_FILE_NAME)
    record.begin(None, None)
    record.begin_evaluation(2, {})
    cluster = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    run(tmp_path, Noted(), exporting=False, max_steps=None)
    assert evaluated == [2]
    assert not (tmp_path / EVALUATOR_FILE_NAME).exists()


@pytest.mark.parametrize(("text", "message"), [
    ("[1", "evaluations.json' is not what `train_and_evaluate` has written: .* Delete it"),
    ('{"stp": 3}', "evaluations.json' has entries that `train_and_evaluate` does not write: stp. Delete it"),
])
def test_a_file_of_others_in_its_place_is_refused(tmp_path, text, message):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, Noted())
