"""Messages on a socket: a kind, and a packed value whose arrays are sent as raw memory."""

from __future__ import annotations

import json
import socket
import struct

import numpy as np

from trainer.distribute.parameter_server.processes.wire import Packed

_LENGTH = struct.Struct("!I")


def send(connection: socket.socket, kind: str, packed: Packed) -> None:
    """Sends a message.

    Raises:
      OSError: if the peer is gone.
    """
    sizes = [len(packed.data), *(buffer.nbytes for buffer in packed.buffers)]
    header = json.dumps([kind, sizes]).encode()
    connection.sendall(b"".join([_LENGTH.pack(len(header)), header, packed.data]))
    for buffer in packed.buffers:
        connection.sendall(buffer.data)


def receive(connection: socket.socket) -> tuple[str, Packed]:
    """Returns the next message; its arrays may be written to.

    Raises:
      OSError: if the peer is gone.
      EOFError: if the peer has closed the connection.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size).tobytes())
    kind, (first, *sizes) = json.loads(_exactly(connection, length).tobytes())
    return kind, Packed(_exactly(connection, first).tobytes(), [_exactly(connection, size) for size in sizes])


def _exactly(connection: socket.socket, size: int) -> np.ndarray:
    received = np.empty(size, np.uint8)
    view = received.data
    done = 0
    while done < size:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError("The other end has closed the connection.")
        done += count
    return received
