"""What Sphinx reads beside the pages of docs/: the reference, the gallery, and pages from elsewhere in the project.

Everything is written to docs/generated, which is not kept. Only this file knows of Sphinx.
"""

from __future__ import annotations

import inspect
import os
import pathlib
import re
from typing import Any

from site_pages import docstrings, elsewhere, gallery, reference, sources

DOCS = pathlib.Path(__file__).parents[1]
GENERATED = DOCS / "generated"
# The arguments of the examples that run at the build, if they have changed: the others need photos, Ray or a client.
# GALLERY_RUNS=0 runs none.
RUN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "actor_critic", "dcgan", "digits", "distillation", "lora", "miniature_gpt", "mnist", "optuna_pruning",
        "siamese", "text_classification", "transfer_learning", "vae", "vit_finetune"), ()),
    "finetune_llm": ("--epochs", "10")}


def setup(app: Any) -> dict[str, bool]:
    """Connects the makers of pages to Sphinx."""
    app.connect("builder-inited", _generate)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _rewrite, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _restore_colons, priority=600)  # after it
    app.connect("autodoc-skip-member", _is_foreign)
    app.connect("autodoc-process-signature", _plain_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def pages() -> dict[str, str]:
    """Returns the texts of all generated pages, by path below docs/, without what examples print."""
    return {**reference.pages(), **gallery.pages(DOCS.parent / "examples"), **elsewhere.pages(DOCS.parent)}


def _generate(app: Any) -> None:
    texts = pages()
    for name, arguments in RUN.items():
        if os.environ.get("GALLERY_RUNS", "1") != "0":
            script = DOCS.parent / "examples" / f"{name}.py"
            result = gallery.run(script, arguments, DOCS / "_build" / "gallery")
            texts[f"generated/examples/{name}.ipynb"] = gallery.notebook(script, arguments, result)
    for path, text in texts.items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        if not (DOCS / path).exists() or (DOCS / path).read_text() != text:  # else Sphinx would read it again
            (DOCS / path).write_text(text)


def _read(app: Any, name: str, text: list[str]) -> None:
    if (DOCS / f"{name}.md").exists():
        text[0] = sources.prepared(f"{name}.md", text[0])


def _rewrite(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = docstrings.restructured(lines, is_attribute=what in ("attribute", "data", "property"))


def _restore_colons(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = docstrings.with_colons(lines)


def _is_foreign(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Returns True for functions of other libraries, such as the default of a module's activation."""
    home = getattr(thing, "__module__", None)
    return True if callable(thing) and home is not None and home.split(".")[0] != reference.PACKAGE else None


def _plain_signature(app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None,
                     returned: str | None) -> tuple[str | None, str | None]:
    """Names functions and classes among the defaults, and leaves out what Flax adds to each module."""
    if inspect.isclass(thing) and signature and signature.startswith("(*arguments"):  # of a `__new__`
        from sphinx.util.inspect import stringify_signature

        signature = stringify_signature(inspect.signature(thing), show_annotation=False)
    for pattern, shown in ((r", parent=<[^>]*>, name=None", ""), (r"<function (\w+)[^>]*>", r"\1"),
                           (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1")):
        signature = signature and re.sub(pattern, shown, signature)
    return signature, returned
