"""Tests run in parallel, one per core and one more with --heavy, and each uses one thread."""

import gc
import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import hypothesis
import pytest

from fedssl.machine.process import available_cores

hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")  # a busy machine fails no test

RENDERED = ("fedssl/plots", "fedssl/report/test_html_page", "fedssl/report/test_cli.py", "examples/test_theory.py")
RENDERED += ("fedssl/runs/test_snapshots.py", "strategies/test_gossip.py", "strategies/test_topology.py")
RENDERED += ("server_app/callbacks/test_evaluation.py",)
"""Tests of figures. In all others a run draws no figures, which takes half the time of a small run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "CIFAR-10, as dataset.path takes it: read it, and train every method on it (40 CPU minutes)"
    parser.addoption("--cifar10", metavar="PATH", help=help_)
    parser.addoption("--heavy", action="store_true", help="run tests that are marked heavy too")
    parser.addoption("--record-digests", action="store_true", help="store these digests (test_digests.py, -n 0)")
    parser.addoption(
        "--digests",
        metavar="FILE",
        default=str(Path(__file__).parent / "digests.json"),
        help="digests with which test_digests.py compares those of this commit",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let workers, and the processes that they start, save and share compiled files: imports take twice as long else.

    With `-n 0` the environment decides. Mutations need it so. Programs that a shell starts in the background ignore
    Ctrl-C, and so would the commands that tests interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("dist", "no") != "no":
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return one process more than cores with --heavy: tests of deployments wait for half of their time."""
    return available_cores() + 1 if config.getoption("--heavy") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of the site first: the tests in the middle and at the end are divided, and two workers need it.

    Those of learning follow. They take minutes each, and at the end one worker would run the last ones alone.
    """
    items.sort(key=lambda item: (item.path.name != "test_site.py", item.path.name != "test_learning.py"))
    if not (config.getoption("--heavy") or config.getoption("--record-digests")):
        heavy = [item for item in items if item.get_closest_marker("heavy")]
        config.hook.pytest_deselected(items=heavy)  # each skipped one would be reported to the controller
        items[:] = [item for item in items if not item.get_closest_marker("heavy")]
    else:
        items[:] = _spread(items)


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the heavy tests of deployments between other modules, without the last ones: they wait most of their time."""
    waiting = [item for item in items if item.path.parent.name == "deploy" and item.get_closest_marker("heavy")]
    others = [item for item in items if item not in waiting]
    modules = [list(of_module) for _, of_module in itertools.groupby(others, lambda item: item.path)] or [[]]
    every = max(len(modules) * 3 // 4 // max(len(waiting), 1), 1)
    for place, item in enumerate(waiting):
        modules[min(place * every, len(modules) - 1)].append(item)
    return [*itertools.chain.from_iterable(modules)]


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, which each run does at its end: 0.3 s otherwise."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that are left at the end


@pytest.fixture(scope="session")
def cifar10(request: pytest.FixtureRequest) -> str:
    """Return the path of CIFAR-10; skip the test if none is given."""
    path = request.config.getoption("--cifar10")
    if not path:
        pytest.skip("--cifar10 names no files")
    return path


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed torch's global generator of the CPU before each test; `torch.manual_seed` also formats three stacks."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _frozen_modules() -> None:
    """Exempt what tests have imported since from garbage collection, too."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Files are written as always, but not flushed to the disk; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _captured_log() -> None:
    """Reset what servers in overlapping threads left behind: `log_to` redirects the log of the process."""
    log = logging.getLogger("fedssl")
    log.propagate, log.disabled = True, False
    log.setLevel(logging.NOTSET)


def _write_figure(file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\x89PNG")
    return file


@pytest.fixture(scope="module", autouse=True)
def _no_rendering(request: pytest.FixtureRequest) -> Iterator[None]:
    from fedssl.plots.registry import FINAL_PLOTS  # here: it imports torch, which only the workers need

    with pytest.MonkeyPatch.context() as patch:
        if not request.path.relative_to(Path(__file__).parent).as_posix().startswith(RENDERED):
            patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, stream, **style: stream.write(b"\x89PNG"))
            name = "server_app.callbacks.evaluation.save_partition_plot"
            patch.setattr(name, lambda file, *args, **kwargs: _write_figure(file))
            patch.setattr(
                "server_app.callbacks.evaluation.write_final_plots",
                lambda folder: [_write_figure(folder / "figures" / f"{name}.png") for name in FINAL_PLOTS],
            )
        yield
