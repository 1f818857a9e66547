"""Trains a small GPT, letter by letter, on sums that the script writes, and lets it continue others.

A sum is a text such as " 7+15=22.". Weights of 0 leave out of the loss what cannot be known: the letters before "=".
The decoder keeps the keys and values of earlier letters, so `models.generate` computes one letter at a time.
"""

import numpy as np

import trainer
from trainer import models

LETTERS = "0123456789+=. "
LENGTH = 10


def encode(texts: list[str]) -> np.ndarray:
    """Returns the numbers of the letters of texts of one length."""
    return np.array([[LETTERS.index(letter) for letter in text] for text in texts])


def decode(tokens: np.ndarray) -> list[str]:
    """Returns the texts of numbers of letters."""
    return ["".join(LETTERS[token] for token in row) for row in tokens]


def sums() -> tuple[list[str], list[str]]:
    """Returns all sums of two numbers below 30, in a random order, for training and for testing."""
    texts = [f"{one:>2}+{two:<2}={one + two}.".ljust(LENGTH) for one in range(30) for two in range(30)]
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[number] for number in order[100:]], [texts[number] for number in order[:100]]


def main() -> None:
    train, test = sums()
    tokens = encode(train)
    gpt = models.TransformerLM(vocab_size=len(LETTERS), num_layers=2, d_model=64, num_heads=4, max_len=LENGTH)
    model = trainer.Model(gpt)
    model.compile(optimizer=trainer.optimizers.AdamW(3e-3),
                  loss=trainer.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
    # Only the characters after "=" can be known.
    weights = np.zeros(tokens[:, 1:].shape, np.float32)
    weights[:, 5:] = 1
    history = model.fit(tokens[:, :-1], tokens[:, 1:], sample_weight=weights, batch_size=64, epochs=80, verbose=2)
    history.plot().savefig("curves.png")

    prompts = encode([text[:6] for text in test])
    continued = decode(models.generate(model, prompts, LENGTH - 6, temperature=0))
    for text in continued[:5]:
        print(text)
    right = np.mean([found.rstrip() == text.rstrip() for found, text in zip(continued, test, strict=True)])
    metrics = {name: values[-1] for name, values in history.history.items()}
    print({**metrics, "share_of_right_sums": float(right)})


if __name__ == "__main__":
    main()
