"""A page for each example: what it does, what it prints if it is quick, and its code."""

from __future__ import annotations

import ast
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

_TITLES = {"dcgan": "DCGAN", "finetune_llm": "Fine-tuning of a language model", "lora": "LoRA",
           "miniature_gpt": "Miniature GPT", "mnist": "MNIST", "vae": "VAE",
           "vit_finetune": "Fine-tuning of a vision transformer"}
_LINES = 40  # of what an example prints, from its end
_FOLDER = "generated/examples"


def pages(folder: pathlib.Path) -> dict[str, str]:
    """Returns the pages of all examples of a folder and one that lists them, by path below docs/."""
    texts, rows, names = {}, [], []
    for script in sorted(folder.glob("*.py")):
        name, docstring = script.stem, ast.get_docstring(ast.parse(script.read_text())) or ""
        title = _TITLES.get(name, name.replace("_", " ").capitalize())
        texts[f"{_FOLDER}/{name}.md"] = _page(script, title, docstring)
        first = re.split(r"(?<=[.:])\s", docstring, maxsplit=1)[0].rstrip(".:")
        rows.append(f"| [{title}]({name}.md) | {first}. |\n")
        names.append(f"{name}\n")
    texts[f"{_FOLDER}/index.md"] = (
        "# Examples\n\nEach is one script, and runs on a CPU as on GPUs: `python examples/digits.py`.\n\n"
        f"| Example | What it does |\n|---|---|\n{''.join(rows)}\n```{{toctree}}\n:hidden:\n\n{''.join(names)}```\n")
    return texts


def _page(script: pathlib.Path, title: str, docstring: str) -> str:
    lines = script.read_text().splitlines()
    begin = ast.parse(script.read_text()).body[0].end_lineno or 0
    while begin < len(lines) and not lines[begin]:
        begin += 1
    return (f"# {title}\n\n{docstring}\n\nThe script is `examples/{script.name}`.\n\n"
            f"```{{literalinclude}} ../../../examples/{script.name}\n:language: python\n:lines: {begin + 1}-\n```\n")


def run(script: pathlib.Path, arguments: Sequence[str], kept: pathlib.Path, pictures: pathlib.Path) -> str:
    """Returns what an example prints and draws, as the end of its page.

    Args:
      script: the example.
      arguments: those of its command.
      kept: a folder for what it gave; it runs again once its code or its arguments have changed.
      pictures: the folder of the page.

    Raises:
      RuntimeError: if the example fails.
    """
    state = hashlib.sha256(json.dumps([script.read_text(), *arguments]).encode()).hexdigest()[:12]
    result = kept / f"{script.stem}-{state}"
    if not (result / "printed.txt").exists():
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, str(script), *arguments], cwd=folder, text=True,
                                  capture_output=True, timeout=180)
            if done.returncode:
                raise RuntimeError(f"{script.name} failed:\n{done.stderr[-2000:]}")
            result.mkdir(parents=True, exist_ok=True)
            for picture in pathlib.Path(folder).glob("*.png"):
                shutil.copy(picture, result)
            (result / "printed.txt").write_text(done.stdout)
    printed = (result / "printed.txt").read_text().rstrip().splitlines()
    shown = ["...", *printed[-_LINES:]] if len(printed) > _LINES else printed
    text = f"\n`{' '.join(['python', f'examples/{script.name}', *arguments])}` prints:\n\n" + _fenced(shown)
    pictures.mkdir(parents=True, exist_ok=True)
    for picture in sorted(result.glob("*.png")):
        shutil.copy(picture, pictures / f"{script.stem}_{picture.name}")
        text += f"\n![What the example draws]({script.stem}_{picture.name})\n"
    return text


def _fenced(lines: Sequence[Any]) -> str:
    return "```text\n" + "\n".join(lines) + "\n```\n"
