"""Undocumented names of Flower 1.41: its Control API, behind ``flwr run``, ``log``, ``list`` and ``stop``.

The command ``flwr run`` itself cannot be used, because it exits with 0 if a run fails.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from flwr.cli.build import build_fab_from_files
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    StreamLogsResponse,
    UnregisterNodeRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import RunStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedssl.digests import identity

__all__ = ["HEARTBEAT_PATIENCE", "ControlHttpClient", "NodeInfo", "RunStatus"]


def connect(address: str, *, root_certificates: bytes | None) -> ControlHttpClient:
    """Return a client of the Control API, without TLS if there are no certificates.

    `OSError` or `ValueError` if the certificates are invalid.
    """
    return ControlHttpClient.from_server_address(
        server_address=address,
        insecure=root_certificates is None,
        root_certificates=root_certificates,
        interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


def build_fab(app: Path) -> bytes:
    """Return the bundle of the app, as `flwr build` does.

    That command resolves the path of every file in the folder, of which a virtual environment has tens of thousands.
    """
    patterns = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["fab-include"]
    files = [file for pattern in patterns for file in app.glob(pattern.removeprefix("/"))]
    named = {file.relative_to(app).as_posix(): file for file in (app / "pyproject.toml", *files)}
    return build_fab_from_files(named)[0]


def start_run(control: ControlHttpClient, app: Path, *, overrides: str) -> int:
    """Submit the app with ``overrides`` in its run config, and return the id of the run."""
    fab = build_fab(app)
    request = StartRunRequest(
        fab=fab_to_proto(Fab(identity(fab), fab, {})),
        override_config=user_config_to_proto({"overrides": overrides}),
    )
    return int(control.StartRun(request).run_id)


def run_status(control: ControlHttpClient, run_id: int) -> RunStatus:
    """Return the status of a run."""
    status: RunStatus = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
    return status


def stop_run(control: ControlHttpClient, run_id: int) -> None:
    """Request the end of a run."""
    control.StopRun(StopRunRequest(run_id=run_id))


def stream_logs(control: ControlHttpClient, run_id: int, *, after: float) -> Iterator[StreamLogsResponse]:
    """Yield the log after a timestamp, with the timestamp of every part."""
    return control.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=after))


def list_nodes(control: ControlHttpClient) -> list[NodeInfo]:
    """Return all nodes whose keys are or were registered."""
    return list(control.ListNodes(ListNodesRequest()).nodes_info)


def register_node(control: ControlHttpClient, public_key: bytes, *, name: str) -> int:
    """Register the key of a node, in PEM format, under a name; return the id of the node, which stays the same."""
    return int(control.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name)).node_id)


def unregister_node(control: ControlHttpClient, node_id: int) -> None:
    """Remove a node. The SuperLink rejects all its further requests."""
    control.UnregisterNode(UnregisterNodeRequest(node_id=node_id))


def error_message(response: str) -> str | None:
    """Return the message in an error response of Flower; None if it contains none."""
    error = FlowerError.from_json(response)
    return error.message if error else None


def is_invalid_response(error: ValueError) -> bool:
    """Return whether an error is that of a response without a message of Flower."""
    return str(error).startswith("Invalid protobuf")
