"""A `train_and_evaluate` with exporters, to be killed in its evaluations: `python estimator_evaluations.py`.

It appends a line to begun.txt for each evaluation that begins, and one to evaluated.jsonl for each that is made. At the
end it writes result.json: the evaluations, what `train_and_evaluate` returned, and the predictions of all exports.
"""

from __future__ import annotations

import json
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
from flax import linen as nn

import trainer
from trainer import estimator as est

STEPS, EVERY = 40, 4
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype(np.float32)
y = x[:, :1] - 0.5 * x[:, 1:2] ** 2


def model_fn(features, labels, mode):
    return est.EstimatorSpec(mode, module=nn.Dense(1), loss="mse", optimizer=trainer.optimizers.SGD(0.01),
                             metrics=["mae"])


def train_input_fn():
    return trainer.data.Dataset.from_arrays((x, y)).shuffle(seed=1).repeat(None).batch(4)


def eval_input_fn():
    with open("begun.txt", "a") as file:
        file.write("begun\n")
    return trainer.data.Dataset.from_arrays((x, y)).batch(8)


class Note(est.Exporter):
    """Notes the evaluations; the first of the exporters, so that it notes those that are killed later, too."""

    name = "note"

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        line = [os.path.basename(checkpoint_path), sorted((k, float(v)) for k, v in eval_result.items()),
                is_the_final_export]
        with open("evaluated.jsonl", "a") as file:
            file.write(f"{json.dumps(line)}\n")


def is_worse(best, current):
    return best["loss"] < current["loss"]  # so that each has something to decide, in a training that makes progress


def main():
    spec = est.EvalSpec(eval_input_fn, throttle_secs=0, throttle_steps=2 * EVERY, exporters=[
        Note(), est.BestExporter("best", lambda: x[:1], exports_to_keep=1),
        est.BestExporter("worst", lambda: x[:1], is_worse), est.LatestExporter("latest", lambda: x[:1], 2),
        est.FinalExporter("final", lambda: x[:1])])
    estimator = est.Estimator(model_fn, config=est.RunConfig("run", save_checkpoints_steps=EVERY))
    metrics, exports = est.train_and_evaluate(estimator, est.TrainSpec(train_input_fn, STEPS), spec)
    lines = pathlib.Path("evaluated.jsonl").read_text().splitlines()
    predictions = {
        folder.name: [trainer.load_exported(str(path / "model.export")).predict(x[:3]).tolist()
                      for path in sorted(folder.glob("[0-9]*"))]
        for folder in sorted(pathlib.Path("run/export").iterdir())}
    others = sorted(str(path) for path in pathlib.Path("run").rglob("*")  # best.json, and nothing that is left over
                    if "step_" not in str(path) and path.name.startswith("temp-") | path.name.endswith(("tmp", "json")))
    pathlib.Path("result.json").write_text(json.dumps({
        "evaluations": list(dict.fromkeys(lines)), "returned": {k: float(v) for k, v in metrics.items()},
        "exported": [path and path.split("/")[-2] for path in exports], "predictions": predictions, "others": others}))


if __name__ == "__main__":
    main()
