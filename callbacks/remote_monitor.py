"""Sending the logs of every epoch to a server."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping

import numpy as np

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.callbacks.base.log_values import as_json
from trainer.core import arguments
from trainer.core.errors import wrong_type

TIMEOUT_SECS = 3.0


class RemoteMonitor(Callback):
    """Posts the index of each epoch, from 0, and its logs to a server, as a JSON object.

    If the server is unreachable, does not answer within three seconds or answers with an error, the callback warns and
    training continues. NaN and infinity, which JSON cannot represent, are sent as null. With several processes, the
    first process posts.

    Args:
      root: address of the server, with "http://" or "https://".
      path: path after `root` in the address.
      field: name of the form field that holds the JSON text.
      headers: additional HTTP headers.
      send_as_json: True to post the JSON itself, as "application/json", without a form.

    Raises:
      TypeError: for arguments of a wrong type.
      ValueError: if `root` is not such an address.

    Example:

    >>> monitor = RemoteMonitor("http://localhost:9000", headers={"Authorization": "Bearer token"})
    >>> monitor.root + monitor.path
    'http://localhost:9000/publish/epoch/end/'

    Source: Keras 3's callback of this name.
    """

    runs_on = "chief"

    def __init__(
        self,
        root: str = "http://localhost:9000",
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Mapping[str, str] | None = None,
        send_as_json: bool = False,
    ):
        arguments.require_text(root=root, path=path, field=field)
        arguments.require_bool(send_as_json=send_as_json)
        if headers is not None and not isinstance(headers, Mapping):
            raise wrong_type("headers", headers, "a dict of HTTP headers")
        # The standard library would also read local files.
        if not root.lower().startswith(("http://", "https://")):
            raise ValueError(f"`root` must begin with 'http://' or 'https://'. Received: {root!r}.")
        self.root = root
        self.path = path
        self.field = field
        self.headers = headers
        self.send_as_json = send_as_json

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        import http.client
        import urllib.error
        import urllib.parse
        import urllib.request  # takes as long to import as all other callbacks do together

        # An array of one value is that value.
        values = {name: np.ravel(value)[0] if getattr(value, "size", 0) == 1 else value
                  for name, value in (logs or {}).items()}
        text = json.dumps({"epoch": int(epoch), **as_json(values)})
        if self.send_as_json:
            body, kind = text, "application/json"
        else:
            body, kind = urllib.parse.urlencode({self.field: text}), "application/x-www-form-urlencoded"
        headers = {"Content-Type": kind, **(self.headers or {})}
        request = urllib.request.Request(self.root + self.path, body.encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECS):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            warnings.warn(f"RemoteMonitor root server at {self.root} answered {error.code} {error.reason}", UserWarning,
                          stacklevel=2)
        except (OSError, http.client.HTTPException):
            warnings.warn(f"Could not reach RemoteMonitor root server at {self.root}", UserWarning, stacklevel=2)
