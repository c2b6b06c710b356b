"""A view of a fleet for its operator: on the terminal, and as metrics for Prometheus."""

import datetime
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedssl.errors import InputError, sanitize
from fedssl.fleet.checks import free_space
from fedssl.runs.jsonl import read_jsonl
from fedssl.text_table import align

Row = Mapping[str, Any]  # of a device, as in `fedssl-fleet list --json`

_METRICS = {  # description and type
    "device_online": ("Whether the device is connected.", "gauge"),
    "device_training": ("Whether the device trains in a round.", "gauge"),
    "device_last_contact_seconds": ("Unix time of the last heartbeat.", "gauge"),
    "device_images": ("Images that the device reported.", "gauge"),
    "device_rounds_total": ("Rounds in which an update of the device was used.", "counter"),
    "round": ("Last round of the run.", "gauge"),
    "bytes_total": ("Bytes of messages of the run, by direction.", "counter"),
    "alerts": ("Number of active alerts.", "gauge"),
    "superlink_up": ("Whether the SuperLink answers; without it, devices are unknown.", "gauge"),
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When an alert is active; None disables it."""

    min_devices: int | None = None  # online
    max_hours: float | None = None  # without contact
    min_megabytes: int | None = None  # of free disk space


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """The state of a fleet at one time."""

    time: datetime.datetime
    devices: Sequence[Row]
    alerts: Sequence[str]
    round: int | None = 0  # None if the run folder cannot be read
    bytes: Mapping[str, int] = field(default_factory=dict)
    has_answered: bool = True  # the SuperLink


def make_view(devices: Sequence[Row], run: Path | None, thresholds: Thresholds, now: datetime.datetime) -> FleetView:
    """Return the view of devices and of the run folder that they train for."""
    lines = [] if run is None else read_jsonl(run / "metrics.jsonl", required=["bytes_up", "bytes_down"])
    sent = {direction: sum(line[f"bytes_{direction}"] for line in lines) for direction in ("up", "down")}
    return FleetView(
        time=now,
        devices=devices,
        alerts=find_alerts(devices, thresholds, now, free_disk=None if run is None else free_space(run) // 10**6),
        round=max((line["round"] for line in lines), default=0),
        bytes=sent,
    )


def is_online(device: Row) -> bool:
    """Return whether a device is connected; it may be training, late or rejected."""
    return device["status"] not in ("registered", "offline")


def find_alerts(
    devices: Sequence[Row], thresholds: Thresholds, now: datetime.datetime, *, free_disk: int | None = None
) -> list[str]:
    """Return a sentence for every active alert. ``free_disk`` is that of the run folder, in MB."""
    alerts = []
    online = sum(map(is_online, devices))
    if thresholds.min_devices is not None and online < thresholds.min_devices:
        alerts.append(f"{online} devices are online, fewer than {thresholds.min_devices}")
    alerts += [
        f"device {device['name'] or device['node']} does not take part: it {device['last error']}"
        for device in devices
        if device["status"] == "rejected"
    ]
    if thresholds.max_hours is not None:
        for device in devices:
            contact = device["last contact"]
            hours = None if contact is None else (now - datetime.datetime.fromisoformat(contact)).total_seconds() / 3600
            if hours is None or hours > thresholds.max_hours:
                since = "has never connected" if hours is None else f"was last online {hours:.1f} hours ago"
                alerts.append(f"device {device['name'] or device['node']} {since}")
    if thresholds.min_megabytes is not None:
        disks = {f"device {device['name']} had when it joined": device.get("free MB") for device in devices}
        disks["the run folder has"] = free_disk
        for name, free in disks.items():
            if free is not None and free < thresholds.min_megabytes:
                alerts.append(f"{name} {free} MB of free disk space, less than {thresholds.min_megabytes}")
    return alerts


def as_text(view: FleetView, columns: Sequence[str]) -> str:
    """Return the view as lines for a terminal."""
    progress = "no round yet"
    if view.round:
        progress = f"round {view.round}; {view.bytes['up']:,} bytes received, {view.bytes['down']:,} bytes sent"
    lines = [f"{view.time:%Y-%m-%d %H:%M:%S}  {progress}", *(f"ALERT: {alert}" for alert in view.alerts)]
    return sanitize("\n".join([*lines, as_table(view.devices, columns)]), lines=True)


def as_table(devices: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the table of devices."""
    rows = [[as_cell(device.get(column)) for column in columns] for device in devices]
    return align([columns, *rows], left=len(columns))


def as_cell(value: Any) -> str:
    """Return the text of a value in a table."""
    return "-" if value in (None, "") else str(value)


def as_metrics(view: FleetView) -> str:
    """Return the view in the text format of Prometheus."""
    samples: dict[str, list[str]] = {name: [] for name in _METRICS}  # by metric: its lines stand together
    for device in view.devices:
        contact = device["last contact"]
        values = {
            "online": int(is_online(device)),
            "training": int(device["status"] == "training"),
            "last_contact_seconds": contact and f"{datetime.datetime.fromisoformat(contact).timestamp():.0f}",
            "images": device.get("images"),
            "rounds_total": device.get("rounds"),
        }
        labels = f'{{name={json.dumps(device["name"], ensure_ascii=False)},node="{device["node"]}"}}'
        for name, value in values.items():
            samples[f"device_{name}"] += [f"{labels} {value}"] if value is not None else []
    samples["round"] += [] if view.round is None else [f" {view.round}"]
    samples["bytes_total"] += [f'{{direction="{direction}"}} {count}' for direction, count in view.bytes.items()]
    samples["alerts"].append(f" {len(view.alerts)}")
    samples["superlink_up"].append(f" {int(view.has_answered)}")
    lines = []
    for name, (description, kind) in _METRICS.items():
        lines += [f"# HELP fedssl_{name} {description}", f"# TYPE fedssl_{name} {kind}"]
        lines += [f"fedssl_{name}{sample}" for sample in samples[name]]
    return "\n".join(lines) + "\n"


class MetricsServer(ThreadingHTTPServer):
    """Server of the metrics of the latest view at http://127.0.0.1/metrics."""

    view: FleetView | None = None

    def __init__(self, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(f"--port={port} cannot be used ({error.strerror}); choose another port") from error
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        """Send the metrics."""
        latest = self.server.view
        if latest is None or self.path != "/metrics":
            self.send_error(503 if latest is None else 404)
            return
        content = as_metrics(latest).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
