"""Searches an MLP for scikit-learn's digits with Ray Tune, which stops the worse trials early (ASHA).

    pip install 'ray[tune]' scikit-learn

Each trial is a process of its own. A callback reports the validation accuracy after every epoch, and Ray ends a trial
that is not among the better half after 2, 4, 8, ... epochs (Li et al., https://arxiv.org/abs/1810.05934).
"""

import argparse
import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler


def train(config: dict) -> None:
    """Trains a network with the parameters of a trial, in the trial's process."""
    # JAX, and all that imports it, is imported in the trial, which runs in a process of its own.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import trainer
    from trainer import models

    class Report(trainer.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            tune.report({"val_accuracy": float(logs["val_accuracy"])})

    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        (images / 16).astype(np.float32), labels, test_size=0.25, stratify=labels, random_state=0)
    model = trainer.Model(models.MLP(num_classes=10, hidden=(config["width"],)))
    model.compile(trainer.optimizers.Adam(config["learning_rate"]), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    model.fit(train_images, train_labels, batch_size=128, epochs=config["epochs"], verbose=0,
              validation_data=(test_images, test_labels), callbacks=[Report()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    space = {"learning_rate": tune.loguniform(1e-5, 1e-1), "width": tune.choice([16, 32, 64]), "epochs": options.epochs}
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}), param_space=space,
        tune_config=tune.TuneConfig(metric="val_accuracy", mode="max", num_samples=options.trials,
                                    scheduler=ASHAScheduler(max_t=options.epochs, grace_period=2, reduction_factor=2)),
        run_config=tune.RunConfig(storage_path=os.path.abspath("ray_results"), name="digits", verbose=0))
    results = tuner.fit()
    best = results.get_best_result()
    epochs = [result.metrics["training_iteration"] for result in results]
    print(f"Best: {best.config}")
    print({"accuracy": best.metrics["val_accuracy"], "trials": len(results), "errors": len(results.errors),
           "stopped_early": sum(count < options.epochs for count in epochs)})


if __name__ == "__main__":
    main()
