"""Numbers stay: small runs over what composes give the bits that are on record.

What a CPU computes differs in its last bits between kinds of CPU and versions of torch. A record therefore belongs to
an *arithmetic*: the digest of a fixed piece of training that uses nothing of this project. Without a record for this
machine's arithmetic there is nothing to compare with, and the tests say so. ``pytest tests/test_digests.py -n 0
--record-digests`` writes one, on a commit whose numbers are right.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from client_app.state_store import read_state
from fedssl.export import load_encoder
from simulation.cli import run
from tests.methods import overrides_of

RECORDS = Path(__file__).parent / "digests.json"

BASE = ["num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=90", "encoder.width=4", "threads=1", "device=cpu"]
BASE += ["batch_size=16", "evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
STAGES = ["schedule=layer_wise", "rounds=5"]
THRESHOLD = ["strategy.predictor_threshold=0.1"]
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
    "fedu-byol": [
        "strategy=fedu",
        "method=byol",
        "rounds=3",
        "clients_per_round=2",
        "strategy.predictor_threshold=0.1",
    ],
    "fedu-byol-target": ["strategy=fedu", "method=byol", "strategy.aggregate=target", "strategy.update=both"],
    "fedema-byol": ["strategy=fedema", "method=byol", "rounds=3"],
    "fedbn-simclr-decorr": ["strategy=fedbn", "regularizer=decorr", "rounds=3"],
    "fedprox-simclr-clip": ["strategy=fedprox", "clip_norm=0.5"],
    "euc-simclr": ["strategy=euc", "rounds=5", "clients_per_round=2"],
    "euc-examples-layer-wise": ["strategy=euc", "strategy.weighting=examples", *STAGES],
    "eua-simclr-fedyogi": ["strategy=eua", "server_optimizer=fedyogi", "rounds=3"],
    "median-layer-wise-dropout": [
        "strategy=median",
        *VIT,
        "schedule=layer_wise",
        "rounds=4",
        "schedule.depth_dropout=0.5",
    ],
    "trimmed_mean-progressive": ["strategy=trimmed_mean", "strategy.beta=0.4", "schedule=progressive", "rounds=4"],
    "krum-simclr": ["strategy=krum", "num_clients=5"],
    "lw_fedssl": ["regularizer=alignment", "calibration=auxiliary", "method=moco_v3", *STAGES],
    "fedema-layer-wise-calibrated-start": [
        "strategy=fedema",
        "calibration=auxiliary",
        "calibration.when=start",
        *STAGES,
    ],
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

REPEATED = {
    "eua-layer-wise-fedadam-byol",
    "fedema-layer-wise-calibrated-start",
    "local_only-layer-wise",
    "local_only-orchestra",
    "orchestra-layer-wise",
}
"""Runs over pairs of what other runs compose with something else."""


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


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    records = json.loads(RECORDS.read_text()) if RECORDS.is_file() else {}
    if arithmetic() not in records and not request.config.getoption("--record-digests"):
        pytest.skip(f"no digests on record for this machine's arithmetic ({arithmetic()}, torch {torch.__version__})")
    return records.get(arithmetic(), {})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if name in REPEATED else []) for name in RUNS]
)
def test_the_numbers_of_a_run_are_those_on_record(name, recorded, request, tmp_path):
    run([*BASE, *RUNS[name], f"output_dir={tmp_path / 'run'}"])
    found = model_digests(tmp_path / "run") | state_digests(tmp_path / "run")
    if request.config.getoption("--record-digests"):
        records = json.loads(RECORDS.read_text()) if RECORDS.is_file() else {}
        records.setdefault(arithmetic(), {})[name] = found
        RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    elif name not in recorded:
        pytest.skip(f"no digest of this run on record for this machine's arithmetic ({arithmetic()})")
    else:
        assert found == recorded[name]
