"""`python -m trainer`: its commands, what they print, and their exit codes."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import pages
from trainer.tools.command_line import commands, doctor, installed, known_failures, machine, network

X, Y = np.ones((20, 4), np.float32), np.ones((20, 3), np.float32)
WHOLE = "All bytes have the checksums that were saved with them."


def flip_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one file or folder of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    model = trainer.Model(nn.Dense(3))
    model.compile("adam", "mse")
    backup = trainer.callbacks.BackupAndRestore(folder / "run", save_freq=1, delete_checkpoint=False)
    model.fit(X, Y, batch_size=5, epochs=2, verbose=0, callbacks=[backup])
    model.save_weights(folder / "weights.safetensors")
    model.save(folder / "state.safetensors")
    model.save(folder / "state")
    model.export(folder / "model.export")
    return folder


def inspected(capsys, path, code=0):
    assert commands.main(["inspect", str(path), "--json"]) == code
    return json.loads(capsys.readouterr().out)


KINDS = {  # what it is said to be, its step, and an array of it
    "weights.safetensors": ("weights", None, "kernel"),
    "state.safetensors": ("training state", 8, "state/params/kernel"),
    "state": ("training state", 8, "params/kernel"),
    "model.export": ("exported model", None, "params/kernel"),
    "run": ("checkpoint of a run", 8, "state/params/kernel"),
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", KINDS)
def test_what_was_saved_is_named_and_verified(saved, capsys, name):
    kind, step, array = KINDS[name]
    found = inspected(capsys, saved / name)
    assert found["kind"].startswith(kind) and found["step"] == step and found["whole"] is True
    rows = {row["name"]: row for row in found["arrays"]}
    assert rows[array] == {"name": array, "dtype": "float32", "shape": [4, 3], "nbytes": 48, "state": "verified"}
    assert {row["state"] for row in rows.values()} == {"verified"}
    assert found["nbytes"] == sum(row["nbytes"] for row in rows.values())
    assert commands.main(["inspect", str(saved / name)]) == 0
    text = capsys.readouterr().out
    assert WHOLE in text and array in text and "(4, 3)" in text


@pytest.mark.slow
def test_an_export_tells_what_it_takes_and_returns(saved, capsys):
    facts = inspected(capsys, saved / "model.export")["facts"]
    assert (facts["inputs"], facts["outputs"], facts["batch_size"]) == ("float32(rows, 4)", "float32(rows, 3)", "any")


def test_of_a_run_the_older_checkpoints_are_checked_too(saved, tmp_path, capsys):
    shutil.copytree(saved / "run", tmp_path / "run")
    assert inspected(capsys, tmp_path / "run")["facts"]["older checkpoints"] == "step_7 (verified)"
    flip_bit(tmp_path / "run" / "step_7" / "state" / "0.bytes", 0)
    found = inspected(capsys, tmp_path / "run", code=1)
    assert found["facts"]["older checkpoints"] == "step_7 (damaged)"
    assert "step_7' is damaged" in found["problems"][0]
    assert {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()} == {"step_7", "step_8"}


@pytest.mark.parametrize(("name", "file", "damaged"), [
    ("weights.safetensors", "weights.safetensors", 1), ("state.safetensors", "state.safetensors", 0),
    ("model.export", "model.export", 0), ("state", "state/state/0.bytes", 11)])
def test_a_flipped_bit_is_found(saved, tmp_path, capsys, name, file, damaged):
    copy = shutil.copytree if (saved / name).is_dir() else shutil.copy
    copy(saved / name, tmp_path / name)
    flip_bit(tmp_path / file, (tmp_path / file).stat().st_size - 1)
    found = inspected(capsys, tmp_path / name, code=1)
    assert found["whole"] is False and found["problems"]
    states = [row["state"] for row in found["arrays"]]
    assert states.count("damaged") == damaged
    assert "verified" not in states or name in ("weights.safetensors", "state")
    assert commands.main(["inspect", str(tmp_path / name)]) == 1
    assert "DAMAGED: " in capsys.readouterr().out


def test_a_missing_file_of_a_checkpoint_and_a_damaged_manifest_are_found(saved, tmp_path, capsys):
    shutil.copytree(saved / "state", tmp_path / "state")
    (tmp_path / "state" / "document.json").unlink()
    found = inspected(capsys, tmp_path / "state", code=1)
    assert "'document.json' is missing" in found["problems"][0] and found["arrays"] == []
    flip_bit(tmp_path / "state" / "manifest.json", 5)
    assert "'manifest.json' has other bytes" in inspected(capsys, tmp_path / "state", code=1)["problems"][0]


def test_damage_beside_the_state_of_a_checkpoint_leaves_its_arrays_verified(saved, tmp_path, capsys):
    shutil.copytree(saved / "state", tmp_path / "state")
    flip_bit(tmp_path / "state" / "arrays.safetensors", 20)
    found = inspected(capsys, tmp_path / "state", code=1)
    assert "arrays.safetensors' has other bytes" in found["problems"][0] and len(found["problems"]) == 1
    assert {row["state"] for row in found["arrays"]} == {"verified"} and found["step"] == 8


def test_arrays_without_checksums_are_said_to_be_unchecked(tmp_path, capsys):
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3, np.float16)}, tmp_path / "other.safetensors")
    found = inspected(capsys, tmp_path / "other.safetensors")
    assert found["kind"] == "arrays of another program" and found["arrays"][0]["state"] == "no checksum"
    commands.main(["inspect", str(tmp_path / "other.safetensors")])
    assert "No checksums were saved" in capsys.readouterr().out


@pytest.mark.parametrize(("make", "code", "words"), [
    (lambda path: None, 2, "There is no file"),
    (lambda path: path.write_text("no arrays"), 1, "is not a safetensors file: its first 8 bytes are not the length"),
    (lambda path: path.touch(), 1, "is not a safetensors file, or was cut short: it has 0 bytes"),
    (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(60)), 1, "an HDF5 file"),
    (lambda path: path.mkdir(), 1, "a folder without checkpoints"),
])
def test_what_is_something_else_is_named(tmp_path, capsys, make, code, words):
    make(tmp_path / "thing")
    assert commands.main(["inspect", str(tmp_path / "thing")]) == code
    assert words in capsys.readouterr().err


def test_an_onnx_file_is_left_to_its_own_tool(tmp_path, capsys):
    assert commands.main(["inspect", str(tmp_path / "model.onnx")]) == 2
    (tmp_path / "model.onnx").write_bytes(bytes(60))
    assert commands.main(["inspect", str(tmp_path / "model.onnx")]) == 1
    assert "Netron" in capsys.readouterr().err


# --- the command line itself ------------------------------------------------------------------------------------------


def python(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run([sys.executable, "-X", "importtime", "-m", *arguments], env={**environment, **variables},
                          capture_output=True, text=True, timeout=120, check=False)


def test_launch_runs_a_script_without_importing_jax(tmp_path):
    (tmp_path / "script.py").write_text("import os\nprint(os.environ['TF_CONFIG'][:10])")
    done = python("trainer", "launch", "--workers", "1", str(tmp_path / "script.py"))
    assert done.returncode == 0 and done.stdout == '[worker 0] {"cluster"\n'
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "trainer.launch.command" in imported and "jax" not in imported and "numpy" not in imported


def test_the_commands_are_listed_and_others_refused(capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in ("plan", "doctor", "explain", "inspect", "launch"))
    with pytest.raises(SystemExit, match="2"):
        commands.main(["diagnose"])
    with pytest.raises(SystemExit, match="2"):
        commands.main(["inspect", "x", "--jsn"])
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err


# --- doctor -----------------------------------------------------------------------------------------------------------


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_a_healthy_machine_is_said_to_be_well(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert commands.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("All is well.\n") and "cpu:7: cpu, computes" in text and "trains alone" in text
    assert commands.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert {finding["section"] for finding in report["findings"]} == {
        "versions", "devices", "memory", "cluster", "compile cache", "optional packages"}
    assert {finding["status"] for finding in report["findings"]} <= {"ok", "note"}


def test_a_wrong_tf_config_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
    assert commands.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM  description: TF_CONFIG has a cluster without 'chief' and 'worker'" in text
    assert text.endswith("1 problem.\n")


def test_a_check_that_fails_is_a_problem_and_the_others_are_made(monkeypatch):
    def fails():
        raise ImportError("No module named 'jax'")

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(machine, "memory", fails)
    found = list(doctor.examine(1.0))
    problems = [finding for finding in found if finding.status == "problem"]
    assert problems == [("memory", "check", "problem", "cannot be made: ImportError: No module named 'jax'")]
    assert found[-1].section == "optional packages"


def described(monkeypatch, addresses, index=0):
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_addresses_that_are_free_listened_on_and_not_yet_are_told_apart(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        listening, closed = there.getsockname()[1], gone.getsockname()[1]
        gone.close()
        described(monkeypatch, ["127.0.0.2:1", f"127.0.0.1:{listening}"], index=1)
        found = by_name(network.cluster(1.0))
        mine = found[f"worker 1 (127.0.0.1:{listening})"]
        assert mine.status == "warning" and f"port {listening} is in use" in mine.text
        described(monkeypatch, [f"127.0.0.1:{closed}", f"127.0.0.1:{listening}"])
        found = by_name(network.cluster(1.0))
        assert found[f"worker 0 (127.0.0.1:{closed})"].text == f"this process: port {closed} is free"
        assert found[f"worker 1 (127.0.0.1:{listening})"].text == f"answers, and listens on port {listening}"
    described(monkeypatch, [f"127.0.0.1:{closed}", f"127.0.0.1:{listening}"], index=1)
    other = by_name(network.cluster(1.0))[f"worker 0 (127.0.0.1:{closed})"]
    assert other.status == "ok" and "nothing listens on port" in other.text


def test_hosts_that_do_not_resolve_and_addresses_of_other_machines_are_problems(monkeypatch):
    described(monkeypatch, ["192.0.2.1:2222", "nowhere.invalid:2222"])
    found = by_name(network.cluster(0.1))
    mine, other = found["worker 0 (192.0.2.1:2222)"], found["worker 1 (nowhere.invalid:2222)"]
    assert mine.status == other.status == "problem"
    assert "192.0.2.1 is no address of this machine" in mine.text and "does not resolve" in other.text


def test_slurm_is_read_and_its_unknown_addresses_are_counted(monkeypatch):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "3",
                        "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    found = by_name(network.cluster(1.0))
    assert "3 processes; this is task 1" in found["description"].text and "SLURM" in found["description"].text
    assert found["addresses"].text.startswith("2 are not known")


METADATA = {  # requirements of each distribution, and the installed versions
    "trainer-jax": ["jax>=0.10", "rich>=14", 'jax[cuda12]>=0.10; extra == "cuda12"', 'ray>=2.50; extra == "ray"',
                    'pytest; extra == "dev"', 'oldthing; python_version < "3"'],
    "jax": ["jaxlib (<=0.10.2,>=0.10.2)", 'jax-cuda12-plugin==0.10.2; extra == "cuda12"'],
}


@pytest.mark.parametrize(("versions", "name", "status", "words"), [
    ({"jaxlib": "0.10.2"}, "jaxlib", "ok", "0.10.2"),
    ({"jaxlib": "0.10.1"}, "jaxlib", "problem", "0.10.1. jax needs jaxlib<=0.10.2,>=0.10.2: pip install"),
    ({"jax": "0.9.2"}, "jax", "problem", "trainer-jax needs jax>=0.10"),
    ({"rich": None}, "rich", "problem", "not installed. trainer-jax needs rich>=14"),
    ({"jax-cuda12-plugin": "0.10.1"}, "jax-cuda12-plugin", "problem", "but jaxlib is 0.10.2"),
    ({"jax-cuda12-plugin": "0.10.2"}, "cuda12", "ok", "jax-cuda12-plugin 0.10.2"),
    ({}, "cuda12", "note", "not installed: jax-cuda12-plugin (pip install 'trainer-jax[cuda12]')"),
    ({"ray": "2.40"}, "ray", "warning", "ray is 2.40, and >=2.50 is needed"),
])
def test_versions_that_do_not_go_together_are_found(monkeypatch, versions, name, status, words):
    there = {"trainer-jax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "rich": "14.0", **versions}
    monkeypatch.setattr(installed, "_version", there.get)
    monkeypatch.setattr(installed.metadata, "requires", lambda name: METADATA.get(name, []))
    found = by_name([*installed.versions(), *installed.extras()])
    assert found[name].status == status and words in found[name].text
    assert not {"oldthing", "dev"} & found.keys()


OF_EXTRAS = {
    "trainer-jax": ['cli[signatures, all_names]>=4; extra == "cli"'],
    "cli": ['cli[typing-extensions]; extra == "signatures"', 'parser>=2; extra == "all-names"',
            'cli[signatures]; extra == "all-names"', 'other; extra == "more"',
            'typing-extensions; extra == "typing-extensions" and python_version < "3"'],
}


@pytest.mark.parametrize(("versions", "status", "text"), [
    ({"cli": "4.5", "parser": "2.1"}, "ok", "cli 4.5, parser 2.1"),
    ({"cli": "3.9", "parser": "2.1"}, "warning", "cli 3.9, parser 2.1; cli is 3.9, and >=4 is needed"),
    ({"cli": "4.5"}, "note", "cli 4.5; not installed: parser (pip install 'trainer-jax[cli]')"),
    ({"parser": "2.1"}, "note", "parser 2.1; not installed: cli (pip install 'trainer-jax[cli]')"),
])
def test_extras_of_requirements_are_followed(monkeypatch, versions, status, text):
    monkeypatch.setattr(installed, "_version", versions.get)
    monkeypatch.setattr(installed.metadata, "requires", lambda name: OF_EXTRAS.get(name, []))
    found = by_name(installed.extras())["cli"]
    assert (found.status, found.text) == (status, text)


@pytest.mark.parametrize(("versions", "name", "status", "words"), [
    ({"jax": "0.12.0.1", "jax2onnx": "0.13.0"}, "jax2onnx with jax", "warning",
     "jax2onnx 0.13.0 fails with jax 0.12.0.1: `export(format=\"onnx\")` raises ValueError. "
     "pip install 'jax2onnx>=0.17' 'jax<0.12'"),
    ({"jax": "0.11.2", "jax2onnx": "0.16.1"}, "jax2onnx with jax", "warning", "pip install 'jax2onnx>=0.17'"),
    ({"jax": "0.11.2", "jax2onnx": "0.17.0"}, "jax2onnx with jax", None, ""),
    ({"jax": "0.10.2", "jax2onnx": "0.13.0"}, "jax2onnx with jax", None, ""),
    ({"jax": "0.12.0"}, "jax2onnx with jax", None, ""),
    ({"jax": "0.11.2", "tensorflow": "2.21.0"}, "tensorflow with jax", "warning", "pip install 'jax<0.11.2'"),
    ({"jax": "0.11.1", "tensorflow": "2.21.0"}, "tensorflow with jax", None, ""),
    ({"jax": "0.12.0", "flax": "0.12.9"}, "flax with jax", "problem", "`import flax` raises AttributeError"),
    ({"jax": "0.12.0", "flax": "0.12.10"}, "flax with jax", None, ""),
    ({"jax": "0.10.2", "flax": "0.12.8"}, "flax with jax", None, ""),
    ({"jax": "0.10.0", "flax": "0.12.0"}, "flax with jax", "problem", "pip install 'flax>=0.12.1'"),
])
def test_versions_that_are_known_to_fail_together_are_named(monkeypatch, versions, name, status, words):
    monkeypatch.setattr(installed, "_version", versions.get)
    monkeypatch.setattr(installed.metadata, "requires", lambda name: [])
    found = by_name(installed.versions()).get(name)
    assert (None if found is None else found.status) == status and (found is None or words in found.text)


def test_no_version_of_a_requirement_is_known_to_fail_with_the_oldest_jax():
    project = tomllib.loads(pages.read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["onnx"]]
    least = {line.partition(">=")[0]: line.partition(">=")[2] for line in wanted if ">=" in line}
    failing = [each for each in known_failures.KNOWN_FAILURES if each.package in least
               and installed._is_in(least[each.package], each.versions)
               and installed._is_in(least[each.beside], each.other_versions)]
    assert failing == [], "raise the bound in pyproject.toml"


def test_what_an_extra_forbids_is_a_note_until_the_extra_is_installed(monkeypatch):
    monkeypatch.setattr(installed.metadata, "requires", lambda name: (
        ['jax2onnx>=0.12.5; extra == "onnx"', 'jax<0.12; extra == "onnx"'] if name == "trainer-jax" else []))
    for version, status in ((None, "note"), ("0.17.1", "warning")):
        monkeypatch.setattr(installed, "_version", {"jax": "0.12.0", "jax2onnx": version}.get)
        found = by_name(installed.extras())["onnx"]
        assert found.status == status and "jax is 0.12.0, and <0.12 is needed" in found.text


def test_gpus_that_jax_does_not_use_are_found(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert by_name(machine.devices())["GPUs"].status == "note"
    monkeypatch.delenv("JAX_PLATFORMS")
    found = by_name(machine.devices())["GPUs"]
    assert found.status == "problem" and "pip install 'trainer-jax[cuda12]'" in found.text


def test_the_state_of_the_folder_of_programs_is_told(monkeypatch, tmp_path):
    import jax

    def only():
        return next(machine.compile_cache())

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
        assert only().status == "note" and "made when it is first used" in only().text
        (tmp_path / "cache").mkdir(mode=0o700)
        (tmp_path / "cache" / "program").write_bytes(bytes(2048))
        assert only().status == "ok" and "1 files, 2.0 KiB" in only().text
        (tmp_path / "cache").chmod(0o777)
        assert only().status == "warning" and "chmod 700" in only().text
        monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
        assert only().status == "problem" and "cannot be written to" in only().text
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
        assert only().status == "note"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
