"""Trains a small Transformer to classify texts from folders, such as the reviews of IMDB.

    python examples/text_classification.py aclImdb/train --length 200

The folder has a folder of `.txt` files for each class. Without it, the script writes short reviews, in which the place
of "not" decides the meaning, and trains on them. Files are read while the devices compute, and padding is masked in the
attention and in the mean.
"""

import argparse
import re
import tempfile
import zlib
from pathlib import Path

import numpy as np

import trainer
from trainer import models

PADDING, START, WORDS = 0, 1, 2  # words begin at the third token
VOCABULARY = 8192
OPINIONS = {"positive": ("good", "great", "lovely", "moving", "funny"),
            "negative": ("bad", "awful", "dull", "weak", "boring")}
SUBJECTS = ("the film", "the plot", "the music", "the cast", "the ending", "the dialogue")
ASIDES = ("I did not see the first part", "we watched it at home", "it is not short", "my brother came", "it rained")


def write_reviews(folder: Path, number: int) -> None:
    """Writes reviews such as "It rained. The plot was not good." into a folder for each class."""
    rng = np.random.default_rng(0)
    for index in range(number):
        said, opposite = rng.permutation(list(OPINIONS))
        meant, verb = (opposite, "was not") if index % 3 == 0 else (said, "was")
        parts = [f"{rng.choice(SUBJECTS)} {verb} {rng.choice(OPINIONS[said])}", *rng.choice(ASIDES, 2, replace=False)]
        text = " ".join(f"{part[0].upper()}{part[1:]}." for part in rng.permutation(parts))
        (folder / meant).mkdir(exist_ok=True)
        (folder / meant / f"{index}.txt").write_text(text, encoding="utf-8")


def encode(text: str, length: int) -> np.ndarray:
    """Returns the tokens of a text: a start, then a hash of each word, then padding."""
    # Python's `hash` of a string is another one in each process.
    words = [WORDS + zlib.crc32(word.encode()) % (VOCABULARY - WORDS) for word in re.findall(r"\w+", text.lower())]
    tokens = np.full(length, PADDING, np.int32)
    tokens[:len(words) + 1] = [START, *words][:length]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="a folder with a folder of texts for each class")
    parser.add_argument("--length", type=int, default=24, help="how many words of a text are read, and one more")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as written:
        if options.directory is None:
            write_reviews(Path(written), 1600)
        train, validation = trainer.data.text_dataset_from_directory(
            options.directory or written, lambda text: encode(text, options.length), batch_size=32,
            validation_split=0.2, subset="both", seed=1)
        network = models.TransformerEncoder(
            vocab_size=VOCABULARY, num_layers=2, d_model=64, num_heads=4, max_len=options.length,
            mask_token=PADDING, num_classes=len(train.class_names), dropout_rate=0.1)
        model = trainer.Model(network)
        model.compile(trainer.optimizers.AdamW(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
        history = model.fit(train, validation_data=validation, epochs=options.epochs, verbose=2)
        history.plot().savefig("curves.png")
        metrics = model.evaluate(validation, verbose=0)

    for text in ("The plot was good. It is not short.", "The plot was not good. We watched it at home."):
        probabilities = model.predict(encode(text, options.length)[None], verbose=0)[0]
        print(f"{text} {train.class_names[probabilities.argmax()]}, {probabilities.max():.2f}")
    print(metrics)


if __name__ == "__main__":
    main()
