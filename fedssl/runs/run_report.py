"""The line by which the ServerApp reports its run folder or its rejection to the command, which follows its log.

{"run_folder": "/runs/2026-01-01", "error": null}
"""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RunReport:
    """Report of a run on another machine to the command."""

    run_folder: str | None = None  # None before it exists
    error: str | None = None  # why the settings were rejected

    def line(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> "RunReport | None":
        """Return the report in a line of the log, None for any other line."""
        if not line.startswith("{"):
            return None
        try:
            fields = json.loads(line)
        except ValueError:
            return None
        valid = list(fields) == ["run_folder", "error"] and all(
            value is None or isinstance(value, str) for value in fields.values()
        )
        return cls(**fields) if valid else None
