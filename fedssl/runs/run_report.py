"""The line by which the ServerApp reports its run folder or its rejection to the command, which follows its log.

{"run_folder": "/runs/2026-01-01", "error": null}
"""

import json


def report_line(*, run_folder: str | None = None, error: str | None = None) -> str:
    """Return a line with the run folder, None before it exists, and why the settings were rejected."""
    return json.dumps({"run_folder": run_folder, "error": error})


def parse_report(line: str) -> dict[str, str | None] | None:
    """Return what a line of the log reports, None for any other line."""
    try:
        fields = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return None
    is_report = list(fields) == ["run_folder", "error"]
    return fields if is_report and all(value is None or isinstance(value, str) for value in fields.values()) else None
