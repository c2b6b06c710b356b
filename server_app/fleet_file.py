"""Files about the devices of a run: their ids, which a resumed run assigns again, and what ``fedssl-fleet`` shows."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedssl.atomic_files import write_text
from fedssl.config.saved_run import DEVICE_NUMBERS_FILE
from fedssl.runs.run import FLEET_FILE
from fedssl.safe_io import corrupt_file_error, read_yaml
from server_app.nodes import ClientDirectory


def read_device_ids(folder: Path) -> dict[str, int]:
    """Return the stored ids of edge clients by name. Empty in a new run or a simulation."""
    file = folder / DEVICE_NUMBERS_FILE
    client_ids = read_yaml(file, dict) or {}
    if not all(isinstance(name, str) and type(id) is int and id >= 0 for name, id in client_ids.items()):
        raise corrupt_file_error(file, "a name has no number")
    if len(set(client_ids.values())) < len(client_ids):
        raise corrupt_file_error(file, "two names have the same number")
    return client_ids


class FleetFile:
    """Writer of these files. They are written only if they change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._content: dict[str, Any] = {}
        self._written: dict[str, str] = {}  # content of the files by name

    def register(self, clients: ClientDirectory) -> None:
        if not clients.client_ids:
            return
        self._write_changed(DEVICE_NUMBERS_FILE, dict(clients.client_ids))
        self._content["devices"] = {
            info.name: {
                "node": node,
                "images": info.num_images,
                "free disk": info.free_disk,
                "versions": dict(info.versions),
            }
            for node, info in sorted(clients.info.items(), key=lambda pair: pair[0] not in clients.rejected)
        }  # of several nodes with a name, the last: one that is not rejected
        self._content["rejected"] = {str(node): reason for node, reason in clients.rejected.items()}
        self._write_changed(FLEET_FILE, self._content)

    def register_activity(self, training: Collection[int], late: Collection[int]) -> None:
        self._content |= {"training": sorted(training), "late": sorted(late)}
        self._write_changed(FLEET_FILE, self._content)

    def register_failure(self, round: int, dropped: Mapping[int, str]) -> None:
        """Store why clients were dropped from an attempt at a round that failed, of which metrics have no line."""
        if "devices" in self._content:
            failed = {str(client): {"round": round, "reason": reason} for client, reason in dropped.items()}
            self._content["failed"] = self._content.get("failed", {}) | failed
            self._write_changed(FLEET_FILE, self._content)

    def register_quality(self, quality: Mapping[str, float]) -> None:
        self._content["quality"] = dict(quality)
        self._write_changed(FLEET_FILE, self._content)

    def _write_changed(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        if text != self._written.get(name):
            write_text(self._folder / name, text)
            self._written[name] = text
