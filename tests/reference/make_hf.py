"""Makes `tests/models/hf/`: small random models of Hugging Face's `transformers`, with the outputs that it computes.

Run where torch and `transformers` are installed: `python -m tests.reference.make_hf`. Versions 2.14.1 and 5.24.0 made
the files.
"""

import pathlib
import shutil

import numpy as np

from tests.support import hf_models

FOLDER = pathlib.Path(__file__).parents[1] / "models" / "hf"


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, (_, _, size) in hf_models.CASES.items():
        model = hf_models.made(name)
        model.save_pretrained(FOLDER / name, max_shard_size=size)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        np.save(FOLDER / name / "outputs.npy", hf_models.outputs(model, name))


if __name__ == "__main__":
    main()
