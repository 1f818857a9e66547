"""Where the project's files are, for the tests that read them."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
# Import name -> folder, innermost packages first; the mapping of pyproject.toml.
PACKAGES = {"trainer.callbacks": ROOT / "callbacks", "trainer.models": ROOT / "models", "trainer": ROOT / "trainer"}


def modules() -> dict[str, pathlib.Path]:
    """Returns the file of every module, by import name; a package is its `__init__.py`."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def source(path: pathlib.Path) -> str:
    """Returns the text of a module, followed by its stub, if any, which names the exports."""
    stub = path.with_suffix(".pyi")
    return path.read_text() + (stub.read_text() if stub.is_file() else "")


def python_files() -> list[str]:
    """Returns every Python file of the project, relative to its root: code, tests, examples and benchmarks."""
    folders = ("trainer", "models", "callbacks", "tests", "examples", "benchmarks")
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))
