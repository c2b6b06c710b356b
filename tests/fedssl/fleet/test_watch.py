"""The operator's view: alerts, the text and the metrics of a fleet."""

import argparse
import datetime
import json
import re
import urllib.error
import urllib.request

import pytest

from fedssl.errors import InputError
from fedssl.fleet import cli
from fedssl.fleet.watch import MetricsServer, Thresholds, as_metrics, as_text, find_alerts, make_view
from tests.flower import free_port

NOW = datetime.datetime(2026, 11, 25, 12, 0, tzinfo=datetime.UTC)
DEVICES = [
    {
        "name": "garden",
        "node": 5,
        "status": "online",
        "last contact": "2026-11-25T11:59:30+00:00",
        "images": 9,
        "rounds": 2,
    },
    {"name": "<b>roof</b>", "node": 6, "status": "offline", "last contact": "2026-11-25T02:00:00+00:00", "rounds": 1},
    {"name": "shed", "node": 7, "status": "registered", "last contact": None},
]
COLUMNS = ["name", "node", "status", "last contact", "images"]


@pytest.fixture
def run(tmp_path):
    """A run folder after two rounds."""
    lines = [{"round": number, "seconds": 1.0, "clients": 1, "bytes_up": 100, "bytes_down": 30} for number in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line | {"dropped": {}}) + "\n" for line in lines))
    return tmp_path


def view(run=None, **thresholds):
    return make_view(DEVICES, run, Thresholds(**thresholds), NOW)


@pytest.mark.parametrize(
    ("thresholds", "alerts"),
    [
        ({}, []),
        ({"min_devices": 1}, []),
        ({"min_devices": 2}, ["1 devices are online, fewer than 2"]),
        ({"max_hours": 11}, ["device shed has never connected"]),
        ({"max_hours": 9.9}, ["device <b>roof</b> was last online 10.0 hours ago", "device shed has never connected"]),
    ],
)
def test_alerts(thresholds, alerts):
    assert find_alerts(DEVICES, Thresholds(**thresholds), NOW) == alerts


def test_a_full_disk_is_an_alert():
    devices = [DEVICES[0] | {"free MB": 400}, DEVICES[1] | {"free MB": None}]
    found = find_alerts(devices, Thresholds(min_megabytes=500), NOW, free_disk=499)
    places = {"device garden had when it joined": 400, "the run folder has": 499}
    assert found == [f"{place} {mb} MB of free disk space, less than 500" for place, mb in places.items()]
    assert find_alerts(devices, Thresholds(min_megabytes=400), NOW, free_disk=400) == []


def test_training_late_and_rejected_devices_are_online():
    statuses = ("training", "late", "rejected", "offline", "registered")
    devices = [DEVICES[0] | {"status": status, "last error": ""} for status in statuses]
    assert find_alerts(devices, Thresholds(min_devices=4), NOW)[0] == "3 devices are online, fewer than 4"
    metrics = as_metrics(make_view(devices, None, Thresholds(), NOW)).splitlines()
    label = 'name="garden",node="5"'
    online = [line for line in metrics if line.startswith("fedssl_device_online{")]
    assert online == [f"fedssl_device_online{{{label}}} {value}" for value in (1, 1, 1, 0, 0)]
    training = [line[-1] for line in metrics if line.startswith("fedssl_device_training{")]
    assert training == ["1", "0", "0", "0", "0"]


def test_the_lines_of_a_metric_stand_together(run):
    """The text format requires it: parsers lose the types of metrics otherwise."""
    groups = as_metrics(view(run)).split("# HELP ")[1:]
    names = [group.split(" ", 1)[0] for group in groups]
    assert len({*names}) == len(names) == 9
    for name, group in zip(names, groups, strict=True):
        _, kind, *samples = group.splitlines()
        assert kind.startswith(f"# TYPE {name} ")
        assert samples
        assert all(re.split("[{ ]", sample)[0] == name for sample in samples)


def test_a_device_that_must_be_upgraded_is_an_alert():
    devices = [DEVICES[0] | {"status": status, "last error": "has flwr 1.40.0"} for status in ("rejected", "online")]
    assert find_alerts(devices, Thresholds(), NOW) == ["device garden does not take part: it has flwr 1.40.0"]


def test_text_has_progress_alerts_and_devices(run):
    lines = as_text(view(run, min_devices=3), COLUMNS).splitlines()
    assert lines[0] == "2026-11-25 12:00:00  round 2; 200 bytes received, 60 bytes sent"
    assert lines[1] == "ALERT: 1 devices are online, fewer than 3"
    assert lines[3].split() == ["garden", "5", "online", "2026-11-25T11:59:30+00:00", "9"]
    assert lines[5].split() == ["shed", "7", "registered", "-", "-"]


def test_metrics_are_served_on_loopback(run):
    server = MetricsServer(0)
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics")
        server.view = view(run, max_hours=9)
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/other")
        with pytest.raises(InputError, match=f"--port={server.server_port} cannot be used"):
            MetricsServer(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    assert metrics == as_metrics(server.view)
    assert 'fedssl_device_online{name="garden",node="5"} 1\n' in metrics
    assert 'fedssl_device_online{name="shed",node="7"} 0\n' in metrics
    assert 'fedssl_device_last_contact_seconds{name="garden",node="5"} 1795607970\n' in metrics
    assert 'fedssl_device_images{name="garden",node="5"} 9\n' in metrics
    assert "fedssl_round 2\n" in metrics
    assert 'fedssl_bytes_total{direction="up"} 200\n' in metrics
    assert "fedssl_alerts 2\n" in metrics
    for line in metrics.splitlines():
        if not line.startswith("#"):
            assert f"# TYPE {line.partition('{')[0].partition(' ')[0]} " in metrics


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--interval=nan", "--interval=nan is out of range; give a number from 0.1 to 86400"),
        ("--interval=-1", "--interval=-1.0 is out of range"),
        ("--interval=0", "--interval=0.0 is out of range"),
        ("--interval=1e300", "--interval=1e+300 is out of range"),
        ("--port=70000", "--port=70000 is out of range; give a number from 1 to 65535"),
        ("--port=-1", "--port=-1 is out of range"),
        ("--min-devices=-1", "--min-devices=-1 is out of range"),
        ("--max-hours=inf", "--max-hours=inf is out of range"),
        ("--min-disk=-5", "--min-disk=-5 is out of range"),
    ],
)
def test_impossible_options_are_refused(operator, option, sentence):
    status, text = operator("watch", option)
    assert (status, sentence in text) == (2, True), text


def test_a_superlink_that_does_not_answer_is_an_alert(tmp_path):
    options = argparse.Namespace(run=tmp_path, address=f"127.0.0.1:{free_port()}", certificates=None)
    (alert,) = cli._view(options, Thresholds(min_devices=1)).alerts
    assert alert.startswith("no SuperLink answers")


def test_counters_stay_while_the_superlink_does_not_answer(run, monkeypatch):
    """Prometheus counts again from a counter that has fallen to 0."""
    (run / "fleet.json").write_text('{"devices": {}}')
    (run / "devices.json").write_text("{}")
    (run / "clients.jsonl").write_text("")
    options = argparse.Namespace(run=run, address=f"127.0.0.1:{free_port()}", certificates=None)
    metrics = as_metrics(cli._view(options, Thresholds())).splitlines()
    assert {'fedssl_bytes_total{direction="up"} 200', "fedssl_round 2", "fedssl_superlink_up 0"} <= {*metrics}
    monkeypatch.setattr(cli, "_registered", lambda options: [{**DEVICES[0], "name": "Gewächshaus"}])
    metrics = as_metrics(cli._view(options, Thresholds())).splitlines()
    assert {'fedssl_device_online{name="Gewächshaus",node="5"} 1', "fedssl_superlink_up 1"} <= {*metrics}
    (run / "metrics.jsonl").write_text("damaged\n\n")
    unknown = cli._view(options, Thresholds())
    assert "metrics.jsonl" in unknown.alerts[0]
    assert not [line for line in as_metrics(unknown).splitlines() if line.startswith(("fedssl_bytes", "fedssl_round "))]
