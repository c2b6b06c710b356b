"""The command ``fedssl-report``, called in this process."""

import sys

import pytest

from fedssl.report.cli import main


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command; returns exit status, standard output and standard error."""

    def call(*overrides: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedssl-report", *map(str, overrides)])
        status = main()
        return status, *capsys.readouterr()

    return call
