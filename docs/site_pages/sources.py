"""Pages of docs/ as Sphinx reads them: code that runs at the build, and links that lead to pages of the site."""

from __future__ import annotations

import pathlib
import posixpath
import re

from site_pages import elsewhere

_DOCS = pathlib.Path(__file__).parents[1]
# Pages whose blocks run, one after another, when the site is built, so that what they print is shown.
EXECUTED = {"start.md", "data.md", "preprocessing.md", "images.md", "language_models.md", "gan.md", "callbacks.md",
            "optimizers.md", "metrics.md", "evaluation.md", "debugging.md", "custom_training.md", "distributed.md",
            "sharding.md", "large_batches.md", "non_finite.md", "saving.md", "speed.md"}
# Shows what is printed, and not what the last expression of a block returns.
_HEAD = """\
---
file_format: mystnb
kernelspec:
  name: python3
---

```{code-cell} python
:tags: [remove-cell]
%config InteractiveShell.ast_node_interactivity = "none"
```

"""


def prepared(name: str, text: str) -> str:
    """Returns what Sphinx shall read for a page. An entry of a toctree that ends with a star may be absent.

    Args:
      name: the page's path below docs/, such as "migration/from_tf_keras.md".
      text: the page as it is written.
    """
    text = re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)", lambda link: f"]({_target(name, link[1])}{link[2] or ''})", text)
    text = re.sub(r"^(\w+)\*\n", lambda entry: entry[0] if (_DOCS / f"{entry[1]}.md").exists() else "", text,
                  flags=re.MULTILINE)
    if name in EXECUTED:
        text = _HEAD + re.sub(r"^```python$", "```{code-cell} python", text, flags=re.MULTILINE)
    return text


def _target(name: str, target: str) -> str:
    """Returns where a link leads on the site, which has copies of pages from elsewhere."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(name), target))  # from the project's root
    copy = elsewhere.copy_of(path)
    return target if copy is None else posixpath.relpath(copy, posixpath.dirname(name) or ".")
