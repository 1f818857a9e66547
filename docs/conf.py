"""The site: Sphinx with MyST-NB. `make docs` writes it to docs/_build/html.

Pages are plain Markdown, which GitHub shows too; `site_pages` makes of them, of the code and of the examples what
Sphinx reads. Set DOCS_ONLINE=1 to link the names of JAX and others to their documentation, which needs a network.
"""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
# Examples run in kernels that inherit these. Eight simulated devices, also where there is a GPU.
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))

project = "trainer"
author = "The authors of trainer"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_pages",
]
root_doc = "index"
exclude_patterns = ["_build", "site_pages"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_excludepatterns = ["generated/examples/*"]  # `site_pages.gallery` runs them
nb_execution_cache_path = str(FOLDER / "_build" / "executed")
nb_execution_in_temp = True
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # XLA's own messages

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("ArrayLike", "ArrayTree", "DTypeLike", "Data", "Layout", "PyTree")}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "py:obj"  # in docstrings, names in backquotes are links where they are documented
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

intersphinx_mapping = {} if os.environ.get("DOCS_ONLINE") != "1" else {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "jax": ("https://docs.jax.dev/en/latest", None),
    "flax": ("https://flax.readthedocs.io/en/latest", None),
    "optax": ("https://optax.readthedocs.io/en/latest", None),
    "grain": ("https://google-grain.readthedocs.io/en/latest", None),
}
html_theme = "sphinx_book_theme"
html_title = "trainer"
html_static_path = ["site_pages/static"]
html_css_files = ["site.css"]
html_copy_source = True  # notebooks, and pages as Markdown
html_show_sourcelink = False
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": True,
    "navbar_persistent": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
