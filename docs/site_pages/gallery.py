"""A notebook for each example: what it shows, its code, and what it printed and drew if it is quick."""

from __future__ import annotations

import ast
import base64
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

_TITLES = {"actor_critic": "Actor-critic", "dcgan": "DCGAN", "finetune_llm": "Fine-tuning of a language model",
           "lora": "LoRA", "miniature_gpt": "Miniature GPT", "mnist": "MNIST", "optuna_pruning": "Search with Optuna",
           "ray_tune": "Search with Ray Tune", "serve_fastapi": "Serving with FastAPI", "vae": "VAE",
           "vit_finetune": "Fine-tuning of a vision transformer"}
_LINES = 40  # of what an example prints, from its end
_FOLDER = "generated/examples"
_BEGIN = "if __name__ =="  # of a script's last lines, which call `main`


def pages(folder: pathlib.Path) -> dict[str, str]:
    """Returns the notebooks of all examples of a folder and a page that lists them, by path below docs/."""
    texts, rows, names = {}, [], []
    for script in sorted(folder.glob("*.py")):
        name, docstring = script.stem, ast.get_docstring(ast.parse(script.read_text())) or ""
        texts[f"{_FOLDER}/{name}.ipynb"] = notebook(script)
        first = re.split(r"(?<=[.:])\s", docstring, maxsplit=1)[0].rstrip(".:")
        rows.append(f"| [{_title(name)}]({name}.ipynb) | {first}. |\n")
        names.append(f"{name}\n")
    texts[f"{_FOLDER}/index.md"] = (
        "# Examples\n\nEach is one script, and runs on a CPU as on GPUs: `python examples/digits.py`. The pages are "
        "notebooks, which the arrow above downloads.\n\n"
        f"| Example | Effect |\n|---|---|\n{''.join(rows)}\n```{{toctree}}\n:hidden:\n\n{''.join(names)}```\n")
    return texts


def notebook(script: pathlib.Path, arguments: Sequence[str] = (), result: pathlib.Path | None = None) -> str:
    """Returns an example as a notebook, in the JSON of nbformat 4.

    Args:
      script: the example.
      arguments: those of its command.
      result: the folder that `run` returned; None for cells without outputs.
    """
    text = script.read_text()
    tree = ast.parse(text)
    docstring, *statements = tree.body
    lines = text.splitlines()
    begins = [docstring.end_lineno, *(
        _begin(statement, lines) for statement in statements if isinstance(statement, (ast.FunctionDef, ast.ClassDef)))]
    end = next(number for number, line in enumerate(lines) if line.startswith(_BEGIN))
    sources = ["\n".join(lines[begin:stop]).strip("\n")
               for begin, stop in zip(begins, [*begins[1:], end], strict=True)]
    command = " ".join([f"python examples/{script.name}", *arguments])
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "id": "about", "metadata": {},
         "source": f"# {_title(script.stem)}\n\n{ast.get_docstring(tree)}\n\nAs a script: `{command}`."},
        *(_code(f"code-{number}", source) for number, source in enumerate(sources)),
        _code("main", (f"import sys\n\nsys.argv = {[script.name, *arguments]}\n" if "argparse" in text else "") +
              "main()", [] if result is None else _outputs(result))]
    return json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": {
        "name": "python3", "display_name": "Python 3", "language": "python"}}}, indent=1)


def run(script: pathlib.Path, arguments: Sequence[str], kept: pathlib.Path) -> pathlib.Path:
    """Returns a folder with what an example printed and drew.

    Args:
      script: the example.
      arguments: those of its command.
      kept: the folder of such folders; the example runs again once its code or its arguments have changed.

    Raises:
      RuntimeError: if the example fails.
    """
    state = hashlib.sha256(json.dumps([script.read_text(), *arguments]).encode()).hexdigest()[:12]
    result = kept / f"{script.stem}-{state}"
    if not (result / "printed.txt").exists():
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, str(script), *arguments], cwd=folder, text=True,
                                  capture_output=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{script.name} failed:\n{done.stderr[-2000:]}")
            result.mkdir(parents=True, exist_ok=True)
            for picture in pathlib.Path(folder).rglob("*.png"):
                shutil.copy(picture, result)
            (result / "printed.txt").write_text(done.stdout)
    return result


def _title(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " ").capitalize())


def _begin(statement: ast.FunctionDef | ast.ClassDef, lines: Sequence[str]) -> int:
    """Returns the index of the first line of a definition, its decorators and comments included."""
    begin = min([statement.lineno, *(decorator.lineno for decorator in statement.decorator_list)]) - 1
    while lines[begin - 1].startswith("#"):
        begin -= 1
    return begin


def _code(name: str, source: str, outputs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"cell_type": "code", "id": name, "metadata": {}, "execution_count": None, "source": source,
            "outputs": list(outputs)}


def _outputs(result: pathlib.Path) -> list[dict[str, Any]]:
    printed = (result / "printed.txt").read_text().rstrip().splitlines()
    shown = ["...", *printed[-_LINES:]] if len(printed) > _LINES else printed
    pictures = [base64.b64encode(picture.read_bytes()).decode() for picture in sorted(result.glob("*.png"))]
    return [{"output_type": "stream", "name": "stdout", "text": "\n".join(shown) + "\n"},
            *({"output_type": "display_data", "metadata": {}, "data": {"image/png": picture}} for picture in pictures)]
