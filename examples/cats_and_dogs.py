"""Trains MobileNetV2 on a folder of images, on one machine or on several.

    python examples/cats_and_dogs.py photos --image-size 160 --weights mobilenet_v2.weights.h5

`photos` has a folder of images for each class. On several machines the same command runs with TF_CONFIG, and on one
machine as two workers with `python -m trainer.launch --workers 2 examples/cats_and_dogs.py photos`. The global batch is
kept, whatever the number of devices, unless `--batch-per-replica` lets it grow; the learning rate then grows with it.
"""

import argparse
import time

import jax
import numpy as np

import trainer
from trainer import models


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="a folder with a folder of images for each class")
    parser.add_argument("--image-size", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together")
    parser.add_argument("--batch-per-replica", type=int, help="instead: of each replica")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one replica with --batch-per-replica")
    parser.add_argument("--alpha", type=float, default=1.0, help="the width of the network")
    parser.add_argument("--weights", help="a file of Keras's MobileNetV2, of which all but the classifier is loaded")
    parser.add_argument("--backup", help="a folder, from which an interrupted run goes on")
    return parser.parse_args()


class Throughput(trainer.callbacks.Callback):
    """Measures how many images a second an epoch trains on, its validation left out."""

    def __init__(self, images: int):
        self.images, self.per_sec = images, 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.begin = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        jax.block_until_ready(self.model.state)  # steps run while the loop is ahead of them
        self.per_sec = self.images / (time.perf_counter() - self.begin)


def main() -> None:
    options = arguments()
    strategy = trainer.distribute.MultiWorkerMirroredStrategy()  # of one machine, where there is no cluster
    replicas = strategy.num_replicas_in_sync
    batch_size, rate = options.batch_size, options.learning_rate
    if options.batch_per_replica:
        batch_size, rate = options.batch_per_replica * replicas, rate * replicas
    train, validation = trainer.data.image_dataset_from_directory(
        options.directory, image_size=options.image_size, batch_size=None, validation_split=0.2, subset="both", seed=1,
        skip_unreadable=True, verbose=jax.process_index() == 0)
    train, validation = (
        part.map(lambda images, labels: (images / np.float32(127.5) - 1, labels)).batch(batch_size)
        for part in (train.random_map(trainer.data.augmentation.RandomFlip("horizontal")), validation))
    with strategy.scope():
        model = trainer.Model(models.MobileNetV2(num_classes=len(train.class_names), alpha=options.alpha))
        model.compile(trainer.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    if options.weights:
        model.build(np.zeros((1, options.image_size, options.image_size, 3), np.float32))
        models.load_keras_weights(model, options.weights, skip_head=True)
    throughput = Throughput(len(train.file_paths))
    callbacks = [throughput, *([trainer.callbacks.BackupAndRestore(options.backup)] if options.backup else [])]
    history = model.fit(
        train, validation_data=validation, epochs=options.epochs, verbose=2, callbacks=callbacks).history
    if jax.process_index() == 0:
        print({"replicas": replicas, "batch_size": batch_size, "images_per_sec": round(throughput.per_sec, 1),
               "loss": history["loss"][-1], "val_accuracy": history["val_accuracy"][-1]})


if __name__ == "__main__":
    main()
