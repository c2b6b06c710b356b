"""Engine ray: what is refused, shown and believed; nothing of a run stays behind, however it ended."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from fedssl.errors import InputError
from simulation.flower_run import (
    NOISE,
    RunFailed,
    check,
    failure,
    follow,
    make_environment,
    read_summary,
    run,
    run_config,
    run_status,
)
from simulation.processes import belonging, private_place

REPOSITORY = Path(__file__).resolve().parents[2]

PYPROJECT = """\
[project]
name = "tiny"
version = "0.1.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"
fab-include = ["tiny/*.py"]

[tool.flwr.app.components]
serverapp = "tiny.server:app"
clientapp = "tiny.client:app"

[tool.flwr.app.config]
overrides = ""
"""
SERVER = """\
import json, os, shlex, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    words = dict(word.split("=", 1) for word in shlex.split(context.run_config["overrides"]))
    folder, rounds = Path(words["output_dir"]), int(words["rounds"])
    if "error" in words:
        raise ValueError(words["error"])
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.01)
    for round in range(1, rounds + 1):
        content = RecordDict({"plan": ConfigRecord({"seconds": float(words.get("seconds", 0))})})
        replies = grid.send_and_receive([Message(content, node, "query") for node in nodes])
        facts = [dict(reply.content["facts"]) for reply in replies]
        print(f"round {round} of {rounds}")
    facts.append({"file": __file__, "directory": os.getcwd()})
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "reason": None, "rounds": rounds}))
"""
CLIENT = """\
import os, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    time.sleep(message.content["plan"]["seconds"])
    facts = {"file": __file__, "directory": os.getcwd(), "trim": os.environ["MALLOC_TRIM_THRESHOLD_"]}
    return Message(RecordDict({"facts": ConfigRecord(facts)}), reply_to=message)
"""


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    """A Flower app whose clients tell where they run."""
    folder = tmp_path / "app with space"
    (folder / "tiny").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "server": SERVER, "client": CLIENT}.items():
        (folder / "tiny" / f"{name}.py").write_text(text)
    return folder


def run_tiny(app_dir: Path, output_dir: Path, *words: str, expected: int = 2) -> None:
    words = (f"output_dir={output_dir}", "rounds=2", *words)
    run(app_dir, words, num_clients=2, rounds=expected, client_cpus=1, client_gpus=0, cpus=2, output_dir=output_dir)


def wait_until(condition, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# --- what is refused before anything starts ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"client_cpus": 5}, "engine.client_cpus=5 .* from 1 to the 4 CPUs"),
        ({"client_cpus": 0}, "engine.client_cpus=0 .* from 1"),
        ({"client_cpus": 1.5}, "engine.client_cpus=1.5 .* whole number"),
        ({"client_gpus": -0.5}, "engine.client_gpus=-0.5"),
        ({"client_gpus": 1.5}, "engine.client_gpus=1.5 .* whole number"),
        ({"client_gpus": 0.25}, "engine.client_gpus=0.25 but there are 0 GPUs; set engine.client_gpus=0"),
    ],
)
def test_impossible_resources_are_refused(app_dir, monkeypatch, settings, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=words):
        check(app_dir, **{"client_cpus": 1, "client_gpus": 0.0, "cpus": 4, **settings})


def test_gpu_shares_are_accepted_where_there_are_gpus(app_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for client_gpus in (0.25, 1, 2):
        check(app_dir, client_cpus=1, client_gpus=client_gpus, cpus=4)
    with pytest.raises(InputError, match="there are 2 GPUs"):
        check(app_dir, client_cpus=1, client_gpus=3, cpus=4)


def test_a_folder_without_an_app_is_refused(tmp_path):
    with pytest.raises(InputError, match="clone of the repository.*engine=local"):
        run_tiny(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- what goes in ---


def test_run_config_keeps_every_word():
    words = ["a=1", 'note=it\'s "quoted" \\ and spaced', "+x=[1,2]", "name=café 🌸", "empty="]
    assert shlex.split(tomllib.loads(run_config(words))["overrides"]) == words


def test_environment():
    base = {"PATH": "/bin", "NO_PROXY": "site", "RAY_ADDRESS": "10.0.0.1:6379", "RAY_TMPDIR": "/scratch", "KEEP": "1"}
    environment = make_environment(base, ray_directory=Path("/tmp/fssl-x"), allocator=False)
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"
    assert environment["NO_PROXY"] == "127.0.0.1,localhost,site"
    assert environment["RAY_TMPDIR"] == "/tmp/fssl-x"
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["KEEP"] == "1"
    assert "RAY_ADDRESS" not in environment
    assert not any(name.startswith("MALLOC_") for name in environment)
    environment = make_environment(base, ray_directory=Path("/tmp/fssl-x"), allocator=True)
    assert {name for name in environment if name.startswith("MALLOC_")} == {
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
    }


def test_the_import_path_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def path(base, **more):
        return make_environment(base, ray_directory=Path("/tmp/fssl-x"), allocator=False, **more).get("PYTHONPATH")

    assert path({}) is None
    assert not path({"PYTHONPATH": ""})
    # An empty entry is the current folder to Python.
    assert path({"PYTHONPATH": "src::/opt"}) == f"{tmp_path}/src:{tmp_path}:/opt"
    assert path({"PYTHONPATH": "src"}, import_from=Path()) == f"{tmp_path}/src:{tmp_path}"
    assert path({}, import_from=tmp_path) == str(tmp_path)


# --- what is shown and believed ---


@pytest.mark.parametrize(
    "line",
    [
        "round 1/3  loss 4.81  knn 61.3%",
        "WARNING :   GPU memory is low",
        "ERROR :     Simulation raised an exception",
        "(ClientAppActor pid=7) UserWarning: 3 pictures are unreadable",
        "Traceback (most recent call last):",
    ],
)
def test_lines_that_matter_are_shown(line):
    assert not NOISE.match(line)


@pytest.mark.parametrize(
    "line",
    [
        "INFO :      Starting Flower Simulation",
        "INFO :      ",
        "(ClientAppActor pid=7) INFO :      hello",
        "(ClientAppActor pid=7) WARNING :   Manually terminating ClientAppActor",
        "Successfully installed fedssl to /tmp/fssl-x/home/apps/fedssl.",
        "",
    ],
)
def test_what_flower_says_in_every_run_is_not_shown(line):
    assert NOISE.match(line)


@pytest.mark.parametrize(
    ("status", "summary", "reason"),
    [
        ("finished:completed", {"status": "finished", "reason": None, "rounds": 5}, None),
        ("finished:completed", {"status": "finished", "reason": None, "rounds": 4}, "only 4 of 5 rounds were run"),
        ("finished:completed", {"status": "failed", "reason": "no client answered", "rounds": 5}, "no client answered"),
        ("finished:failed", {"status": "failed", "reason": "no client answered", "rounds": 0}, "no client answered"),
        ("finished:completed", None, "the ServerApp ended without writing summary.json"),
        ("finished:failed", None, "Flower's status of the run is finished:failed: details"),
        (
            "finished:failed",
            {"status": "finished", "reason": None, "rounds": 5},
            "Flower's status of the run is finished:failed: details",
        ),
    ],
)
def test_a_run_counts_as_finished_only_if_all_agree(status, summary, reason):
    assert failure(status, "details", summary, rounds=5) == reason


def test_status_comes_from_the_only_run():
    listing = json.dumps({"success": True, "runs": [{"status": "finished:failed", "status-details": "broke"}]})
    assert run_status(listing) == ("finished:failed", "broke")
    for answer in ("", "no connection", '{"success": false}', '{"success": true, "runs": []}'):
        assert run_status(answer)[0] == "unknown"


def test_the_summary_of_an_earlier_run_does_not_count(tmp_path):
    path = tmp_path / "summary.json"
    assert read_summary(path, newer_than=0) is None
    path.write_text('{"status": "finished"}')
    stamp = path.stat().st_mtime_ns
    assert read_summary(path, newer_than=stamp) is None
    assert read_summary(path, newer_than=stamp - 1) == {"status": "finished"}


def follow_shell(script, tmp_path, *, verbose=False, pending_timeout=60.0):
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with (tmp_path / "log").open("w") as log:
        follow(process, log, verbose=verbose, pending_timeout=pending_timeout)


@pytest.mark.parametrize("verbose", [False, True])
def test_the_log_is_complete_and_what_is_printed_is_short(tmp_path, capsys, verbose):
    follow_shell(r"printf 'INFO :      hello\n\033[93mround 1\033[0m\n\nlast'", tmp_path, verbose=verbose)
    assert (tmp_path / "log").read_text() == "INFO :      hello\nround 1\n\nlast"
    assert capsys.readouterr().out == ("INFO :      hello\nround 1\n\nlast" if verbose else "round 1\nlast")


def test_what_the_command_line_refuses_is_the_reason(tmp_path):
    script = "echo Using SuperLink: private; printf '╭─ Error ─╮\n│ no such key │\n╰─────╯\n'; exit 1"
    with pytest.raises(RunFailed, match="^`flwr run`: no such key$"):
        follow_shell(script, tmp_path)


def test_a_run_that_stays_pending_is_given_up(tmp_path):
    with pytest.raises(RunFailed, match="still pending"):
        follow_shell("echo Successfully started run 7; exec sleep 1000", tmp_path, pending_timeout=0.5)
    follow_shell("echo Successfully started run 7; echo round 1; sleep 1", tmp_path, pending_timeout=0.5)


# --- nothing stays behind ---

# A daemon without the environment, a process that went elsewhere, and one that ignores SIGTERM.
STUBBORN = "trap '' TERM; env -i setsid sleep 1000 & (cd /; exec sleep 1000) & while :; do sleep 1; done"


def test_processes_of_a_place_end_with_it(tmp_path):
    with private_place() as place, (tmp_path / "out").open("w") as out:
        place.start(
            ["sh", "-c", STUBBORN], environment=os.environ, stdout=out
        )  # a daemon, and one that ignores SIGTERM
        other = subprocess.Popen(["sleep", "1000"])
        assert wait_until(lambda: len(belonging(place.path)) >= 4, seconds=10)
        assert os.getpid() not in belonging(place.path)
    assert belonging(place.path) == set()
    assert not place.path.exists()
    assert other.poll() is None  # a stranger is left alone
    other.kill()
    other.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_place_end_with_its_owner(number):
    script = (
        "import os, subprocess\n"
        "from simulation.processes import private_place\n"
        "with private_place() as place:\n"
        "    process = place.start(['sleep', '1000'], environment=os.environ, stdout=subprocess.DEVNULL)\n"
        "    print(place.path, flush=True)\n"
        "    process.wait()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    place = Path(owner.stdout.readline().strip())
    assert belonging(place)
    owner.send_signal(number)
    owner.communicate()
    assert wait_until(lambda: not belonging(place), seconds=10)
    assert wait_until(lambda: not place.exists(), seconds=10)


# --- whole runs ---


@pytest.mark.slow
def test_a_run_through_flower_and_ray(app_dir, tmp_path, capsys):
    folder = tmp_path / "run"
    run_tiny(app_dir, folder)
    output = capsys.readouterr().out
    assert "round 1 of 2\nround 2 of 2\n" in output
    assert "INFO" not in output
    assert "Starting Flower Simulation" in (folder / "flower.log").read_text()
    *clients, server = json.loads((folder / "facts.json").read_text())
    assert len(clients) == 2
    for facts in [*clients, server]:  # the code comes from the bundle, and the working directory is neutral
        assert "fssl-" in facts["directory"]
        assert facts["file"].startswith(str(Path(facts["directory"]).parent / "home"))
    assert clients[0]["trim"] == str(2**31 - 1)
    place = Path(server["directory"]).parent
    assert belonging(place) == set()
    assert not place.exists()


@pytest.mark.slow
def test_an_error_of_the_server_is_the_reason(app_dir, tmp_path):
    with pytest.raises(RunFailed, match="finished:failed.*the bread is burnt"):
        run_tiny(app_dir, tmp_path / "run", "error=the bread is burnt")


@pytest.mark.slow
def test_an_app_that_flower_refuses_is_the_reason(app_dir, tmp_path):
    (app_dir / "pyproject.toml").write_text(PYPROJECT.replace('overrides = ""', ""))
    with pytest.raises(RunFailed, match="`flwr run`: .*Invalid run configuration"):
        run_tiny(app_dir, tmp_path / "run")


@pytest.mark.slow
def test_interrupt_in_a_round_ends_everything(app_dir, tmp_path):
    folder = tmp_path / "run"
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.simulation.test_flower_run import run_tiny\n"
        "run_tiny(Path(sys.argv[1]), Path(sys.argv[2]), 'rounds=1000', 'seconds=1')\n"
    )
    command = [sys.executable, "-c", script, str(app_dir), str(folder)]
    owner = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.startswith("round 1 of 1000"):
            break
    log = (folder / "flower.log").read_text()
    place = Path(log.partition("Successfully installed tiny to ")[2].partition("/home/")[0])
    assert len(belonging(place)) >= 10  # SuperLink, SuperExec, simulation, five daemons of Ray, two clients
    owner.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in owner.communicate(timeout=20)[0]
    assert belonging(place) == set()
    assert not place.exists()
