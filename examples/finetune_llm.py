"""Fine-tunes a language model of Hugging Face on texts: a Llama with LoRA, sharded over all devices, and resumable.

    python finetune_llm.py --model Llama-3.2-1B --tokenizer Llama-3.2-1B/tokenizer.json --texts "corpus/*.txt"

Without arguments it writes a small Llama of random weights in Hugging Face's format, and adapts it, byte by byte, to
scikit-learn's descriptions of its data. Killed at any moment, the same command goes on where it was, to the
same weights. `--backup s3://bucket/run` keeps the checkpoints in an object store.
"""

import argparse
import glob
import os
import pathlib
import shutil
import tempfile

import grain
import jax
import numpy as np
import sklearn.datasets
from grain import experimental

import trainer
from trainer import callbacks, models


class NextTokens(grain.transforms.Map):
    """Inputs, targets and weights of a row of packed texts: the next token of the same text is the target."""

    def map(self, packed: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, segments = packed["ids"], packed["ids_segment_ids"]
        is_same_text = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
        return ids[:-1], ids[1:], is_same_text.astype(np.float32)


def texts_of(pattern: str | None) -> list[str]:
    """Returns the paragraphs of text files, or of the descriptions of scikit-learn's data."""
    if pattern is not None:
        whole = [pathlib.Path(path).read_text(encoding="utf-8") for path in sorted(glob.glob(pattern))]
    else:
        loaders = (sklearn.datasets.load_iris, sklearn.datasets.load_diabetes, sklearn.datasets.load_digits,
                   sklearn.datasets.load_wine, sklearn.datasets.load_breast_cancer, sklearn.datasets.load_linnerud)
        whole = [loader().DESCR for loader in loaders]
    return [part.strip() for text in whole for part in text.split("\n\n") if part.strip()]


class Bytes:
    """The bytes of a text as its tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")


class Subwords:
    """Tokens of a `tokenizer.json`; needs the package `tokenizers`."""

    def __init__(self, path: str):
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(path)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def packed_rows(texts: list[list[int]], length: int, batch_size: int) -> grain.IterDataset:
    """Returns batches of packed texts, shuffled anew in each epoch. Grain keeps its position, part-filled rows too."""
    parts = [np.array(ids[start:start + length + 1], np.int32) for ids in texts for start in range(0, len(ids), length)]
    source = grain.MapDataset.source([{"ids": part} for part in parts]).shuffle(seed=0).to_iter_dataset()
    packed = experimental.FirstFitPackIterDataset(source, length_struct={"ids": length + 1}, num_packing_bins=8)
    return packed.map(NextTokens()).batch(batch_size, drop_remainder=True)


def write_small_llama(folder: str, length: int) -> None:
    """Writes a Llama of random weights, whose tokens are bytes, as Hugging Face does."""
    model = trainer.Model(models.Llama(vocab_size=256, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2,
                                       mlp_dim=128, max_len=length))
    model.build(np.zeros((1, 8), np.int32))
    models.save_hf_weights(model, folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with config.json and safetensors")
    parser.add_argument("--tokenizer", help="tokenizer.json; bytes without it")
    parser.add_argument("--texts", help="pattern of text files")
    parser.add_argument("--length", type=int, default=128, help="tokens per row")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--rank", type=int, default=8, help="rank of LoRA's adapters")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--backup", help="folder or URL of the checkpoints")
    parser.add_argument("--output", default="tuned", help="folder of the results")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    os.makedirs(given.output, exist_ok=True)
    tokenizer = Bytes() if given.tokenizer is None else Subwords(given.tokenizer)
    data = packed_rows([tokenizer.encode(text) for text in texts_of(given.texts)], given.length, given.batch_size)
    steps = sum(1 for _ in data)

    with tempfile.TemporaryDirectory() as folder, trainer.distribute.FullyShardedStrategy().scope():
        base = given.model or os.path.join(folder, "llama")
        if given.model is None:
            write_small_llama(base, given.length)
        model = trainer.Model(models.from_hf(base, logits_chunk_size=64))
        model.build(np.zeros((1, 8), np.int32))
        models.load_hf_weights(model, base)
        if not given.full:
            # Weights that mean nothing yet are trained as they are.
            model = trainer.lora(model, given.rank, train=() if given.model else ("token_embedding", "head"))
        model.compile(
            trainer.optimizers.AdamW(trainer.optimizers.schedules.CosineDecay(
                0.0, steps * given.epochs, warmup_target=given.learning_rate, warmup_steps=steps), global_clipnorm=1.0),
            trainer.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
            precision="mixed_bfloat16", remat="dots_with_no_batch_dims_saveable", log_norms=True)
        backup = given.backup or os.path.join(given.output, "backup")
        history = model.fit(data, epochs=given.epochs, verbose=2, callbacks=[
            callbacks.SpikeGuard(window=32, rollback_after=8, backup_dir=backup),
            callbacks.BackupAndRestore(backup, save_freq=10), callbacks.CSVLogger(f"{given.output}/log.csv")])
        history.plot("loss").savefig(f"{given.output}/loss.png")

        if not given.full:
            model.save_adapters(f"{given.output}/adapters.safetensors")
            model = model.merge()
        shutil.rmtree(f"{given.output}/hf", ignore_errors=True)  # of an earlier run, or of a save that was killed
        models.save_hf_weights(model, f"{given.output}/hf", dtype="bfloat16")
        prompt = tokenizer.encode("The data set")
        continued = models.generate(model, [prompt], given.length // 2 - len(prompt), temperature=0)
        print(tokenizer.decode(continued[0].tolist()))
        log = history.history
        print({"devices": jax.device_count(), "loss": log["loss"][-1], "first_loss": log["loss"][0],
               "grad_norm": log["grad_norm"][-1], "skipped_steps": sum(log["skipped_steps"])})


if __name__ == "__main__":
    main()
