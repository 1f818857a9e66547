"""docs/pretrained.md is true: its blocks run one after another, on small images and weights that a test makes."""

import pathlib
import re
import shutil

import numpy as np
import pytest
from PIL import Image

import trainer
from tests.support import project_files
from trainer import models

PAGE = (project_files.ROOT / "docs" / "pretrained.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


@pytest.fixture
def files(tmp_path, monkeypatch, keras):
    """A folder with the photos and the weights that the page names."""
    keras.applications.MobileNetV2(weights=None).save_weights(tmp_path / "mobilenet_v2.weights.h5")
    rng = np.random.default_rng(0)
    for name, colour in (("cats", (200, 80, 80)), ("dogs", (80, 80, 200))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.normal(colour, 40, (40, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    shutil.copytree(pathlib.Path(__file__).parent / "hf" / "llama2", tmp_path / "llama")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
def test_the_page_runs_from_its_beginning_to_its_end(files):
    names = {}
    for block in BLOCKS:
        block = block.replace("160", "32").replace("224", "32").replace("epochs=3", "epochs=1").replace(
            "initial_epoch=3, epochs=6", "initial_epoch=1, epochs=2")
        exec(compile(block, "docs/pretrained.md", "exec"), names)
    model = names["model"]
    assert names["texts"].shape == (1, 23) and pathlib.Path("tuned", "model.safetensors").is_file()
    assert len(BLOCKS) == 4 and model.count_params() == 2_257_984 + 2 * 1281
    fresh = trainer.Model(models.MobileNetV2(num_classes=2))
    fresh.build(np.zeros((1, 32, 32, 3), np.float32))
    models.load_keras_weights(fresh, "mobilenet_v2.weights.h5", skip_head=True)
    now, then = model.state.params, fresh.state.params
    assert np.array_equal(now["block_14"]["expand"]["kernel"], then["block_14"]["expand"]["kernel"])
    assert not np.array_equal(now["block_15"]["expand"]["kernel"], then["block_15"]["expand"]["kernel"])
