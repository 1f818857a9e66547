"""docs/errors.md and the messages fit: every entry is named by a message, and every name of a message has an entry."""

import ast
import re

import pytest

import trainer
from tests.support import pages, project_files
from trainer.core import errors

PAGE = "docs/errors.md"
MESSAGES = re.search(r"^## Messages\n(.*?)^## ", pages.read(PAGE), re.MULTILINE | re.DOTALL)[1]
ENTRIES = re.findall(r"^### (.*)$", MESSAGES, re.MULTILINE)


def codes_in_the_sources():
    """Returns the entries that messages name, by `see` or in their text."""
    found = set()
    for path in project_files.modules().values():
        text = path.read_text()
        found |= set(re.findall(r"""[{.]see\(['"]([\w-]+)['"]\)""", text))
        if path.name != "errors.py":  # whose examples are none
            found |= set(re.findall(r"docs/errors\.md#([\w-]+)", text))
    return found


def texts_in_the_sources():
    """Yields the strings of the code, with "…" for what is put into them."""
    for path in project_files.modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
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
    assert errors.see("monitor") == "See docs/errors.md#monitor."
    from flax import linen as nn

    with pytest.raises(RuntimeError, match=r"before `fit`. See docs/errors.md#not-compiled.$"):
        trainer.Model(nn.Dense(1)).fit([[1.0]], [[1.0]])


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
