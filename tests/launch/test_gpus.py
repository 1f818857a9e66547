"""The launcher divides the GPUs of the machine among the workers, and says how much of their memory each takes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from trainer import launch
from trainer.launch import command, gpus

SHOW = """
import json, os
names = ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION",
         "XLA_PYTHON_CLIENT_PREALLOCATE")
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with open(f"seen_{index}", "w") as file:
    json.dump({name: os.environ[name] for name in names if name in os.environ}, file)
"""
FOUR = "".join(f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index}{index})\\n" for index in range(4))
INSTANCES = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-00)
  MIG 3g.20gb     Device  0: (UUID: MIG-aa)
  MIG 3g.20gb     Device  1: (UUID: MIG-bb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-11)
""".replace("\n", "\\n")


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Returns a function that makes this a machine whose nvidia-smi writes a text; without a call, there is none."""
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION",
                 "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(gpus, "_DRIVER_FOLDERS", str(tmp_path / "driver" / "*"))

    def with_program(text, code=0):
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text(f'#!/bin/sh\nprintf "{text}"\n[ "$1" = -L ] && exit {code}\n')
        program.chmod(0o755)

    return with_program


def seen(*arguments, workers=2, **environment):
    """Returns the environment of each worker of a job, as they see it."""
    assert command.run(["-c", SHOW], workers, *arguments, env=environment) == 0
    return [json.loads(pathlib.Path(f"seen_{index}").read_text()) for index in range(workers)]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("workers", "per_worker", "expected"), [
    (2, None, ["0,1", "2,3"]), (4, None, ["0", "1", "2", "3"]), (3, None, ["0", "1", "2"]), (2, 1, ["0", "1"]),
    (1, 3, ["0,1,2"])])
def test_each_worker_sees_gpus_that_no_other_sees(workers, per_worker, expected, machine, capfd):
    machine(FOUR)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen(per_worker, workers=workers)] == expected
    note = "[launcher] 1 of 4 GPUs stay unused, as each of 3 workers gets as many.\n"
    assert capfd.readouterr().err == (note if workers == 3 else "")


@pytest.mark.parametrize(("visible", "expected"), [
    ("3,1", ["3", "1"]), (" GPU-22 , GPU-00", ["GPU-22", "GPU-00"]), ("MIG-aa,MIG-bb", ["MIG-aa", "MIG-bb"]),
    ("2,0,-1,1", ["2", "0"])])
def test_only_gpus_that_the_environment_shows_are_divided(visible, expected, machine):
    machine(FOUR)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen(CUDA_VISIBLE_DEVICES=visible)] == expected


def test_a_gpu_with_instances_is_divided_by_them(machine):
    machine(INSTANCES)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen()] == ["MIG-aa", "MIG-bb"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("environment", [
    {"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}], ids=str)
def test_workers_on_cpus_get_simulated_devices_and_no_part_of_the_gpus(environment, machine):
    machine(FOUR)
    visible = {name: value for name, value in environment.items() if name == "CUDA_VISIBLE_DEVICES"}
    assert seen(workers=8, **environment) == [visible] * 8
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    assert seen(3, **environment) == [{**visible, **flags}] * 2


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("platforms", ["cuda", "cuda,cpu", "gpu"])
def test_platforms_with_gpus_are_divided(platforms, machine):
    machine(FOUR)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen(JAX_PLATFORMS=platforms)] == ["0,1", "2,3"]


def test_without_gpus_nothing_changes(machine, capfd):
    assert seen(workers=3) == [{}] * 3
    assert capfd.readouterr().err == ""
    machine("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\\n", code=9)
    assert seen(workers=3) == [{}] * 3
    assert capfd.readouterr().err == (
        "[launcher] `nvidia-smi -L` fails (NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
        "driver). Workers get the GPUs that the driver lists in /proc, if any.\n")


def test_one_worker_keeps_the_environment(machine):
    machine(FOUR)
    assert seen(workers=1) == [{}]


def test_without_nvidia_smi_the_driver_tells_how_many_there_are():
    for name in ("0000:01:00.0", "0000:02:00.0"):
        pathlib.Path("driver", name).mkdir(parents=True)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen()] == ["0", "1"]


@pytest.mark.parametrize(("options", "says"), [
    (["--workers", "5"], "There are 4 GPUs (0, 1, 2, 3) for 5 workers. A GPU serves one worker: ask for at most 4 "
                         "workers, or set JAX_PLATFORMS=cpu"),
    (["--workers", "2", "--devices-per-worker", "3"], "for 2 workers with 3 devices each. A GPU serves one worker: ask "
                                                      "for at most 1 workers"),
    (["--workers", "1", "--memory-fraction", "1.5"], "`memory_fraction` must be from 0 to 1. Received: 1.5."),
])
def test_more_than_there_is_is_refused(options, says, machine, capsys):
    machine(FOUR)
    pathlib.Path("worker.py").write_text(SHOW)
    with pytest.raises(SystemExit) as exit:
        launch.main([*options, "worker.py"])
    assert exit.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(pathlib.Path().glob("seen_*"))


@pytest.mark.parametrize(("fraction", "expected"), [
    ("0.4", {"XLA_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}),
    ("0", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}),
    (None, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"})])
def test_how_much_memory_each_takes_can_be_set(fraction, expected, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    pathlib.Path("worker.py").write_text(SHOW)
    options = [] if fraction is None else ["--memory-fraction", fraction]
    assert launch.main(["--workers", "1", *options, "worker.py"]) == 0
    assert json.loads(pathlib.Path("seen_0").read_text()) == expected


@pytest.mark.slow
def test_jax_reads_the_settings_of_memory():
    source = """
import json
from jaxlib import xla_client
print(json.dumps(xla_client.generate_pjrt_gpu_plugin_options()))
"""
    read = [json.loads(subprocess.run([sys.executable, "-c", source], capture_output=True, check=True, env={
        **os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", **gpus.memory_settings(fraction)}).stdout)
        for fraction in (0.4, 0)]
    assert read[0]["memory_fraction"] == 0.4 and read[1]["preallocate"] is False
