"""RemoteMonitor: what a server receives, and that no server can hold up a training for long.

Where Keras is installed, the requests are compared with those of its callback.
"""

import http.server
import json
import socket
import threading
import urllib.parse

import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss
from tests.support.waiting import LONG_SECS
from trainer.callbacks import CallbackList, RemoteMonitor, remote_monitor


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def server():
    """A server that answers with `status`, after `wait_secs`, and keeps the requests with their bodies."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.server.received.append((self.path, self.headers, body))
            self.server.answer.wait(self.server.wait_secs)
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(b"an answer that nobody reads")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        running.received, running.status, running.wait_secs = [], 200, 0
        running.answer = threading.Event()
        running.root = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.answer.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def closed_port():
    """The address of a server that is not running."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def test_the_arguments_are_those_of_keras():
    monitor = RemoteMonitor()
    attributes = (monitor.root, monitor.path, monitor.field, monitor.headers, monitor.send_as_json)
    assert attributes == ("http://localhost:9000", "/publish/epoch/end/", "data", None, False)


def test_a_form_is_posted_with_the_json_in_its_field(server):
    RemoteMonitor(server.root).on_epoch_end(3, {"loss": 0.5})
    ((path, headers, body),) = server.received
    assert (path, headers["Content-Type"]) == ("/publish/epoch/end/", "application/x-www-form-urlencoded")
    assert urllib.parse.parse_qs(body) == {"data": ['{"epoch": 3, "loss": 0.5}']}


def test_json_is_posted_as_it_is_with_headers_of_ones_own(server):
    RemoteMonitor(server.root, "/other", headers={"X-Run": "7"}, send_as_json=True).on_epoch_end(0, {"loss": 0.5})
    ((path, headers, body),) = server.received
    assert (path, headers["Content-Type"], headers["X-Run"]) == ("/other", "application/json", "7")
    assert body == '{"epoch": 0, "loss": 0.5}'


@pytest.mark.parametrize(("value", "expected"), [
    (np.float32(0.25), 0.25), (np.int64(3), 3), (np.bool_(True), True), (np.arange(1), 0), (np.array(0.5), 0.5),
    (np.arange(3), [0, 1, 2]), (np.array([0.5, np.nan]), [0.5, None]), (jnp.float32(0.25), 0.25),
    (jnp.arange(2), [0, 1]), (jnp.bfloat16(0.5), 0.5), ([np.float32(1), (2, None)], [1.0, [2, None]]),
    ({"a": np.float32(1)}, {"a": 1.0}), (float("nan"), None), (float("-inf"), None), ("text", "text"),
    (1 + 2j, "(1+2j)"),
])
def test_every_value_becomes_json(server, value, expected):
    RemoteMonitor(server.root, send_as_json=True).on_epoch_end(np.int64(1), {"value": value})

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    received = json.loads(server.received[0][2], parse_constant=refuse)
    assert received == {"epoch": 1, "value": expected}
    assert type(received["value"]) is type(expected)


def test_a_server_that_is_not_there_costs_a_warning(closed_port):
    with pytest.warns(UserWarning, match=f"Could not reach RemoteMonitor root server at {closed_port}"):
        RemoteMonitor(closed_port).on_epoch_end(0, {"loss": 0.5})


def test_a_server_that_does_not_answer_holds_the_training_up_for_the_timeout_only(server, monkeypatch):
    assert remote_monitor.TIMEOUT_SECS <= 5
    monkeypatch.setattr(remote_monitor, "TIMEOUT_SECS", 0.1)
    server.wait_secs = LONG_SECS
    with pytest.warns(UserWarning, match="Could not reach RemoteMonitor root server"):
        RemoteMonitor(server.root).on_epoch_end(0, {"loss": 0.5})


def test_an_answer_that_is_no_http_costs_a_warning():
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"what?\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.warns(UserWarning, match="Could not reach RemoteMonitor root server"):
            RemoteMonitor(f"http://127.0.0.1:{listener.getsockname()[1]}").on_epoch_end(0, {"loss": 0.5})
        thread.join()


@pytest.mark.parametrize(("status", "words"), [(404, "Not Found"), (500, "Internal Server Error")])
def test_an_error_of_the_server_costs_a_warning(server, status, words):
    server.status = status
    with pytest.warns(UserWarning, match=f"server at {server.root} answered {status} {words}"):
        RemoteMonitor(server.root).on_epoch_end(0, {"loss": 0.5})


@pytest.mark.parametrize("root", ["localhost:9000", "file:///etc/passwd", "ftp://localhost", ""])
def test_an_address_that_is_not_of_a_web_server_is_refused(root):
    with pytest.raises(ValueError, match=r"`root` must begin with 'http://' or 'https://'\. Received: '"):
        RemoteMonitor(root)


def test_only_the_first_process_posts(server, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    CallbackList([RemoteMonitor(server.root)]).on_epoch_end(0, {"loss": 0.5})
    assert server.received == []


def test_a_monitor_behind_it_is_still_checked_before_training():
    with pytest.raises(ValueError, match="no log has"):
        CallbackList([RemoteMonitor(), trainer.callbacks.EarlyStopping("val_los")]).check_monitors(["val_loss"])


@pytest.mark.slow
def test_fit_posts_every_epoch(server):
    x, y, _ = classification(8)
    model = trainer.Model(LinenMLP())
    model.compile("sgd", logits_loss())
    monitor = RemoteMonitor(server.root, send_as_json=True)
    history = model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0, callbacks=[monitor]).history
    assert [json.loads(body) for _, _, body in server.received] == [
        {"epoch": epoch, "loss": history["loss"][epoch], "val_loss": history["val_loss"][epoch]} for epoch in range(2)]


# --- compared with Keras ----------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(monkeypatch):
    """Keras's class."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("requests")
    return pytest.importorskip("keras").callbacks.RemoteMonitor


@pytest.mark.parametrize("arguments", [
    {}, {"send_as_json": True}, {"path": "/other", "field": "epoch data", "headers": {"X-Run": "7"}},
    {"send_as_json": True, "headers": {"content-type": "application/x-own", "X-Run": "8"}},
])
def test_a_server_receives_what_keras_sends(theirs, server, arguments):
    logs = {"loss": np.float32(0.1), "count": np.arange(1) + 3, "note": "ä & b", "accuracy": 0.5, "steps": np.int64(3)}
    for kind in (theirs, RemoteMonitor):
        kind(server.root, **arguments).on_epoch_end(4, logs)
    first, second = [(path, headers["Content-Type"], headers["X-Run"], body)
                     for path, headers, body in server.received]
    assert first == second


def test_a_loss_that_is_not_finite_is_sent_where_keras_says_that_there_is_no_server(theirs, server):
    with pytest.warns(UserWarning, match="Could not reach"):
        theirs(server.root, send_as_json=True).on_epoch_end(0, {"loss": float("nan")})
    RemoteMonitor(server.root, send_as_json=True).on_epoch_end(1, {"loss": float("nan")})
    assert [body for _, _, body in server.received] == ['{"epoch": 1, "loss": null}']


def test_an_error_of_the_server_is_reported_where_keras_is_silent(theirs, server):
    server.status = 404
    theirs(server.root).on_epoch_end(0, {"loss": 0.5})
    with pytest.warns(UserWarning, match="answered 404 Not Found"):
        RemoteMonitor(server.root).on_epoch_end(0, {"loss": 0.5})
