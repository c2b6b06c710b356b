"""Registered devices as the Control API of a SuperLink lists them."""

import datetime
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from flwr.proto.node_pb2 import NodeInfo

from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError
from fedssl.fleet import control, control_internals
from tests.fedssl.fleet.conftest import serving

NODES = [
    NodeInfo(node_id=7, name="shed", status="offline", online_until=1_000_060.0, heartbeat_interval=30.0),
    NodeInfo(node_id=5, name="garden", status="registered"),
    NodeInfo(node_id=6, name="garden", status="unregistered", online_until=1_000_000.0),
    NodeInfo(node_id=9, status="online", online_until=2_000_060.0, heartbeat_interval=30.0),
]


@pytest.fixture
def superlink(monkeypatch):
    """A SuperLink with these nodes; no connection is opened before the first request."""
    monkeypatch.setattr(control_internals, "list_nodes", lambda control: NODES)
    return EngineSettings(name="deployment", address="127.0.0.1:1")


def test_devices_are_listed_by_name_without_those_that_were_removed(superlink):
    with control.control_api(superlink) as api:
        devices = control.registered_devices(api)
    found = [(row["name"], row["node"], row["status"]) for row in devices]
    assert found == [("", 9, "online"), ("garden", 5, "registered"), ("shed", 7, "offline")]
    # A node is online for two heartbeat intervals after its last heartbeat.
    expected = datetime.datetime.fromtimestamp(1_000_000, tz=datetime.UTC)
    assert datetime.datetime.fromisoformat(devices[2]["last contact"]) == expected
    assert devices[1]["last contact"] is None


def test_certificates_may_be_below_the_home_folder(superlink, tmp_path, monkeypatch):
    """The shell keeps ``~`` after ``=``, and so does Flower's ``config.toml``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = replace(superlink, root_certificates="~/ca.crt")
    with pytest.raises(InputError, match=str(tmp_path / "ca.crt")), control.control_api(engine):
        pass


class Website(BaseHTTPRequestHandler):
    """A page for every request, as of a network that requires a login, or of a SuperLink without its tables."""

    status = 200

    def do_POST(self):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *arguments):
        """Nothing is logged."""


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (200, "the Control API does not answer at --address="),
        (404, "(status 404); set --address to its port"),
        (500, "has failed (status 500); its log has the reason; if that is `no such table`, start"),
    ],
)
def test_the_page_of_another_program_is_no_answer(operator, monkeypatch, status, sentence):
    monkeypatch.setattr(Website, "status", status)
    http = HTTPServer(("127.0.0.1", 0), Website)
    with serving(http):
        result, text = operator("list", "--address", f"127.0.0.1:{http.server_address[1]}")
    assert (result, sentence in text) == (2, True), text


def test_names_belong_to_node_ids(superlink):
    assert control.registered_names(superlink) == {5: "garden", 7: "shed"}
