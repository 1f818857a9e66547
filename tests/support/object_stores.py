"""A server of S3's protocol on this machine, and processes that save to it and are killed."""

import contextlib
import os
import random
import subprocess
import sys

BUCKET = "bucket"
_SERVE = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # ends with the process that started it
"""
_SAVE = """
import sys
import jax.numpy as jnp
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter

place = sys.argv[1]
folder = CheckpointFolder(place + "/run", keep=2)
folder.acquire()
first = max(folder.steps(), default=0) + 1
with CheckpointWriter() as writer:
    for step in range(first, first + 1000):
        arrays = {str(index): jnp.full((500, 100), step * 10 + index) for index in range(8)}
        writer.save(folder.path_of(step), arrays, {"step": step}, on_saved=folder.prune)
        writer.wait()
        print("run", step, flush=True)
        writer.save(place + "/state", arrays, {"step": step}, replace=True)
        writer.wait()
        print("state", step, flush=True)
"""


@contextlib.contextmanager
def s3_server():
    """Yields the environment variables by which s3fs finds a new server with an empty bucket."""
    with subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as process:
        try:
            port = next(line.split()[1] for line in process.stdout if line.startswith("port "))
            variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test",
                         "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
            import boto3

            boto3.client("s3", endpoint_url=variables["AWS_ENDPOINT_URL"], aws_access_key_id="test",
                         aws_secret_access_key="test", region_name="us-east-1").create_bucket(Bucket=BUCKET)
            yield variables
        finally:
            process.kill()


def kill_during_saves(place, kills, seed=0, longest_secs=1.0):
    """Starts processes that save to a place, and kills each at a random time; yields what each had saved last.

    Yields:
      The step of the last save of a run and of a state, which is replaced, that had returned; 0 before the first.
    """
    moment = random.Random(seed)
    saved = {"run": 0, "state": 0}
    for _ in range(kills):
        with subprocess.Popen([sys.executable, "-c", _SAVE, place], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "JAX_PLATFORMS": "cpu"}) as process:
            first = process.stdout.readline()
            if not first:
                raise RuntimeError(f"a process has saved nothing, and ended with {process.wait()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment.uniform(0, longest_secs))
            process.kill()
            for line in [first, *process.stdout]:
                if line.endswith("\n"):
                    name, step = line.split()
                    saved[name] = int(step)
        yield dict(saved)


def main(kills):
    """Kills processes during saves to a server, and checks after each what is there."""
    from trainer.engine.saving.checkpoint import CheckpointFolder

    with s3_server() as variables:
        os.environ.update(variables)
        place = f"s3://{BUCKET}/kills"
        torn = 0
        for number, saved in enumerate(kill_during_saves(place, kills), 1):
            torn += len(leftovers(place))
            found = check(place, saved)
            print(f"kill {number}: saved {saved}, found {found}", flush=True)
        CheckpointFolder(f"{place}/run").acquire()
        print(f"{kills} kills: no checkpoint torn or lost; {torn} saves were cut, of which "
              f"{len(leftovers(f'{place}/run'))} are left after the next start.")


def check(place, saved):
    """Reads the newest checkpoint of the run, and the state; raises if one is torn, or older than was saved."""
    from trainer.engine.saving.checkpoint import CheckpointFolder, open_checkpoint

    found = {}
    for name, path in (("run", CheckpointFolder(f"{place}/run").newest_whole()), ("state", f"{place}/state")):
        checkpoint = open_checkpoint(path)
        step = found[name] = checkpoint.document["step"]
        assert saved[name] <= step <= max(saved.values()) + 1, (name, saved, step)
        for index, array in checkpoint.restore(checkpoint.targets_here()).items():
            assert (array == step * 10 + int(index)).all(), (name, step, index)
    return found


def leftovers(place):
    """Returns the folders of files that no manifest names."""
    from trainer.core.files import storage
    from trainer.engine.saving.checkpoint import data_folder

    found = []
    for path in storage.sizes(place):
        folder, _, _ = path.partition("/data.")
        data = f"{place}/{path}"[:len(f"{place}/{folder}/data.") + 12]
        if "/data." in path and data != data_folder(f"{place}/{folder}"):
            found.append(data)
    return sorted(set(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
