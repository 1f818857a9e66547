"""Searches an MLP for scikit-learn's digits with Optuna, which ends trials that fall behind.

    pip install optuna scikit-learn

Each trial tells Optuna its validation accuracy after every epoch, through a callback of a few lines, and stops training
when Optuna says that other trials were better at that point. The seed of a model, and so each trial, is fixed.
"""

import argparse

import numpy as np
import optuna
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer
from trainer import models


class Pruning(trainer.callbacks.Callback):
    """Reports a log to an Optuna trial after each epoch, and ends the training where the trial is to be pruned."""

    def __init__(self, trial: optuna.Trial, monitor: str):
        self.trial, self.monitor, self.is_pruned = trial, monitor, False

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.trial.report(float(logs[self.monitor]), epoch)
        if self.trial.should_prune():
            self.is_pruned = self.model.stop_training = True


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns images to train on, others to validate on, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype(np.float32), labels, test_size=0.25, stratify=labels, random_state=0)


def objective(trial: optuna.Trial, epochs: int) -> float:
    """Returns the best validation accuracy of a network with the trial's parameters."""
    train_images, test_images, train_labels, test_labels = digits()
    width = trial.suggest_categorical("width", [16, 32, 64])
    learning_rate = trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)
    model = trainer.Model(models.MLP(num_classes=10, hidden=(width,)))
    model.compile(trainer.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    pruning = Pruning(trial, "val_accuracy")
    history = model.fit(train_images, train_labels, batch_size=128, epochs=epochs, verbose=0,
                        validation_data=(test_images, test_labels), callbacks=[pruning])
    if pruning.is_pruned:
        raise optuna.TrialPruned
    return max(history.history["val_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    trainer.enable_compilation_cache()  # trials of one width are one program
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0),
                                pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2))
    study.optimize(lambda trial: objective(trial, options.epochs), n_trials=options.trials)
    states = [trial.state.name for trial in study.trials]
    print(f"Best: {study.best_params}")
    print({"accuracy": study.best_value, "complete": states.count("COMPLETE"), "pruned": states.count("PRUNED")})


if __name__ == "__main__":
    main()
