"""LazyLogs: keys are free, values are fetched once, and no way of reading finds anything but the fetched values."""

import copy
import json
import operator
import pickle
import pprint
import weakref

import jax
import pytest

from trainer.callbacks import LazyLogs

VALUES = {"loss": 0.5, "accuracy": 0.25}


class Device:
    """Counts how often the logs are fetched."""

    def __init__(self):
        self.fetches = 0

    def fetch(self):
        self.fetches += 1
        return dict(VALUES)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def logs(device):
    return LazyLogs(VALUES, device.fetch)


def as_keywords(**keywords):
    return keywords


def updated(logs):
    plain = {}
    plain.update(logs)
    return plain


def merged_in_place(logs):
    plain = {}
    plain |= logs
    return plain


def matched(logs):
    match logs:
        case {"loss": loss, "accuracy": accuracy}:
            return {"loss": loss, "accuracy": accuracy}


READS = {
    "indexing": (lambda logs: logs["loss"], 0.5),
    "get": (lambda logs: logs.get("accuracy"), 0.25),
    "get with a default for an unknown key": (lambda logs: logs.get("other", "NA"), "NA"),
    "items": (lambda logs: list(logs.items()), [("loss", 0.5), ("accuracy", 0.25)]),
    "values": (lambda logs: list(logs.values()), [0.5, 0.25]),
    "dict()": (dict, VALUES),
    "unpacking into a dict": (lambda logs: {**logs}, VALUES),
    "unpacking into keywords": (lambda logs: as_keywords(**logs), VALUES),
    "update of another dict": (updated, VALUES),
    "| on the left": (lambda logs: logs | {"x": 1}, {**VALUES, "x": 1}),
    "| on the right": (lambda logs: {"x": 1} | logs, {"x": 1, **VALUES}),
    "|= on the right": (merged_in_place, VALUES),
    "| of two lazy ones": (lambda logs: logs | LazyLogs(["x"], lambda: {"x": 1}), {**VALUES, "x": 1}),
    "copy method": (lambda logs: logs.copy(), VALUES),
    "copy.copy": (copy.copy, VALUES),
    "copy.deepcopy": (copy.deepcopy, VALUES),
    "a queue between processes": (lambda logs: pickle.loads(pickle.dumps(logs)), VALUES),
    "json of a dict of it": (lambda logs: json.loads(json.dumps(dict(logs))), VALUES),
    "json": (lambda logs: json.loads(json.dumps(logs)), VALUES),
    "json with an indent": (lambda logs: json.loads(json.dumps(logs, indent=1)), VALUES),
    "repr": (repr, repr(VALUES)),
    "str": (str, str(VALUES)),
    "pprint": (pprint.pformat, repr(VALUES)),
    "str.format": (lambda logs: "{loss}".format(**logs), "0.5"),
    "str.format_map": (lambda logs: "{loss}".format_map(logs), "0.5"),
    "% formatting": (lambda logs: operator.mod("%(loss).2f", logs), "0.50"),
    "pattern matching": (matched, VALUES),
    "== with a dict": (lambda logs: logs == VALUES, True),
    "== from a dict": (lambda logs: operator.eq(VALUES, logs), True),
    "== with a lazy one": (lambda logs: logs == LazyLogs(VALUES, lambda: dict(VALUES)), True),
    "== with other values": (lambda logs: logs == {**VALUES, "loss": 0.0}, False),
    "!=": (lambda logs: logs != VALUES, False),
    "!= with other values": (lambda logs: logs != {**VALUES, "loss": 0.0}, True),
    "pop": (lambda logs: logs.pop("loss"), 0.5),
    "pop with a default": (lambda logs: logs.pop("other", 7), 7),
    "popitem": (lambda logs: logs.popitem(), ("accuracy", 0.25)),
    "setdefault of a known key": (lambda logs: logs.setdefault("loss", 1.0), 0.5),
    "leaves of a tree": (jax.tree.leaves, jax.tree.leaves(VALUES)),
    "paths in a tree": (lambda logs: jax.tree.leaves_with_path(logs), jax.tree.leaves_with_path(VALUES)),
    "mapping a tree": (lambda logs: jax.tree.map(lambda value: 2 * value, logs), {"loss": 1.0, "accuracy": 0.5}),
    "flattening and unflattening": (lambda logs: jax.tree.unflatten(*jax.tree.flatten(logs)[::-1]), VALUES),
    "fetching a tree": (jax.device_get, VALUES),
}


@pytest.mark.parametrize("way", READS)
def test_every_way_of_reading_gives_the_fetched_values(logs, device, way):
    read, expected = READS[way]
    result = read(logs)
    assert result == expected
    assert device.fetches == 1
    if isinstance(result, dict):
        assert type(result) is dict


KEY_QUESTIONS = {
    "in": (lambda logs: ("loss" in logs, "x" in logs), (True, False)),
    "len": (len, 2),
    "truth": (bool, True),
    "or": (lambda logs: (logs or {}) is logs, True),
    "keys": (lambda logs: list(logs.keys()), ["loss", "accuracy"]),
    "iteration": (list, ["loss", "accuracy"]),
    "sorting": (sorted, ["accuracy", "loss"]),
    "being a dict": (lambda logs: isinstance(logs, dict), True),
    "assigning": (lambda logs: logs.__setitem__("loss", 1.0), None),
    "updating": (lambda logs: logs.update(x=1.0), None),
    "deleting": (lambda logs: logs.__delitem__("loss"), None),
}


@pytest.mark.parametrize("question", KEY_QUESTIONS)
def test_nothing_is_fetched_for_the_keys_or_to_assign(logs, device, question):
    ask, expected = KEY_QUESTIONS[question]
    assert ask(logs) == expected
    assert device.fetches == 0


def test_values_are_fetched_once(logs, device):
    for _ in range(3):
        assert logs["loss"] == 0.5
        assert dict(logs) == VALUES
    assert device.fetches == 1


def test_what_was_assigned_or_deleted_before_the_fetch_stays_so(logs):
    logs["loss"] = 9.0
    logs["learning_rate"] = 0.1
    del logs["accuracy"]
    assert dict(logs) == {"loss": 9.0, "learning_rate": 0.1}


def test_what_is_assigned_after_the_fetch_is_read(logs):
    assert logs["loss"] == 0.5
    logs.update(loss=9.0, learning_rate=0.1)
    assert {**logs} == {"loss": 9.0, "accuracy": 0.25, "learning_rate": 0.1}


def test_a_union_with_something_else_than_a_dict_is_refused(logs):
    with pytest.raises(TypeError, match="unsupported operand"):
        logs | [("x", 1)]


def test_an_unknown_key_is_a_key_error(logs):
    with pytest.raises(KeyError, match="val_loss"):
        logs["val_loss"]


@pytest.mark.parametrize("fetched", [{"loss": 0.5}, {**VALUES, "extra": 1.0}])
def test_other_keys_than_announced_are_refused(fetched):
    logs = LazyLogs(VALUES, lambda: fetched)
    with pytest.raises(ValueError, match=r"`fetch` returned the logs .*\. Expected: \['accuracy', 'loss'\]"):
        logs["loss"]


def test_a_failed_fetch_is_tried_again():
    answers = [RuntimeError("device"), dict(VALUES)]

    def fetch():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    logs = LazyLogs(VALUES, fetch)
    with pytest.raises(RuntimeError, match="device"):
        logs["loss"]
    assert logs["loss"] == 0.5


def test_fetched_logs_let_go_of_the_device():
    device = Device()
    logs = LazyLogs(VALUES, device.fetch)
    reference = weakref.ref(device)
    assert logs["loss"] == 0.5
    del device
    assert reference() is None
