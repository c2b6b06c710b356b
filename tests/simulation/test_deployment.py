"""``fedssl engine=deployment``: rejections before submission; tests/deploy has real fleets."""

import contextlib
import shlex

import httpx
import pytest
from flwr.proto.control_pb2 import StreamLogsResponse
from flwr.proto.run_pb2 import RunStatus
from flwr.supercore.task_identity import TaskIdentity

from fedssl.config.load import compose, load_settings
from fedssl.config.saved_run import save_run
from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError, RunError
from simulation import deployment
from simulation.run import run
from tests.fedssl.fleet.conftest import keys  # noqa: F401 - a fixture
from tests.fedssl.fleet.test_certificates import self_signed
from tests.flower import free_port


def test_the_engine_sets_defaults_for_devices_which_overrides_replace():
    settings = compose(["engine=deployment"])
    assert settings.data.name == "folder"
    found = settings.aggregation
    assert (found.min_updates, found.max_retries, found.max_norm_ratio) == (2, 3, 10)
    settings = compose(["engine=deployment", "aggregation.min_updates=1", "dataset=cifar10", "engine.address=one:9000"])
    assert (settings.aggregation.min_updates, settings.data.name) == (1, "uoft-cs/cifar10")
    assert (settings.engine.address, settings.engine.root_certificates) == ("one:9000", None)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.address=here"], r"engine.address=here is not an address \(it has no port\); give HOST:PORT"),
        (["engine.address=fed.example.org:443"], "without TLS anybody in between could run code"),
        (["engine.root_certificates=/not/here"], r"engine.root_certificates=/not/here cannot be used \(.*No such file"),
        (["engine.root_certificates={file}"], "cannot be used .*; give the file ca.crt of deploy/keys.py"),
        (["method=nothing"], "method=nothing does not exist"),
    ],
)
def test_invalid_settings_are_rejected_before_submission(overrides, sentence, tmp_path):
    (tmp_path / "file").write_text("no certificate")
    with pytest.raises(InputError, match=sentence):
        run(["engine=deployment", *(override.format(file=tmp_path / "file") for override in overrides)])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["secure_aggregation=secagg_plus"], "reveals only the sum of updates; set .*aggregation.max_norm_ratio=null"),
        (
            ["secure_aggregation=secagg_plus", "aggregation.max_norm_ratio=null", "strategy=l_dawa"],
            "needs a strategy that adds up the clients, but strategy=l_dawa compares, selects or corrects them on",
        ),
        (
            ["secure_aggregation=secagg_plus", "aggregation.max_norm_ratio=null", "strategy=fedavg"],
            "secure_aggregation.max_weight=null but the weight of a device, its number of images, is masked; set secu",
        ),
        (["strategy=gossip"], "strategy=gossip is for simulations"),
        (["strategy=fednova", "strategy.weighting=uniform"], "scale the update of all; set aggregation.max_examples"),
        (["evaluate_personalized=true"], "evaluate_personalized and unseen_clients are for simulations"),
        (["method=supervised", "dataset.num_classes=10"], "Supervised needs labels, and edge clients share"),
        (["dataset=digits", "schedule=layer_wise", "rounds=4", "calibration=auxiliary"], "stay on the devices"),
        (["encoder=vit_tiny", "dataset.size=30"], "30"),
    ],
)
def test_conflicts_are_rejected_before_submission(overrides, sentence):
    """No SuperLink runs: a run that is not rejected would be reported as unreachable."""
    with pytest.raises(InputError, match=sentence):
        run(["engine=deployment", f"engine.address=127.0.0.1:{free_port()}", *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["secure_aggregation=secagg_plus", "strategy.weighting=uniform"],
        ["privacy=central", "strategy.weighting=uniform", "encoder.norm=group", "method.projector.batch_norm=false"],
        ["strategy=featarc", "dataset=cifar10", "dataset.path=/only/on/the/server"],
        ["strategy=fednova", "strategy.weighting=uniform", "aggregation.max_examples=1000"],
        ["calibration=auxiliary", "+dataset@calibration.dataset=folder", "calibration.dataset.path=/only/there"],
    ],
)
def test_valid_settings_for_devices_are_accepted(overrides, monkeypatch):
    monkeypatch.setattr(TaskIdentity, "_run_id", None)  # as in a new process
    overrides = ["engine=deployment", "strategy=fedavg", "aggregation.max_norm_ratio=null", *overrides]
    deployment.validate(load_settings(overrides))


def test_memory_and_disk_are_those_of_the_other_machine(monkeypatch):
    monkeypatch.setattr("server_app.update_memory.available_memory", lambda: 10)
    monkeypatch.setattr("server_app.update_memory.memory_budget", lambda: 10)
    monkeypatch.setattr("server_app.update_memory._usable_disk", lambda folder: 1 / 0)
    settings = compose(["engine=deployment", "strategy=krum", "num_clients=50", "dataset.size=16"])
    deployment.validate(settings)


@pytest.mark.parametrize("authority", ["ca.crt", "other.crt", "missing.crt"])
def test_a_signature_that_devices_refuse_is_a_warning(keys, tmp_path, monkeypatch, caplog, authority):  # noqa: F811
    monkeypatch.setattr(deployment, "control_api", lambda engine: 1 / 0)
    (tmp_path / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    (tmp_path / "other.crt").write_bytes(self_signed(-1, 1))
    certificate, key = str(keys / "server.crt"), str(keys / "server.key")
    files = {"signing_certificate": certificate, "signing_key": key, "root_certificates": str(tmp_path / authority)}
    with pytest.raises(ZeroDivisionError):
        deployment.run_deployment([], engine=EngineSettings(name="deployment", **files))
    assert (f"signed engine.signing_certificate={certificate}, and" in caplog.text) == (authority == "other.crt")


def test_an_environment_that_is_older_than_the_code_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nversion = "9.1"\nrequires-python = ">=3.11"\ndependencies = ["new-package>=3"]\n'
    )
    monkeypatch.setattr(deployment, "APP", tmp_path)
    message = r"^fedssl 9.1 needs new-package>=3 \(installed: none\); install them with uv pip install --editable"
    with pytest.raises(InputError, match=message):
        run(["engine=deployment", f"engine.address=127.0.0.1:{free_port()}"])


def test_an_unreachable_superlink_is_reported(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match=f"no SuperLink answers at engine.address={address} .*; start it, or set"):
        run(["engine=deployment", f"engine.address={address}"])
    proxy = f"http_proxy=http://127.0.0.1:{free_port()}"
    monkeypatch.setenv(*proxy.split("=", 1))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    sentence = rf"^engine.address={address} cannot be reached through the proxy {proxy} .*; run export NO_PROXY"
    with pytest.raises(InputError, match=sentence):
        run(["engine=deployment", f"engine.address={address}"])


@pytest.mark.parametrize("override", ["engine=deployment", "engine.root_certificates=/some/file"])
def test_a_run_folder_cannot_select_the_fleet_that_resumes_it(override, tmp_path):
    settings = compose(["engine=deployment", f"output_dir={tmp_path}"])
    save_run(settings.recording, tmp_path)
    (tmp_path / "overrides.yaml").write_text(f"- {override}\n")
    message = f"contains {override}, which points outside the run folder and is accepted only from your own"
    with pytest.raises(InputError, match=message):
        run([f"resume={tmp_path}"])


class Clock:
    """``time`` of a module, whose ``sleep`` takes no time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


BUSY = httpx.HTTPStatusError("503", request=httpx.Request("POST", "http://x"), response=httpx.Response(503))


@pytest.mark.parametrize(
    ("outage", "error", "follows"),
    [(100, httpx.ConnectError("refused"), True), (100, BUSY, True), (125, httpx.ConnectError("refused"), False)],
)
def test_the_superlink_may_restart_within_two_minutes(monkeypatch, capsys, outage, error, follows):
    """The run lasts an hour before the SuperLink is lost, while one stream of the log is open."""
    clock = Clock()
    monkeypatch.setattr(deployment, "time", clock)

    def stream_logs(control, run_id, *, after):
        if clock.now == 0:
            yield StreamLogsResponse(log_output="round 1\n", latest_timestamp=1.0)
            clock.now = 3600.0
        if clock.now < 3600 + outage:
            raise error
        yield StreamLogsResponse(log_output=f"after {after:g}\n", latest_timestamp=2.0)

    monkeypatch.setattr(deployment.control_internals, "stream_logs", stream_logs)
    done = RunStatus(status="finished", sub_status="completed")
    monkeypatch.setattr(deployment.control_internals, "run_status", lambda control, run_id: done)
    run = deployment._Run(None, 1, engine=EngineSettings(name="deployment", address="127.0.0.1:8000"))
    if follows:
        assert run.follow().sub_status == "completed"
        assert capsys.readouterr().out == "round 1\nafter 1\n"
    else:
        with pytest.raises(RunError, match="the SuperLink has not answered for 120 s .*; once it runs again, check"):
            run.follow()


@pytest.mark.parametrize(("seconds", "warnings"), [(50, 0), (300, 1)])
def test_a_run_that_does_not_start_is_explained(monkeypatch, capsys, seconds, warnings):
    """Its SuperLink may have lost the process that starts runs, and then waits forever without a line in the log."""
    clock = Clock()
    monkeypatch.setattr(deployment, "time", clock)

    def run_status(control, run_id):
        if clock.now < seconds:
            return RunStatus(status="pending")
        return RunStatus(status="finished", sub_status="completed")

    def stream_logs(control, run_id, *, after):
        assert clock.now >= seconds
        yield StreamLogsResponse(log_output="round 1\n", latest_timestamp=1.0)

    monkeypatch.setattr(deployment.control_internals, "run_status", run_status)
    monkeypatch.setattr(deployment.control_internals, "stream_logs", stream_logs)
    run = deployment._Run(None, 7, engine=EngineSettings(name="deployment", address="127.0.0.1:8000"))
    assert run.follow().sub_status == "completed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "round 1"
    assert len(lines) == 1 + warnings
    assert all(
        "has not started run 7 for 60 s: its process flower-superexec may have ended" in one for one in lines[:-1]
    )


def test_the_superlink_may_restart_twice_before_a_run_starts(monkeypatch, capsys):
    """Two outages of 90 s, more than two minutes together."""
    clock = Clock()
    monkeypatch.setattr(deployment, "time", clock)

    def run_status(control, run_id):
        if 10 <= clock.now < 100 or 150 <= clock.now < 240:
            raise httpx.ConnectError("refused")
        return RunStatus(status="pending") if clock.now < 300 else RunStatus(status="finished", sub_status="completed")

    monkeypatch.setattr(deployment.control_internals, "run_status", run_status)
    monkeypatch.setattr(deployment.control_internals, "stream_logs", lambda control, run_id, *, after: [])
    run = deployment._Run(None, 7, engine=EngineSettings(name="deployment", address="127.0.0.1:8000"))
    assert run.follow().sub_status == "completed"
    assert capsys.readouterr().out.count("has not started") == 1


@pytest.mark.parametrize("folder", [None, "/runs/one"])
def test_a_stopped_run_has_a_command_that_continues_it(folder, monkeypatch, tmp_path):
    """Each setting of the engine is submitted once, with absolute paths."""
    monkeypatch.chdir(tmp_path)
    words, started, stopped = ["engine=deployment", "engine.signing_key=own.key", "rounds=2"], [], []
    control = deployment.control_internals
    monkeypatch.setattr(control, "start_run", lambda control, app, *, overrides: started.append(overrides) or 1)
    monkeypatch.setattr(control, "stop_run", lambda control, run_id: stopped.append(run_id))
    monkeypatch.setattr(control, "run_status", lambda control, run_id: RunStatus(status="finished"))
    monkeypatch.setattr(deployment, "control_api", lambda engine: contextlib.nullcontext())

    def follow(run):
        run.folder = folder
        raise KeyboardInterrupt

    monkeypatch.setattr(deployment._Run, "follow", follow)
    with pytest.raises(KeyboardInterrupt) as stop:
        deployment.run_deployment(words, engine=compose(words).engine)
    own = f"engine.signing_key={tmp_path / 'own.key'}"
    assert stopped == [1]
    assert list(map(shlex.split, started)) == [[words[0], f"engine.signing_key='{tmp_path / 'own.key'}'", words[2]]]
    command = f"; continue with: fedssl engine=deployment engine.address=127.0.0.1:8000 {own} resume={folder}"
    assert str(stop.value) == (command if folder else "")


@pytest.mark.parametrize("every", ["0", "2", "null"])
def test_the_resuming_command_keeps_all_settings_of_the_engine(every, tmp_path):
    """Without the signing key every device would refuse the encoder of the resumed run."""
    files = {"root_certificates": "ca.crt", "signing_key": "server.key", "signing_certificate": "server.crt"}
    own = [f"engine.{name}={tmp_path / file}" for name, file in files.items()]
    engine = compose(["engine=deployment", *own, f"engine.deliver_every={every}"]).engine
    command, *words = deployment._Run(None, 1, engine=engine).resume_command.split()
    assert (command, words[0], words[-1]) == ("fedssl", "engine=deployment", "resume=FOLDER")
    assert compose(words[:-1]).engine == engine
