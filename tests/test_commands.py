"""Run every block of commands of the README and the guide, on a small scale, in a folder with the named files."""

import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedssl.availability import SPEED_HEADER
from fedssl.fleet.limits import Limits, read_limits
from fedssl.watch.cli import WatchServer
from simulation.run import run
from simulation.sandbox import process_sandbox
from tests.devices import write_images
from tests.experiments.every import write_images as write_hub_images
from tests.fedssl.export.test_formats import VIT, write_encoder
from tests.flower import ENVIRONMENT, flwr_run, free_port
from tests.test_docs import ROOT

GUIDE = ("train", "sweep", "data", "pretrained", "evaluate", "devices")
PAGES = (ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in GUIDE))
RUN = "runs/2026-11-21_14-03-07"  # the run folder that the pages take as an example
PROGRAMS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
OTHERS = ("flwr", "flower-", "pip", "uv", "python", "mkdocs", "printf", "export")
TINY = ("rounds=1", "local_epochs=1", "threads=1", "dataset.limit=200", "dataset.test_limit=100")
TINY += ("final_evaluation=knn", "collapse_images=0", "measure_resources=false")
# Additional overrides that make a command with these overrides short.
SMALLER = {
    "secure_aggregation=secagg_plus": ("num_clients=4",),
    "num_clients=20": ("dataset.limit=400",),
    "engine=ray": ("partition=iid", "dataset.limit=400"),
    "engine.client_gpus=0.25": ("engine.client_gpus=0", "dataset.path=data/cifar10"),
    "schedule=layer_wise": ("rounds=4", "dataset.limit=60"),
    "strategy=featarc": ("num_clients=5", "clients_per_round=3"),
    "encoder=resnet18": ("num_clients=2",),
    "encoder=timm": ("partition=iid", "evaluation=none", "final_evaluation=none"),
    "dataset=folder": ("num_clients=2",),
    "partition=domain": ("num_clients=3",),
    "encoder=conv_small": ("encoder.width=4",),
    "final_evaluation=linear": ("collapse_images=50", "dataset.limit=100"),
    "seed=0,1,2": ("dataset.limit=100",),
    "snapshot_every=1": ("rounds=3", "dataset.limit=100", f"hydra.sweep.dir=multirun/{Path(RUN).name}"),
    "rounds=200": ("rounds=4", "evaluate_every=1"),
    "client_speed=lognormal": ("measure_resources=true", "dataset.limit=100", "partition=iid"),
    "client_speed=trace": ("measure_resources=true",),
    "plan=true": ("num_clients=4",),
    "experiment=review": (
        "seed=0",
        "strategy=fedavg,fedu,l_dawa",
        "sweep.without=[data,encoder,clients,quantity_skew,feature_shift]",
        "num_clients=5",  # two classes each, and at most a cluster each
        "dataset.limit=100",
    ),
    "sweep.reduction_factor=3": ("rounds=4", "evaluate_every=1", "dataset.limit=60"),
}


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Return the arguments of its commands."""
        lines = (shlex.split(line, comments=True) for line in self.text.replace("\\\n", "").splitlines())
        return [overrides for overrides in lines if overrides]

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.M | re.S):
            yield Block(page.name, language, text)


BLOCKS = list(blocks())
SCRIPTS = [block for block in BLOCKS if block.language == "bash"]
OWN = [block for block in SCRIPTS if all(overrides[0] in PROGRAMS for overrides in block.commands)]


@pytest.fixture
def workspace(named: Path, tmp_path: Path) -> Path:
    """A copy of the folder for one test: blocks need no results of others, and may write files of the same names."""
    return shutil.copytree(named, tmp_path / "newcomer", symlinks=True)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs, encoder, images, labels, tags, ages and masks of the pages; one per worker."""
    folder = tmp_path_factory.mktemp("newcomer")
    images = write_tagged_images(folder / "tagged")
    (folder / "ages.csv").write_text("\n".join(["file,age", *(f"tagged/{row:02}.png,{row}" for row in range(40))]))
    small_run = [*TINY, "num_clients=3", "encoder.width=4", "collapse_images=20"]
    data = ["dataset=folder", f"dataset.path={images}", "dataset.size=8", "dataset.channels=1"]
    run([*small_run, *data, "clients_per_round=3", "strategy=l_dawa", f"output_dir={folder / RUN}"])
    run([*small_run, "method=byol", f"output_dir={folder / 'runs' / 'byol'}"])
    (folder / "my").mkdir()
    (folder / "my/runs").symlink_to("../runs")
    write_encoder(folder / "encoder-0.pt", VIT)
    (folder / "data/cifar10").mkdir(parents=True)
    write_hub_images(folder / "data/cifar10", splits={"train": 12, "test": 10})
    for seed, name in enumerate(("cats", "dogs")):
        write_images(folder / "my/images" / name, 20, size=64)
        write_images(folder / "my/labeled" / name, 5, seed=1 + seed, size=64)
    (folder / "my/speed.csv").write_text(f"{SPEED_HEADER}\n0,1e9,1e6,1e6\n1,1e9,1e6,1e6\n2,1e9,1e6,1e6\n")
    (folder / "my/online.csv").write_text("client,start,end\n0,0,9\n1,0,9\n2,0,9\n")
    for name in ("garden", "roof"):
        write_images(folder / "my" / name, 12)
    for split in ("train", "test"):
        write_images(folder / "data/images" / split, 8)
        write_images(folder / "data/masks" / split, 8, seed=1)
    for domain in ("photo", "art_painting", "cartoon", "sketch"):
        for name in ("dog", "house"):
            write_images(folder / "data/pacs" / domain / name, 10)
    return folder


def write_tagged_images(folder: Path) -> Path:
    """Write images of two classes, and return a CSV file with their labels and tags."""
    write_images(folder, 40)
    rows = (
        f"{row:02}.png,{'cat' if row % 2 else 'dog'},{('indoor', 'outdoor', 'indoor|outdoor')[row % 3]}"
        for row in range(40)
    )
    (folder / "list.csv").write_text("\n".join(["path,label,tags", *rows]))
    return folder / "list.csv"


def small(overrides: list[str], workspace: Path) -> list[str]:
    """Return a short version of the command, with paths in ``workspace``."""
    overrides = [re.sub(r"(?<==)/(?=data/|my/|tmp/)", f"{workspace}/", override) for override in overrides]
    if overrides[0] != "fedssl":
        return overrides
    if any(override.startswith("resume=") for override in overrides):
        return [*overrides, "rounds=2"]
    more = [override for key, value in SMALLER.items() if key in overrides for override in value]
    if not any(override.startswith(("encoder", "experiment")) for override in overrides):
        more.append("encoder.width=4")
    return ["fedssl", "num_clients=3", *overrides[1:], *TINY, *more]


def interrupt(server: WatchServer, poll_interval: float) -> None:
    """End a server as Ctrl-C does."""
    raise KeyboardInterrupt


def call(overrides: list[str], patch: pytest.MonkeyPatch) -> None:
    """Call a program of ours in this process."""
    patch.setattr(sys, "argv", overrides)
    patch.setattr(signal, "signal", lambda number, handler: None)  # children would inherit ignored signals
    patch.setattr(WatchServer, "serve_forever", interrupt)
    try:
        status = pkgutil.resolve_name(PROGRAMS[overrides[0]])()
    except SystemExit as end:
        status = end.code
    assert not status, overrides


def marked(block: Block) -> object:
    much = any(overrides in block.text for overrides in ("engine=ray", "fedssl -m", "encoder=resnet18"))
    much |= block.page not in ("README.md", "data.md")
    return pytest.param(block, marks=pytest.mark.heavy if much else [], id=str(block))


@pytest.mark.parametrize("block", [marked(block) for block in {block.text: block for block in OWN}.values()])
def test_a_block_of_our_programs_runs(block: Block, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hydra/sweeper=optuna" in block.text:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs uv run --group launchers")
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    for overrides in block.commands:
        call(small(overrides, workspace), monkeypatch)


def test_every_command_is_run_by_a_test_here() -> None:
    others = [block.commands[0] for block in SCRIPTS if block not in OWN]
    assert [overrides[:2] for overrides in others] == [
        ["pip", "install"],  # install
        ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1", "uv"],  # plain flwr run
        ["export", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"],  # devices
    ]
    for block in BLOCKS:
        if block.language != "bash":
            assert not [
                overrides for overrides in block.text.splitlines() if overrides.startswith((*PROGRAMS, *OTHERS))
            ], str(block)


def test_python_of_the_readme(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in BLOCKS if block.language == "python" and block.page == "README.md")
    monkeypatch.chdir(workspace)
    names: dict[str, object] = {"images": torch.zeros(4, 1, 8, 8, dtype=torch.uint8)}
    exec(block.text, names)
    features = names["features"]
    assert isinstance(features, torch.Tensor)
    assert features.shape[0] == 4


def test_limits_of_the_devices_page(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.language == "yaml")
    (tmp_path / "limits.yaml").write_text(block.text)
    limits = Limits(
        memory=2.0,
        epochs=20,
        batch=256,
        size=128,
        threads=2,
        minutes=15,
        active_hours="22:00-06:00",
        max_rounds_per_day=10,
        max_megabytes_per_day=200,
        only_on_power=True,
        share_quality=True,
    )
    assert read_limits(tmp_path / "limits.yaml") == limits


@pytest.mark.heavy
def test_the_first_block_sets_everything_up(tmp_path: Path) -> None:
    block = SCRIPTS[0]
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    script = block.text.replace("uv run fedssl", f"uv run fedssl {' '.join(TINY)}")
    script = script.replace("uv run pytest", "uv run pytest --collect-only -n 0")
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    subprocess.run(["bash", "-euc", script], cwd=tmp_path / "clone", env=environment, check=True)


@pytest.mark.heavy
def test_plain_flwr_run_as_in_the_guide(tmp_path: Path) -> None:
    (overrides,) = next(block for block in SCRIPTS if "uv run flwr run" in block.text).commands
    at = overrides.index("--stream")
    assert overrides[:at] == ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1", "uv", "run", "flwr", "run", "."]
    options = [override.replace("/tmp/fedssl-", f"{tmp_path}/") for override in overrides[at + 1 :]]
    options[-1] += f' overrides="{" ".join(TINY)}"'
    outcome = flwr_run(ROOT, *options)
    assert outcome.status == "finished:completed", outcome.log
    assert (tmp_path / "run/encoder.pt").exists()


@pytest.mark.heavy
def test_devices_on_one_machine_as_in_the_guide(workspace: Path, tmp_path: Path) -> None:
    text = next(block for block in SCRIPTS if "flower-superlink" in block.text).text
    for port in ("8000", "9094", "9095"):
        text = text.replace(port, str(free_port()))
    text = text.replace("/tmp/fedssl-", f"{tmp_path}/").replace("/my/", f"{workspace}/my/")
    text = text.replace("dataset.size=32", "dataset.size=8 rounds=1 encoder.width=4")
    with process_sandbox() as own, (tmp_path / "log").open("w") as log:
        text = f"cd {shlex.quote(str(ROOT))}\n{text}".replace("~/.flwr", str(own.home))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **ENVIRONMENT, "PATH": path}
        own.start(["bash", "-euc", text], environment=environment, stdout=log.fileno()).wait()
    assert (tmp_path / "devices/encoder.pt").exists(), (tmp_path / "log").read_text()
