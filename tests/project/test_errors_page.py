"""docs/errors.md and the messages fit: every entry is named by a message, and every name of a message has an entry."""

import ast
import re
import tomllib

import pytest

import trainer
from tests.support import pages, project_files
from trainer.core import errors
from trainer.tools.command_line import commands

PAGE = "docs/errors.md"
MESSAGES = re.search(r"^## Messages\n(.*?)^## ", pages.read(PAGE), re.MULTILINE | re.DOTALL)[1]
ENTRIES = re.findall(r"^### (.*)$", MESSAGES, re.MULTILINE)


def codes_in_the_sources():
    """Returns the entries that messages name, by `see` or by their address."""
    found = set()
    for path in project_files.modules().values():
        text = path.read_text()
        if path.name == "explain.py":  # which names all
            continue
        found |= set(re.findall(r"""\bsee\(['"]([\w-]+)['"]\)""", text))
        found |= set(re.findall(r"""page_url\(['"]errors['"], ['"]([\w-]+)['"]\)""", text))
    return found


def texts_in_the_sources(containing="", docstrings=True):
    """Yields the strings of the code with a text in the file, with "…" for what is put into them."""
    for source in (path.read_text() for path in project_files.modules().values()):
        if containing not in source:
            continue
        tree = ast.parse(source)
        left_out = set() if docstrings else {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in left_out:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_entry_is_named_by_a_message_and_every_name_has_an_entry():
    assert sorted(ENTRIES) == sorted(codes_in_the_sources()), (
        "write the entry under `### slug` of docs/errors.md, and end its message with `errors.see(\"slug\")`")


def test_an_entry_is_an_anchor_as_it_stands():
    unfit = [entry for entry in ENTRIES if not re.fullmatch(r"[a-z]+(-[a-z]+)*", entry)]
    assert unfit == [], "a heading has lower-case words with hyphens between"
    assert len(set(ENTRIES)) == len(ENTRIES)


def test_every_entry_says_more_than_the_message():
    entries = re.split(r"^### .*$", MESSAGES, flags=re.MULTILINE)[1:]
    assert [text for text in entries if len(text.split()) < 20] == [], "say why it happens, and the solution"


@pytest.mark.slow
def test_what_is_quoted_of_messages_is_in_the_sources():
    texts = "\n".join(texts_in_the_sources())
    quotes = [" ".join(quote.split()) for quote in re.findall(r"(?<![*\w])\*([^*]+)\*(?![*\w])", MESSAGES)]
    assert len(quotes) >= len(ENTRIES), "begin an entry with the message, in *italics* and with … for what varies"
    parts = [part.strip(" .:,") for quote in quotes for part in quote.split("…")]
    assert [part for part in parts if part not in texts] == [], "quote the messages as they are in the code"


def test_a_message_ends_with_its_entry():
    assert errors.see("monitor") == (f"See {errors.DOCUMENTATION_URL}errors.html#monitor or run "
                                     "`python -m trainer explain monitor`.")
    from flax import linen as nn

    with pytest.raises(RuntimeError, match=rf"before `fit`. {re.escape(errors.see('not-compiled'))}$"):
        trainer.Model(nn.Dense(1)).fit([[1.0]], [[1.0]])


def test_the_address_is_that_of_the_distribution():
    urls = tomllib.loads(pages.read("pyproject.toml"))["project"]["urls"]
    assert urls["Documentation"] == errors.DOCUMENTATION_URL
    assert all(url.startswith(errors.DOCUMENTATION_URL) for url in urls.values())


@pytest.mark.slow
def test_no_message_names_a_file_that_an_installed_user_does_not_have():
    texts = [text for text in texts_in_the_sources("docs/", docstrings=False) if re.search(r"\bdocs/\w+", text)]
    assert texts == [], "name a page of the site by `errors.page_url`, or an entry by `errors.see`"


@pytest.mark.parametrize("code", ENTRIES)
def test_every_entry_is_explained_without_a_network(code, capsys):
    assert commands.main(["explain", code]) == 0
    title, _, text = capsys.readouterr().out.partition("\n\n")
    assert title == code and text.endswith(f"{errors.page_url('errors', code)}\n")
    assert len(text.split()) > 20 and "](" not in text and "###" not in text


def test_explained_links_lead_to_pages_and_exit_codes_have_their_rows(capsys):
    assert commands.main(["explain", "logits"]) == commands.main(["explain", "PHASE"]) == 0
    assert f"Modules and steps ({errors.page_url('modules_and_steps', 'what-a-module-may-look-like')})" in (
        capsys.readouterr().out)
    commands.main(["explain", "1"])
    commands.main(["explain", "137"])
    shown = capsys.readouterr().out
    assert "exit code 1 of `python -m trainer plan`: the training does not fit" in shown
    assert "exit code 128 + s of `trainer.launch`: signal s ended a worker" in shown


def test_an_unknown_code_is_refused_and_no_code_lists_all(capsys):
    assert commands.main(["explain", "moniter"]) == 2
    assert capsys.readouterr().err == (
        "Unknown code 'moniter'. Did you mean 'monitor'? `python -m trainer explain` lists all.\n")
    assert commands.main(["explain"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [f"  {entry}" for entry in ENTRIES] == listed[1:1 + len(ENTRIES)] and "  75" in listed


def test_the_page_is_the_text_of_the_command():
    assert (project_files.ROOT / "trainer/tools/command_line/errors.md").resolve() == project_files.ROOT / PAGE


def test_exit_codes_are_those_of_the_code():
    from trainer.callbacks.checkpoints.backup_and_restore import PREEMPTED_EXIT_CODE
    from trainer.distribute.cluster import PEER_LOST
    from trainer.distribute.cluster.liveness.process_end import REFUSED
    from trainer.launch.supervisor import PREEMPTED, TIMED_OUT
    from trainer.tools.command_line.plan import DOES_NOT_FIT

    table = pages.read(PAGE).split("## Exit codes")[1]
    codes = set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE))
    expected = (DOES_NOT_FIT, PREEMPTED_EXIT_CODE, PEER_LOST, REFUSED, PREEMPTED, TIMED_OUT)
    assert {str(code) for code in expected} <= codes
