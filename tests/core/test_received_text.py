"""What other processes say is escaped where it comes in."""

import json

import pytest

from trainer.core.received_text import printable, received


@pytest.mark.parametrize(("text", "escaped"), [
    ("Zürich, 東京 \\n", "Zürich, 東京 \\n"),
    ("a\x1b[2J\r\u202eb\x07\x9b", "a\\x1b[2J\\r\\u202eb\\x07\\x9b"),
    ("a\nWatchdog: all is well", "a\\nWatchdog: all is well"),
    ("\ud800", "\\ud800"),
])
def test_what_could_steer_a_terminal_or_forge_a_line_is_escaped(text, escaped):
    assert printable(text) == printable(escaped) == escaped
    document = {text: [text, {"inner": text}, 1, None]}
    assert received(json.dumps(document)) == {escaped: [escaped, {"inner": escaped}, 1, None]}
    printable(text).encode()


def test_the_lines_of_an_error_may_stay():
    assert printable("a\n\tb\x1b", newlines=True) == "a\n\\tb\\x1b"


@pytest.mark.parametrize("document", ["[", b"\xff{", ""])
def test_what_is_no_json_is_a_value_error(document):
    with pytest.raises(ValueError):
        received(document)
