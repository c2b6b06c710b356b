"""Numbers stay: small runs over what composes give the bits that are on record.

What a CPU computes differs in its last bits between kinds of CPU and versions of torch. A record therefore belongs to
an *arithmetic*: the digest of a fixed piece of training that uses nothing of this project. Without a record for this
machine's arithmetic there is nothing to compare with, and the tests say so. ``pytest tests/test_digests.py -n 0 --heavy
--record-digests`` writes one, on a commit whose numbers are right. Runs over `FEATURES` need minutes and are not on
record: ``--digests FILE`` names another file, for which one commit records and another one compares.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from client_app.state_store import read_state
from fedssl.export import load_encoder
from simulation.run import run
from tests.cases import some
from tests.methods import overrides_of

BASE = ["num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=90", "encoder.width=4", "threads=1", "device=cpu"]
BASE += ["strategy=l_dawa"]
BASE += ["batch_size=16", "evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
STAGES = ["schedule=layer_wise", "rounds=5"]
AT_START = ["calibration=auxiliary", "calibration.when=start"]
FEDU = ["strategy=fedu", "method=byol"]
EVICTION = "client_state.max_bytes=60000"
SWAV = ["method.queue_size=32", "method.queue_start_round=2", "method.match_prototypes=true", "rounds=3"]
VIT = ["encoder=vit_tiny", "encoder.patch=4", "encoder.width=16", "encoder.depth=2", "encoder.heads=2"]

RUNS = {
    "l_dawa-simclr": ["clients_per_round=2", "rounds=3"],
    "l_dawa-client-loss": ["strategy.scale_at=client", "strategy.weighting=loss", "method=simsiam"],
    "l_dawa-warmup-buffers": ["strategy.warmup_rounds=1", "strategy.buffers=scale", "method=barlow_twins"],
    "l_dawa_fedu-byol": ["strategy=l_dawa_fedu", "method=byol", "rounds=3", "strategy.scale_at=client"],
    "m_dawa-moco": ["strategy=m_dawa", "method=moco_v3", "lr_schedule=cosine"],
    "fedavg-supervised-fedadam": ["strategy=fedavg", "method=supervised", "server_optimizer=fedadam", "rounds=3"],
    "fedavg-fedx-fur": ["strategy=fedavg", "method=fedx", "regularizer=fur"],
    "loss-simclr-fedavgm": ["strategy=loss_weighted", "server_optimizer=fedavgm", "rounds=3"],
    "fedu-byol": [*FEDU, "rounds=3", "clients_per_round=2", "strategy.predictor_threshold=0.1"],
    "fedu-byol-target": [*FEDU, "strategy.aggregate=target", "strategy.update=both"],
    "fedema-byol": ["strategy=fedema", "method=byol", "rounds=3"],
    "fedbn-simclr-decorr": ["strategy=fedbn", "regularizer=decorr", "rounds=3"],
    "fedprox-simclr-clip": ["strategy=fedprox", "clip_norm=0.5"],
    "euc-simclr": ["strategy=euc", "rounds=5", "clients_per_round=2"],
    "euc-examples-layer-wise": ["strategy=euc", "strategy.weighting=examples", *STAGES],
    "eua-simclr-fedyogi": ["strategy=eua", "server_optimizer=fedyogi", "rounds=3"],
    "median-layer-wise-dropout": ["strategy=median", *VIT, STAGES[0], "rounds=4", "schedule.depth_dropout=0.5"],
    "trimmed_mean-progressive": ["strategy=trimmed_mean", "strategy.beta=0.4", "schedule=progressive", "rounds=4"],
    "krum-simclr": ["strategy=krum", "num_clients=5"],
    "lw_fedssl": ["regularizer=alignment", "calibration=auxiliary", "method=moco_v3", *STAGES],
    "fedema-layer-wise-calibrated-start": ["strategy=fedema", *AT_START, *STAGES],
    "eua-layer-wise-fedadam-byol": ["strategy=eua", "method=byol", "server_optimizer=fedadam", *STAGES],
    "orchestra": ["method=orchestra", "strategy=fedavg", "rounds=3"],
    "orchestra-layer-wise": ["method=orchestra", "strategy=fedavg", "clients_per_round=2", *STAGES],
    "fedca": ["method=fedca", "strategy=fedavg", "clients_per_round=2", "rounds=3"],
    "local_only-byol": ["strategy=local_only", "method=byol", "rounds=3"],
    "local_only-orchestra": ["strategy=local_only", "method=orchestra"],
    "local_only-layer-wise": ["strategy=local_only", *VIT, "schedule=layer_wise", "rounds=4"],
    "featarc-simclr": ["strategy=featarc", "strategy.num_images=16", "rounds=3"],
    "clustered-byol-l_dawa": ["strategy=clustered", "method=byol", "strategy.rule=l_dawa", "strategy.num_images=16"],
    "gossip-simclr": ["strategy=gossip", "rounds=3", "clients_per_round=2"],
    "per_ssl-byol": ["strategy=per_ssl", "method=byol", "rounds=3"],
    "simclr-bf16-adam": ["precision=bf16", "optimizer=adam", "channels_last=false"],
    "dino-multi-crop": ["method=dino", "augmentation=digits_multi_crop"],
    "ibot-adamw": [*overrides_of("ibot"), "encoder.patch=2", "strategy=fedavg", "optimizer=adamw"],
    "ijepa-bf16": [*overrides_of("ijepa"), "encoder.patch=2", "precision=bf16"],
    "lejepa-multi-crop-eua": ["method=lejepa", "augmentation=digits_multi_crop", "strategy=eua"],
    "mae-fedu": [*overrides_of("mae"), "strategy=fedu", "rounds=3"],
    "swav-queue-matched": ["method=swav", *SWAV],
    "vicreg-cosine": ["method=vicreg", "lr_schedule=cosine"],
    "distillation": overrides_of("distillation"),
    "tuning-adapter-byol": ["tuning=adapter", "tuning.blocks=2", "method=byol"],
    "tuning-lora": ["tuning=lora", "tuning.rank=2", "strategy=fedavg"],
    "tuning-norm": ["tuning=norm", "strategy=fedavg"],
}

BUFFERED = ["aggregation.buffered=true", "aggregation.min_updates=2", "client_speed.sigma_clients=1"]
LORA = ["tuning=lora", "tuning.rank=4", "strategy=fedavg"]
SPEED = ["client_speed=lognormal", "measure_resources=true", "num_clients=5", "rounds=4"]
SECAGG = ["secure_aggregation=secagg_plus", "strategy=fedavg", "num_clients=5"]
FILTER = "aggregation.max_norm_ratio=1.1"
PRIVATE = ["privacy=central", "strategy=fedavg", "strategy.weighting=uniform", "encoder.norm=group"]
RAY = ["engine=ray", "num_clients=6", "engine.client_cpus=1"]

FEATURES = {
    "availability-diurnal-lost": [*SPEED, "availability=diurnal", "availability.dropout=0.3"],
    "base-layers-last-blocks": ["tuning=last_blocks", "strategy=fedavg", "rounds=3", "clients_per_round=2"],
    "buffered-fedadam": [*SPEED, *BUFFERED, "strategy=fedavg", "server_optimizer=fedadam"],
    "buffered-unit-delays": [*BUFFERED[:2], "strategy=fedavg", "num_clients=5", "rounds=4"],
    "calibration-end-buffered": [*SPEED, *BUFFERED, "strategy=fedavg", "calibration=auxiliary"],
    "collapse-evaluated-early-stopping": [
        *("collapse_images=32", "evaluation=knn", "evaluate_every=1", "rounds=4", "snapshot_every=1"),
        *("early_stopping.monitor=knn", "early_stopping.patience=1"),
    ],
    "deadline-over-selection": [
        *(*SPEED, "clients_per_round=3", "aggregation.over_selection=1", "aggregation.round_deadline=8"),
        *("aggregation.min_updates=1", "aggregation.max_retries=2"),
    ],
    "eviction-byol": ["method=byol", "strategy=fedu", EVICTION, "clients_per_round=2", "rounds=4"],
    "eviction-layer-wise": ["method=byol", "strategy=fedbn", EVICTION, *STAGES],
    "lora-exact": [*LORA, "tuning.aggregation=exact", "rounds=3"],
    "lora-freeze-a-eua": [*LORA, "strategy=eua", "tuning.aggregation=freeze_a"],
    "lora-l_dawa-vit": [*LORA, "strategy=l_dawa", *VIT, "rounds=3"],
    "lora-norm-filter": [*LORA, "aggregation.max_norm_ratio=1.2", "num_clients=5"],
    "lora-stack": [*LORA, "tuning.aggregation=stack", "rounds=3", "clients_per_round=2"],
    "lora-stack-ranks": [*LORA, "tuning.aggregation=stack", "tuning.ranks=[1,2,4]"],
    "lora-svd-ranks": [*LORA, "tuning.aggregation=svd", "tuning.ranks=[1,2,4]", "rounds=3"],
    "norm-filter-featarc": ["strategy=featarc", "strategy.num_images=16", FILTER, "num_clients=5"],
    "norm-filter-krum": ["strategy=krum", "num_clients=6", FILTER],
    "personalized-fedu": [*FEDU, "evaluate_personalized=true", "unseen_clients=1", "clients_per_round=2"],
    "privacy": [*PRIVATE, "rounds=3"],
    "privacy-fedadam-speed": [*SPEED, *PRIVATE, "server_optimizer=fedadam"],
    "ray-blocks-l_dawa": RAY,
    "ray-blocks-fedavg-auto": ["engine=ray", "num_clients=9", "strategy=fedavg"],
    "ray-fedu": [*RAY, *FEDU],
    "ray-speed-buffered": [*SPEED, *BUFFERED, "strategy=fedavg", "engine=ray"],
    "secagg": [*SECAGG, "rounds=3"],
    "secagg-l_dawa-lora": [*SECAGG, "strategy=l_dawa", "strategy.scale_at=client", "tuning=lora", "tuning.rank=2"],
    "secagg-uniform-fedadam": [*SECAGG, "strategy.weighting=uniform", "server_optimizer=fedadam"],
    "speed": [*SPEED, "clients_per_round=3"],
    "wire-bf16-fedu": ["wire_dtype=bf16", "strategy=fedu", "method=byol", "rounds=3"],
    "wire-fp16-layer-wise": ["wire_dtype=fp16", *STAGES],
    "wire-int8-lora-ranks": [*LORA, "wire_dtype=int8", "tuning.aggregation=svd", "tuning.ranks=[1,2,4]"],
    "wire-int8-residual": ["wire_dtype=int8", "rounds=3", "clients_per_round=2"],
}
"""Runs over what is neither a strategy nor a method."""

RESUMED = {
    "buffered-fedadam": 2,
    "collapse-evaluated-early-stopping": 1,
    "deadline-over-selection": 2,
    "eviction-byol": 2,
    "lora-stack": 1,
    "lora-svd-ranks": 2,
    "privacy": 1,
    "ray-speed-buffered": 2,
    "secagg": 1,
    "speed": 2,
    "wire-int8-residual": 1,
}
"""Runs over features that are repeated with a pause after this round, and resumed."""

DEFAULT = {
    *("l_dawa-client-loss", "fedavg-supervised-fedadam", "fedu-byol", "euc-simclr"),
    *("lw_fedssl", "orchestra", "featarc-simclr", "dino-multi-crop"),
}
"""Runs that together compose every kind of exchange; the others are heavy."""

TIMES = re.compile("seconds|memory|wall")


def digest(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """Of names, dtypes, shapes and bytes, whatever the order."""
    total = hashlib.sha256()
    for name, array in sorted(arrays, key=lambda pair: pair[0]):
        total.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def arithmetic() -> str:
    """Return the digest of some training steps and inner products on this machine, computed without this project.

    Kinds of CPU that agree in convolutions of float32 may differ in inner products (NumPy's BLAS) and in bfloat16.
    """
    numbers = np.random.default_rng(0)
    rows = numbers.standard_normal((16, 1024)) + 0.1
    inner = {str(dtype): np.vecdot(rows.astype(dtype), rows[::-1].astype(dtype)) for dtype in (np.float32, np.float64)}
    inner["odd"] = np.array([rows[0, :n] @ rows[1, :n] for n in (3, 29, 311, 1000)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)),
        )
        for precision in (torch.float32, torch.bfloat16):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
                    z = nn.functional.normalize(model(torch.randn(24, 1, 8, 8)), dim=1)
                    (z @ z.T / 0.1).logsumexp(dim=1).mean().backward()
                optimizer.step()
        view = torch.randn(30, 1, 8, 8).to(memory_format=torch.contiguous_format)
        conv, head = (
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16)),
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            head(conv(view).flatten(1)).float().square().mean().backward()
    inner |= {
        f"bfloat16 {name}": weight.grad.numpy() for name, weight in [("conv", conv.weight), *head.named_parameters()]
    }
    inner |= {name: value.detach().numpy() for name, value in model.state_dict().items()}
    return digest(inner.items())


def arithmetic_of(overrides: Iterable[str]) -> str:
    """Return the digest of `arithmetic`, with one of training a transformer for a run that has one."""
    if VIT[0] not in overrides:
        return arithmetic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=64, num_classes=16)
        model.conv_proj = nn.Conv2d(1, 16, 4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        for size in (32, 32, 26):  # two views of a batch, and of the last one
            optimizer.zero_grad()
            z = nn.functional.normalize(model(torch.randn(size, 1, 8, 8)), dim=1)
            (z @ z.T / 0.1).logsumexp(dim=1).mean().backward()
            optimizer.step()
    return f"{arithmetic()} {digest((name, value.numpy()) for name, value in model.state_dict().items())}"


def arrays_in(value: object, place: str = "") -> Iterable[tuple[str, np.ndarray]]:
    """The tensors in nested dictionaries and their names, which are those of the innermost keys."""
    if isinstance(value, torch.Tensor):
        yield place, value.numpy()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from arrays_in(inner, str(key))


def model_digests(folder: Path) -> dict[str, str]:
    """Of the global model in the last checkpoint, and of the exported encoders."""
    newest = max((folder / "checkpoints").glob("round-*.pt"))
    saved = torch.load(newest, weights_only=True)
    model = saved["models"].get("global")
    found = {"layers": digest(arrays_in({**model["layers"], **model["broadcast"]}))} if model else {}
    for file in sorted(folder.glob("encoder*.pt")):
        state = load_encoder(file).state_dict()
        found[file.name] = digest((name, value.numpy()) for name, value in state.items())
    return found


def state_digests(folder: Path) -> dict[str, str]:
    """Of what each client keeps, its newest version."""
    found = {}
    for client in sorted((folder / "clients").glob("*/*")):
        versions = sorted(client.glob("round-*.safetensors"))
        if versions:
            state = read_state(versions[-1])
            found[f"client {client.name}"] = digest(arrays_in(state))
    return found


def line_digests(folder: Path) -> dict[str, str]:
    """Return digests of the lines of rounds and of clients, without the times of this machine."""

    def without_times(value: object) -> object:
        if isinstance(value, dict):
            items = value.items()
            return {
                key: without_times(inner) for key, inner in items if key.startswith("virtual_") or not TIMES.search(key)
            }
        return value

    found = {}
    for name in ("metrics.jsonl", "clients.jsonl"):
        lines = [without_times(json.loads(line)) for line in (folder / name).read_text().splitlines()]
        found[name] = hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()[:16]
    return found


class Records:
    """Digests of runs on machines with this one's arithmetic."""

    def __init__(self, config: pytest.Config) -> None:
        self._file, self._records_new = Path(config.getoption("--digests")), config.getoption("--record-digests")

    def skip_unless_there(self, name: str, overrides: Iterable[str]) -> None:
        key = arithmetic_of(overrides)
        if not self._records_new and name not in self._read().get(key, ()):
            pytest.skip(f"no digests on record for this machine's arithmetic ({key}, torch {torch.__version__})")

    def compare_or_record(self, name: str, overrides: Iterable[str], found: dict[str, str]) -> None:
        records, key = self._read(), arithmetic_of(overrides)
        if self._records_new:
            records.setdefault(key, {})[name] = found
            self._file.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
        else:
            assert found == records[key][name]

    def _read(self) -> dict[str, dict[str, dict[str, str]]]:
        return json.loads(self._file.read_text()) if self._file.is_file() else {}


@pytest.fixture
def records(request: pytest.FixtureRequest) -> Records:
    return Records(request.config)


@pytest.mark.parametrize("name", some(RUNS, default=DEFAULT))
def test_the_numbers_of_a_run_are_those_on_record(name, records, tmp_path):
    records.skip_unless_there(name, RUNS[name])
    run([*BASE, *RUNS[name], f"output_dir={tmp_path / 'run'}"])
    found = model_digests(tmp_path / "run") | state_digests(tmp_path / "run")
    records.compare_or_record(name, RUNS[name], found)


@pytest.mark.heavy
@pytest.mark.parametrize("name", [*FEATURES, *(f"{name} resumed" for name in RESUMED)])
def test_numbers_and_lines_over_features_are_those_on_record(name, records, request):
    feature = name.removesuffix(" resumed")
    records.skip_unless_there(name, FEATURES[feature])
    folder = Path(tempfile.mkdtemp()) / "run"  # plans of simulated clients have its path: the length is in the bytes
    request.addfinalizer(lambda: shutil.rmtree(folder.parent))
    pause = [f"pause_after={RESUMED[feature]}"] if name != feature else []
    run([*BASE, *FEATURES[feature], *pause, f"output_dir={folder}"])
    if pause:
        run([f"resume={folder}", "pause_after=null"])
    found = model_digests(folder) | state_digests(folder) | line_digests(folder)
    records.compare_or_record(name, FEATURES[feature], found)
