"""Fine-tunes a vision transformer of Hugging Face on images of other classes, with LoRA or in full.

    python vit_finetune.py --model vit-base-patch16-224 --images photos

`photos` has a folder of images for each class. Without arguments the script writes a small ViT of random weights in
Hugging Face's format, and trains it on scikit-learn's digits. With LoRA a fifth of the weights is trained, and training
ends when the validation accuracy no longer rises, with the weights of the best epoch.
"""

import argparse
import os
import tempfile

import numpy as np
from sklearn.datasets import load_digits

import trainer
from trainer import callbacks, models


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns images from -1 to 1 with three equal channels, and labels, for training and for validation."""
    images, labels = load_digits().images, load_digits().target
    images = np.repeat(images[..., None] / 8 - 1, 3, axis=-1).astype(np.float32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def photos(folder: str, side: int, batch_size: int) -> tuple[trainer.data.Dataset, trainer.data.Dataset, int]:
    """Returns batches of images from -1 to 1, for training and for validation, and the number of classes."""
    train, validation = trainer.data.image_dataset_from_directory(
        folder, validation_split=0.2, subset="both", seed=0, image_size=(side, side), batch_size=batch_size)
    classes = len(train.class_names)
    train, validation = (part.map(lambda images, labels: (images / 127.5 - 1, labels)) for part in (train, validation))
    return train, validation, classes


def write_small_vit(folder: str) -> None:
    """Writes a ViT of random weights for images of 8x8, as Hugging Face does."""
    model = trainer.Model(models.ViTS16(patch_size=2, width=48, depth=2, num_heads=4, mlp_width=96, num_classes=3,
                                        classifier_activation=None))
    model.build(np.zeros((1, 8, 8, 3), np.float32))
    models.save_hf_weights(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with config.json and safetensors")
    parser.add_argument("--images", help="folder with a folder of images for each class")
    parser.add_argument("--side", type=int, default=224, help="height and width of the model's images")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8, help="rank of LoRA's adapters")
    parser.add_argument("--full", action="store_true", help="train all weights")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, trainer.distribute.MirroredStrategy().scope():
        base, side = given.model or os.path.join(folder, "vit"), given.side if given.model else 8
        if given.model is None:
            write_small_vit(base)
        if given.images is None:
            train, validation = digits()
            classes, inputs, options = 10, train, {"batch_size": given.batch_size}
        else:
            train, validation, classes = photos(given.images, side, given.batch_size)
            inputs, options = (train,), {}
        model = trainer.Model(models.from_hf(base, num_classes=classes))
        model.build(np.zeros((1, side, side, 3), np.float32))
        models.load_hf_weights(model, base, skip_head=True)  # the new classes have a head of their own
        if not given.full:
            # Small random weights know nothing of images, so their patches are trained as they are.
            model = trainer.lora(model, given.rank, ["attn", "mlp_fc."],
                                 train=["head"] if given.model else ["head", "patch_embed_proj", "pos_embed"])
        model.compile(trainer.optimizers.AdamW(1e-3 if given.full else 5e-3, weight_decay=0.01),
                      trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        history = model.fit(*inputs, **options, epochs=given.epochs, validation_data=validation, verbose=2, callbacks=[
            callbacks.EarlyStopping("val_accuracy", patience=5, restore_best_weights=True)])
    history.plot().savefig("curves.png")
    trained = sum(weight.numpy().size for weight in model.trainable_weights)
    print({"val_accuracy": max(history.history["val_accuracy"]), "trained_parameters": trained,
           "parameters": model.count_params()})


if __name__ == "__main__":
    main()
