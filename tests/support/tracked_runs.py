"""Runs of experiment trackers on this machine: loggers that need no server, and the records of their packages."""

from __future__ import annotations

import json
import pathlib
import struct

from tests.support.waiting import until
from trainer.callbacks import loggers

BLOCK_BYTES = 32768  # of wandb's files, which are logs as LevelDB writes them


def mlflow_logger(folder):
    return loggers.MLflow("digits", run_name="first", tracking_uri=f"sqlite:///{folder}/mlflow.db", tags={"a": "b"})


def mlflow_runs(folder):
    client = mlflow_logger(folder).client
    experiment = client.get_experiment_by_name("digits").experiment_id
    return [{"params": run.data.params, "status": run.info.status.lower(),
             "metrics": {name: [(metric.step, metric.value) for metric in client.get_metric_history(
                 run.info.run_id, name)] for name in run.data.metrics}}
            for run in client.search_runs([experiment])]


def wandb_logger(folder):
    return loggers.WandB("digits", mode="offline", dir=str(folder))


def wandb_runs(folder):
    # Another process writes the file, and may still do so when the run has ended.
    until(lambda: all(run["status"] for run in _wandb_runs(folder)))
    return _wandb_runs(folder)


def _wandb_runs(folder):
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        run = {"params": {}, "metrics": {}, "status": None}
        for data in leveldb_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("history"):
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for name in row.keys() - {"_step", "_runtime", "_timestamp"}:
                    run["metrics"].setdefault(name, []).append((row["_step"], row[name]))
            elif record.HasField("config"):
                run["params"] |= {item.key: json.loads(item.value_json) for item in record.config.update}
            elif record.HasField("exit"):
                run["status"] = "failed" if record.exit.exit_code else "finished"
        found.append(run)
    return found


def leveldb_records(path: pathlib.Path):
    """Yields the records of a log as LevelDB writes it, after wandb's seven bytes of header."""
    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


# By the name of the package: the logger, and the reader of the package's records.
TRACKERS = {"mlflow": (mlflow_logger, mlflow_runs), "wandb": (wandb_logger, wandb_runs)}
