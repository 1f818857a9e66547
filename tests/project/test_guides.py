"""The pages of docs/ are true: their blocks run, their links lead somewhere, and the site has all of them."""

import ast
import json
import pathlib
import re

import numpy as np
import pytest
from site_pages.sources import EXECUTED

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support import pages, project_files
from trainer import distribute

DOCS = project_files.ROOT / "docs"
PAGES = sorted(str(path.relative_to(project_files.ROOT)) for path in DOCS.rglob("*.md")
               if not {"_build", "generated"} & set(path.parts))
# Whose blocks need files or several processes, or are compared with what they print: these have tests of their own.
ELSEWHERE = {"docs/configuration.md", "docs/estimator.md", "docs/multi_worker.md", "docs/parameter_server.md",
             "docs/plan.md", "docs/pretrained.md", "docs/resume.md", "docs/strategies.md",
             *(page for page in PAGES if page.startswith("docs/migration/"))}
WITH_CODE = [page for page in PAGES if page not in ELSEWHERE and pages.blocks(page)]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pyplot():
    """matplotlib, drawing without windows. Some libraries of the pages set environment variables when imported."""
    pytest.importorskip("sklearn.datasets")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    backend = pyplot.get_backend()
    pyplot.switch_backend("Agg")
    yield pyplot
    pyplot.switch_backend(backend)


# The site runs some of the pages too, whenever it is built.
@pytest.mark.slow
@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[] if pathlib.PurePath(page).name in EXECUTED else pytest.mark.every_case)
    for page in WITH_CODE])
def test_the_blocks_of_a_page_run_one_after_another(page, pyplot):
    pages.run(page)
    pyplot.close("all")


def blocks(page):
    return pages.blocks(f"docs/{page}.md")


def run(block):
    names = {"__name__": "__main__"}
    exec(compile(block, "docs", "exec"), names)
    return names


@pytest.mark.slow
def test_an_optax_transformation_trains_a_model_of_the_package():
    names = run(blocks("custom_training")[0])
    assert names["model"].predict(names["images"], verbose=0).shape == (8, 10)


@pytest.mark.slow
def test_the_custom_step_is_the_one_that_trains():
    model = run(blocks("custom_training")[4])["model"]
    before = model.get_weights()
    model.train_on_batch([[1.0, 1.0, 1.0]], [[1.0]])
    for old, new in zip(before, model.get_weights(), strict=True):
        assert abs(new - old) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
def test_the_distances_are_those_of_each_row():
    names = run(blocks("custom_training")[5])
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    found = names["distances"](rows, center=np.ones(3, np.float32))
    np.testing.assert_allclose(found, np.linalg.norm(rows - 1, axis=-1), rtol=1e-6)


@pytest.mark.slow
def test_the_metric_of_ones_own_is_that_of_all_rows():
    names = run(blocks("custom_training")[2])
    model, x = names["model"], names["x"][:70]  # the last batch has fewer rows
    near = np.abs(model.predict(x, verbose=0) - 3 * x) <= 0.2
    assert 0 < near.mean() < 1
    assert model.evaluate(x, 3 * x, verbose=0)["within_tolerance"] == pytest.approx(near.mean())


@pytest.mark.slow
def test_the_networks_of_the_gan_learn_the_place_of_the_points():
    names = run(blocks("custom_training")[6])
    assert names["made"].shape == (500, 2)
    np.testing.assert_allclose(names["made"].mean(0), [2, -1], atol=0.9)


@pytest.mark.slow
def test_the_loop_of_ones_own_trains():
    names = run(blocks("custom_training")[7])
    assert names["loss"] < 0.5
    assert names["model"].evaluate(names["x"], names["y"], verbose=0)["loss"] < 0.5


@pytest.mark.slow
def test_the_split_model_is_split_and_its_report_printed(capsys):
    names = run(blocks("sharding")[0])
    assert not names["model"].state.params["layers_0"]["kernel"].sharding.is_fully_replicated
    assert names["report"].total_bytes < names["report"].unsharded_bytes / 4
    assert str(names["report"]) in capsys.readouterr().out


@pytest.mark.slow
def test_the_report_of_the_mesh_is_the_one_on_the_page(capsys):
    names = run("\n".join(blocks("sharding")[:3]))
    shown = str(names["report"]).partition("\nPer device")[0].rpartition("\n")[0]
    assert f"```text\n{shown}\n```" in (DOCS / "sharding.md").read_text()


@pytest.mark.slow
def test_the_big_step_is_one_update():
    assert run(blocks("large_batches")[0])["model"].optimizer.iterations == 1


@pytest.mark.slow
def test_microbatches_give_the_numbers_of_the_whole_batch():
    names = run("\n".join(blocks("large_batches")[:2]))
    for one, other in zip(names["whole"].get_weights(), names["in_parts"].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_run_that_may_be_interrupted_leaves_its_best_weights(tmp_path):
    model = run(blocks("saving")[4])["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors"], "the backup was deleted"
    assert len(model.load_weights("best.safetensors").matched) == 4


@pytest.mark.slow
def test_the_files_hold_what_they_are_said_to(tmp_path):
    names = run(blocks("saving")[0])
    assert names["report"].matched == ("layers_0/bias", "layers_0/kernel")
    np.testing.assert_allclose(names["predictions"], names["model"].predict(names["x"], verbose=0), rtol=1e-5)
    assert (tmp_path / "digits").is_dir()


@pytest.mark.slow
def test_what_was_compiled_ahead_is_not_compiled_again(capsys):
    ahead, trained = blocks("speed")[0].split("history = ")
    with count_compilations() as compiled:
        names = run(ahead)
    assert names["secs"] > 0 and compiled
    with count_compilations() as compiled:
        exec(f"history = {trained}", names)
    assert compiled == []
    assert str(names["history"].timing) in capsys.readouterr().out


@pytest.mark.slow
def test_microbatches_make_the_peak_of_a_step_lower():
    peaks = run(blocks("out_of_memory")[0])["peaks"]
    assert peaks[4] < peaks[1]


@pytest.mark.slow
def test_non_finite_updates_are_found_and_left_out(capsys):
    names = {"__name__": "__main__"}
    for block in blocks("non_finite"):
        exec(compile(block, "docs/non_finite.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "[100]" in printed and "invalid value (nan)" in printed
    assert names["guarded"]["skipped_steps"] == [1.0] and names["guarded"]["spike_streaks"] == [0.0]
    assert names["history"]["skipped_steps"] == [1.0, 1.0] and printed.rstrip().endswith("True")


# --- strategies ------------------------------------------------------------------------------------------------------

TABLE = re.findall(r"^\| `(\w+Strategy)` \|.*\| (works|planned) \|$", pages.read("docs/distributed.md"), re.MULTILINE)


def test_strategies_are_listed():
    assert len(TABLE) == pages.read("docs/distributed.md").count("Strategy` |")


@pytest.mark.parametrize(("name", "state"), TABLE)
def test_a_strategy_is_said_to_work_exactly_if_it_exists(name, state):
    assert hasattr(distribute, name) == (state == "works")


def test_every_extra_is_listed():
    import tomllib

    extras = tomllib.loads((project_files.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = re.search(r"\| Extra \|.*?\n\n", pages.read("docs/install.md"), re.DOTALL)[0]
    assert [extra for extra in extras if f"`{extra}`" not in table] == []


# --- the site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated():
    import site_pages

    return site_pages.pages()


def toctree_entries(text):
    """Returns the entries of the toctrees of a page."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]


def test_the_site_has_every_page_once(generated):
    names = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES}
    entries = toctree_entries(pages.read("docs/index.md"))
    shown = [name for entry in entries for name in names
             if re.fullmatch(re.escape(entry).replace(r"\*", r"[^/]*"), name)]
    assert sorted(shown) == sorted(names - {"index"}), "name each page once in a toctree of docs/index.md"
    for entry in entries:
        if entry.startswith("generated/"):
            assert {f"{entry}.md", f"{entry}.rst"} & set(generated), entry


def test_the_site_has_every_example(generated):
    for script in (project_files.ROOT / "examples").glob("*.py"):
        cells = json.loads(generated[f"generated/examples/{script.stem}.ipynb"])["cells"]
        title = cells[0]["source"].splitlines()[0].removeprefix("# ")
        assert f"[{title}]({script.stem}.ipynb)" in generated["generated/examples/index.md"]


@pytest.mark.slow
def test_an_example_is_a_notebook_with_what_it_printed_and_drew(tmp_path):
    from site_pages import gallery

    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    script = tmp_path / "count_rows.py"
    script.write_text('''"""Counts rows. Prints them. Draws nothing."""

import argparse
import pathlib

# How many.
ROWS = 2


# Of each row.
@property
def name(row):
    """Returns the name of a row."""
    return f"row {row}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=ROWS)
    rows = parser.parse_args().rows
    pathlib.Path("drawn.png").write_bytes(b"picture")
    print("\\n".join(map(name.fget, range(rows))))


if __name__ == "__main__":
    main()
''')
    result = gallery.run(script, ["--rows", "3"], tmp_path / "kept")
    notebook = nbformat.reads(gallery.notebook(script, ["--rows", "3"], result), as_version=4)
    nbformat.validate(notebook)
    about, head, name, main, call = notebook.cells
    assert about.source.startswith("# Count rows\n\nCounts rows. Prints them.")
    assert head.source.startswith("import argparse") and head.source.endswith("# How many.\nROWS = 2")
    assert name.source.startswith("# Of each row.\n@property") and main.source.startswith("def main")
    printed, drawn = call.outputs
    assert printed.text == "row 0\nrow 1\nrow 2\n" and set(drawn.data) == {"image/png"}
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()  # as a user would
    assert notebook.cells[-1].outputs[0].text == printed.text
    written = result / "printed.txt"
    before = written.stat().st_mtime_ns
    gallery.run(script, ["--rows", "3"], tmp_path / "kept")
    assert written.stat().st_mtime_ns == before
    script.write_text(script.read_text().replace("print(", "raise OSError("))
    with pytest.raises(RuntimeError, match=r"count_rows.py failed:\n(.|\n)*OSError: row 0"):
        gallery.run(script, [], tmp_path / "kept")


def test_each_example_says_three_sentences():
    for script in sorted((project_files.ROOT / "examples").glob("*.py")):
        text = ast.get_docstring(ast.parse(script.read_text()))
        assert len(re.findall(r"(?<!al)[.](?=\s|$)", text)) >= 3, script.name


def test_the_reference_has_every_public_name(generated):
    modules = ["", ".callbacks", ".callbacks.loggers", ".data", ".data.preprocessing", ".distribute", ".estimator",
               ".losses", ".metrics", ".models", ".optimizers", ".optimizers.schedules", ".regularizers", ".testing",
               ".utils"]
    for path in modules:
        module, page = trainer, generated[f"generated/api/trainer{path}.rst"]
        for part in path.split(".")[1:]:
            module = getattr(module, part)
        besides = ["TrainerClassifier", "TrainerRegressor"] if module is trainer else []
        for name in [*getattr(module, "__all__", []), *besides]:
            if not isinstance(getattr(module, name), type(re)):
                entry = rf"^\.\. (auto\w+:: trainer{path}\.|py:\w+:: ){name}$"
                assert re.search(entry, page, re.MULTILINE), (path, name)
        assert f"   trainer{path}\n" in generated["generated/api/index.rst"]
    assert {f"generated/api/trainer.{name}.rst" for name in trainer.__all__
            if isinstance(getattr(trainer, name), type(re))} <= set(generated)


def test_a_page_that_runs_at_the_build_is_one_of_the_pages(generated):
    from site_pages import sources

    assert {f"docs/{name}" for name in sources.EXECUTED} <= set(WITH_CODE)
    prepared = sources.prepared("data.md", pages.read("docs/data.md"))
    assert prepared.count("```{code-cell} python") == 1 + len(blocks("data"))
    assert "```python" not in prepared


def test_docstrings_become_what_sphinx_reads():
    import doctest

    from site_pages import docstrings

    assert doctest.testmod(docstrings).failed == 0
    lines = ["Args:", "  one,", "    other: a number", "      of rows.", "  last: another."]
    assert docstrings.restructured(lines) == [
        "Args:", "  one: a number", "      of rows.", "  other: a number", "      of rows.", "  last: another."]


def test_code_in_docstrings_stays_as_it_is():
    from site_pages import docstrings

    example = [">>> class Sum(Metric):", "...     def __init__(self, total_=`x`):", "..."]
    assert docstrings.restructured(["Sums.", "", *example, "", "In val_ too."]) == [
        "Sums.", "", *example, "", "In val\\_ too."]
    block = ["    def sample_inputs(self):", "        x_ = 'a'", "", "        return x_"]
    assert docstrings.restructured(["Override it.", "", *block, "", "Or `not`."]) == [
        "Override it.", "", "::", "", *block, "", "Or `not`."]


def test_the_first_sentence_of_an_attribute_may_have_a_colon():
    from site_pages import docstrings

    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    for what, lines, shown in (("property", ["Whether it adds: then sums."], "Whether it adds: then sums."),
                               ("method", ["Counts.", "", "Returns:", "  A list: all."], ":returns: A list: all.")):
        lines = docstrings.restructured(lines, is_attribute=what == "property")
        read = napoleon.GoogleDocstring(lines, napoleon.Config(), what=what, name="trainer.x").lines()
        assert shown in docstrings.with_colons(read)


# --- links -----------------------------------------------------------------------------------------------------------


def anchors(path):
    """Returns the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_lead_to_files_and_headings(page):
    path = project_files.ROOT / page
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        if target.startswith("generated/"):
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
    assert re.findall(r"\[\w+\.md\]\(", text) == [], "a page is named by its title"


@pytest.mark.exhaustive  # minutes
@pytest.mark.slow
@pytest.mark.processes
def test_the_site_is_built_without_a_warning(tmp_path):
    import importlib.util
    import subprocess
    import sys

    if importlib.util.find_spec("sphinx_book_theme") is None:
        pytest.skip("`make docs` has installed no Sphinx here")
    html = tmp_path / "html"
    done = subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(html)],
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    start = (html / "start.html").read_text()
    assert "(1437, 8, 8, 1)" in start and 'src="_images/' in start
    inventory = subprocess.run([sys.executable, "-m", "sphinx.ext.intersphinx", str(html / "objects.inv")],
                               capture_output=True, text=True, check=True).stdout
    for name in ("Model", "Model.fit", "losses.CTC", "callbacks.TensorBoard"):
        assert f"trainer.{name} " in inventory
