"""A notebook shows what is returned and printed: figures, tables, reports, and the bar in one output."""

import contextlib
import io
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.screen import Cell
from trainer.callbacks.progress import notebook_line
from trainer.core.ambient import notebook
from trainer.tools.report.html_page import HtmlPath

START = """
import contextlib, io
import numpy as np
import trainer
from flax import linen as nn
x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
model = trainer.Sequential([nn.Dense(1)])
model.compile("adam", "mse")
"""
FIT = """
class Loud(trainer.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("ended", epoch)
history = model.fit(x, y, epochs=60, validation_data=(x, y), callbacks=[Loud()])
"""
CELLS = {
    "start": START,
    "fit": "record = trainer.callbacks.RunRecord('run')\n"
           "history = model.fit(x, y, epochs=3, validation_data=(x, y), callbacks=[record])",
    "bar of evaluate": "loss = model.evaluate(x, y)",
    "stopped": "failing = trainer.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)\n"
               "with contextlib.suppress(ZeroDivisionError):\n    model.fit(x, y, callbacks=[failing])",
    "fit with prints": FIT,
    "plot": "history.plot()",
    "history": "history",
    "summary": "model.summary()",
    "redirected summary": "with contextlib.redirect_stdout(io.StringIO()) as text:\n    model.summary()\n"
                          "assert 'dense' in text.getvalue().lower(), text.getvalue()",
    "explain": "report = model.strategy.explain(model, x)",
    "report of explain": "report",
    "report": "trainer.report('run')",
    "plot after pyplot": "import matplotlib.pyplot as plt\nhistory.plot()",
    "plot after magic": "%matplotlib inline\nhistory.plot()",
    "plot by name": "figure = history.plot()\nfigure",
    "plot that is kept": "figure = history.plot()",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each cell, by its name."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("notebook")
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.delenv("CI", raising=False)
        patch.delenv("MPLBACKEND", raising=False)
        nbclient.NotebookClient(made, timeout=200, kernel_name="python3",
                                resources={"metadata": {"path": folder}}).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, made.cells, strict=True)}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("cell", ["plot", "plot after pyplot", "plot after magic", "plot by name"])
def test_a_plot_is_one_image(outputs, cell):
    output, = outputs[cell]
    assert "image/png" in output["data"] and len(output["data"]["image/png"]) > 5000
    assert outputs["plot that is kept"] == []


@pytest.mark.slow
def test_the_bar_is_in_one_output(outputs):
    output, = outputs["fit"]
    lines = output["data"]["text/plain"].splitlines()
    assert [line.split(" ")[:2] for line in lines[:3]] == [["Epoch", f"{epoch}/3"] for epoch in (1, 2, 3)]
    assert len(lines) == 4 and lines[3].startswith("Trained in") and lines[2].count("val_loss") == 1
    assert output["data"]["text/html"].count(" 2/2") == 0 and output["data"]["text/html"].count("<b>2/2</b>") == 3
    output, = outputs["bar of evaluate"]
    assert output["data"]["text/plain"].startswith("Evaluate ")


@pytest.mark.slow
def test_prints_have_an_output_of_their_own_and_no_line_is_lost(outputs):
    streams = [output for output in outputs["fit with prints"] if output["output_type"] == "stream"]
    assert "".join(output["text"] for output in streams) == "".join(f"ended {epoch}\n" for epoch in range(60))
    shown = [output["data"]["text/plain"].splitlines() for output in outputs["fit with prints"]
             if output["output_type"] != "stream"]
    assert [len(lines) for lines in shown] == [notebook_line.MAX_LINES, 60 - notebook_line.MAX_LINES + 1]
    assert [line.split(" ")[1] for lines in shown for line in lines][:60] == [f"{epoch}/60" for epoch in range(1, 61)]


@pytest.mark.slow
def test_a_stopped_fit_leaves_no_line_to_the_next(outputs):
    output, = outputs["stopped"]
    assert "Trained in" not in output["data"]["text/plain"]
    assert all("Epoch 1/1" not in output["data"]["text/plain"] for output in outputs["fit with prints"]
               if output["output_type"] != "stream")


@pytest.mark.slow
def test_values_have_their_tables(outputs):
    output, = outputs["history"]
    assert "<th>val_loss</th>" in output["data"]["text/html"]
    assert outputs["redirected summary"] == []
    for cell, text in (("summary", "Total"), ("explain", "One device, unsharded")):
        output, = outputs[cell]
        assert output["data"]["text/html"].startswith("<pre style=") and text in output["data"]["text/html"]
        assert text in output["data"]["text/plain"]
    output, = outputs["report of explain"]
    assert output["data"]["text/html"].startswith("<details><summary>StateReport(")
    output, = outputs["report"]
    assert output["data"]["text/plain"] == "'run/report.html'"
    assert output["data"]["text/html"].startswith("<iframe srcdoc=")


# --- without a kernel -------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(monkeypatch):
    """A cell of a notebook that keeps the states of its outputs."""
    return Cell.installed(monkeypatch)


def test_a_line_stays_in_its_output_until_it_is_full(cell, monkeypatch):
    monkeypatch.setattr(notebook_line, "MAX_LINES", 3)
    line = notebook_line.NotebookLine(2)
    for epoch in range(4):
        line.draw(f"Epoch {epoch}", 1, 2, [])
        line.draw(f"Epoch {epoch}", 2, 2, ["loss: <1"], final=True)
    line.write("the <end>")
    assert [states[-1]["text/plain"].splitlines() for states in cell.outputs] == [
        [f"Epoch {epoch} ██ 2/2 - loss: <1" for epoch in range(3)], ["Epoch 3 ██ 2/2 - loss: <1", "the <end>"]]
    assert cell.outputs[0][1]["text/plain"] == "Epoch 0 ██ 2/2 - loss: <1"
    assert "the &lt;end&gt;" in cell.outputs[1][-1]["text/html"] and "loss: &lt;1" in cell.outputs[1][-1]["text/html"]


def test_a_table_keeps_its_lines_in_a_cell_and_is_printed_where_output_is_redirected(cell, monkeypatch, capsys):
    class OutStream(io.StringIO):
        pass

    monkeypatch.setattr(sys, "stdout", OutStream())
    notebook.print_table("a  <b>")
    assert sys.stdout.getvalue() == "" and cell.outputs[0][0]["text/plain"] == "a  <b>"
    assert "white-space:pre;" in cell.outputs[0][0]["text/html"] and "a  &lt;b&gt;" in cell.outputs[0][0]["text/html"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        notebook.print_table("a  b")
    assert text.getvalue() == "a  b\n" and len(cell.outputs) == 1


def test_a_table_is_printed_where_no_notebook_is(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # IPython in a terminal
    notebook.print_table("a  b")
    assert capsys.readouterr().out == "a  b\n"


def test_a_report_of_a_state_is_folded_below_its_line():
    model = trainer.Model(nn.Dense(3))
    report = model.strategy.explain(model, np.zeros((1, 4), np.float32))
    shown = report._repr_html_()
    assert shown.startswith("<details><summary>StateReport(&#x27;") and "Optimizer state" in shown


def test_the_path_of_a_report_is_text_that_shows_the_page():
    path = HtmlPath("run/report.html", '<p class="a">1</p>')
    assert path == "run/report.html" and repr(path) == "'run/report.html'" and os.path.basename(path) == "report.html"
    assert 'srcdoc="&lt;p class=&quot;a&quot;&gt;1&lt;/p&gt;"' in path._repr_html_()
    assert pickle.loads(pickle.dumps(path))._repr_html_() == path._repr_html_()


def test_a_figure_shows_itself():
    pytest.importorskip("matplotlib")
    history = trainer.callbacks.History()
    history.on_epoch_end(0, {"loss": 0.5})
    figure = history.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pickle.loads(pickle.dumps(figure)).axes[0].get_title() == "loss"
