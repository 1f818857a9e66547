"""Reads event files back, without TensorBoard or TensorFlow."""

from __future__ import annotations

import io
import pathlib
import struct

import numpy as np
from PIL import Image

from trainer.callbacks.tensorboard import event_file


def read_events(log_dir):
    """Returns the run, the tag, the plugin, the step and the value of everything in the event files."""
    rows = []
    for path in sorted(pathlib.Path(log_dir).rglob("events.out.tfevents.*")):
        for event in events_of(path):
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                rows.append((path.parent.name, value.tag, plugin, event.step, read_tensor(value.tensor, plugin)))
    return rows


def events_of(path):
    """Yields the events of a file."""
    content = path.read_bytes()
    while content:
        length = struct.unpack_from("<Q", content)[0]  # length, its checksum, the event, its checksum
        yield event_file.Event.FromString(content[12:12 + length])
        content = content[16 + length:]


def read_tensor(tensor, plugin):
    if plugin == "images":
        width, height, *images = tensor.string_val
        return [int(width), int(height), [read_png(image).tolist() for image in images]]
    if plugin == "text":
        return tensor.string_val[0].decode()
    if plugin == "histograms":
        shape = [dim.size for dim in tensor.tensor_shape.dim]
        return np.frombuffer(tensor.tensor_content, "<f8").reshape(shape).tolist()
    assert plugin == "scalars"
    return tensor.float_val[0]


def read_png(data):
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def scalars(log_dir):
    """Returns the points (step, value) of each scalar by "run/tag"."""
    points = {}
    for run, tag, plugin, step, value in read_events(log_dir):
        if plugin == "scalars":
            points.setdefault(f"{run}/{tag}", []).append((step, value))
    return points
