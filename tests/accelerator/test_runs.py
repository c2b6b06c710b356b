"""Complete runs of two rounds on the strict accelerator, whose numbers are those of the CPU.

They are equal bit for bit, in fp32 and bf16, where the same code runs. Four modules have other code for accelerators:
the format of weights, the matrix products of views, and random numbers and iterations of FUR. The run on the CPU uses
it, too (`as_on_accelerator`); one run does not, and is equal within 1e-4. Secure aggregation rounds at random.
"""

from pathlib import Path

import pytest
import torch

from simulation.run import run
from tests import test_digests
from tests.accelerator.results import assert_equal, numbers_of
from tests.cases import some
from tests.methods import METHODS, TYPICAL, overrides_of

OF_A_RUN = 1000  # operators; data and copies are fewer
BASE = ["strategy=l_dawa", "num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=90", "threads=1"]
BASE += ["batch_size=16", "evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
VIT = ["encoder=vit_tiny", "encoder.patch=4", "encoder.width=16", "encoder.depth=2", "encoder.heads=2"]
RGB = ["dataset.channels=3", "dataset.mean=[0.3,0.3,0.3]", "dataset.std=[0.4,0.4,0.4]"]
RESNET = ["encoder=resnet18", "dataset.limit=30"]
CALIBRATED = ["method=moco_v3", "regularizer=alignment", "calibration=auxiliary"]
UNIFORM = ["strategy=fedavg", "strategy.weighting=uniform"]
EVALUATED = ["evaluate_every=1", "final_evaluation=knn", "collapse_images=16", "dataset.limit=120"]
PERSONALIZED = [*EVALUATED, "evaluate_personalized=true"]
ONCE = ["rounds=1", "dataset.limit=400"]  # enough images of a class for all protocols

REGULARIZERS = ("alignment", "decorr", "featarc", "feature_distillation", "fur", "l2_sp", "prox")

DEFAULT = {  # together they use most code of the others
    "measured": [*EVALUATED, "method=byol", "strategy=fedu", "measure_resources=true", "snapshot_every=1"],
    "calibrated-stages": [*CALIBRATED, "schedule=layer_wise", "rounds=4", "wire_dtype=int8"],
    "orchestra-fedadam": ["method=orchestra", "strategy=fedavg", "server_optimizer=fedadam"],
    "simclr-linear": [*ONCE, "strategy=fedavg", "final_evaluation=linear"],
}
METHOD_RUNS = {f"{m}-fp32": [*overrides_of(m), "strategy=fedavg"] for m in METHODS}
METHOD_RUNS |= {f"{m}-bf16": [*overrides_of(m), "strategy=fedavg", "precision=bf16", "rounds=1"] for m in TYPICAL}
EVALUATION_RUNS = {
    "few_labels": [*ONCE, "final_evaluation=few_labels"],
    "semi_supervised": [*ONCE, "final_evaluation=semi_supervised"],
    "fine_tune": [*ONCE, "final_evaluation=fine_tune", "final_evaluation.epochs=2"],
    "probes": [*ONCE, "final_evaluation=probes"],
    "sgd-probe": [*ONCE, "final_evaluation=l_dawa/linear", "final_evaluation.epochs=2"],
    "personalized": [*PERSONALIZED, "strategy=fedbn", "unseen_clients=1", "clients_per_round=2"],
    "personalized-byol": [*PERSONALIZED, "method=byol", "strategy=per_ssl"],
    "supervised-measured": [*EVALUATED, "method=supervised", "measure_resources=true"],
}
OTHER_RUNS = {
    **{f"regularizer-{name}": [f"regularizer={name}"] for name in REGULARIZERS},
    "views-medical": ["augmentation=medical"],
    "views-satellite": ["augmentation=satellite"],
    "regularizer-fur-converged": ["regularizer=fur", "regularizer.gpu_iter=0"],
    "regularizer-tangent": ["regularizer=fur", "regularizer.variant=tangent_swd"],
    "vit-progressive-calibrated": [*VIT, "schedule=progressive", "calibration=auxiliary"],
    "tuning-last_blocks": ["tuning=last_blocks", "method=byol", *PERSONALIZED],
    "tuning-bias": ["tuning=bias", "method=byol", *EVALUATED],
    "tuning-adapter": ["tuning=adapter", "tuning.blocks=2", "method=byol", *EVALUATED],
    "tuning-lora": ["tuning=lora", "tuning.rank=2", "method=byol", *EVALUATED],
    "tuning-lora-vit": [*VIT, "tuning=lora", "tuning.rank=2", "tuning.aggregation=freeze_a", "method=moco_v3"],
    "resnet18": RESNET,
    "resnet18-group": [*RESNET, "encoder.norm=group"],
    **{f"optimizer-{name}": [f"optimizer={name}", "clip_norm=0.5"] for name in ("adam", "adamw", "sgd")},
    **{f"wire-{dtype}": [f"wire_dtype={dtype}"] for dtype in ("fp16", "bf16", "int8")},
    **{
        f"augmentation-{name}": [f"augmentation={name}", *RGB]
        for name in ("byol", "dec_ssl", "easyfl", "fedu2", "fedx", "none", "orchestra", "simclr")
    },
    "secure": ["secure_aggregation=secagg_plus", "secure_aggregation.dropout_fraction=0", *UNIFORM],
    "private": ["privacy=central", *UNIFORM, "encoder.norm=group"],
    "contiguous": ["channels_last=false"],
}
DIGESTS = (  # those with a strategy, views, a queue, layers or a time of calibration that the others have not
    *("l_dawa_fedu-byol", "m_dawa-moco", "loss-simclr-fedavgm", "fedema-layer-wise-calibrated-start", "euc-simclr"),
    *("fedprox-simclr-clip", "eua-simclr-fedyogi", "median-layer-wise-dropout", "trimmed_mean-progressive"),
    *("krum-simclr", "local_only-byol", "featarc-simclr", "clustered-byol-l_dawa", "gossip-simclr"),
    *("dino-multi-crop", "swav-queue-matched", "tuning-norm"),
)
STRATEGY_RUNS = {name: test_digests.RUNS[name] for name in DIGESTS}
RUNS = {**DEFAULT, **METHOD_RUNS, **EVALUATION_RUNS, **OTHER_RUNS, **STRATEGY_RUNS}
TOLERANCES = {"secure": 5e-3}
OTHER_CODE = ("training", "augmentation.augmentation", "augmentation.operations", "regularizers.fur")


def run_on_device(overrides: list[str]) -> int:
    """Run in the accelerator's process, and return how many operators the device has run."""
    before = torch.ops.pretend.calls()
    run(overrides)
    return torch.ops.pretend.calls() - before


def compare(accelerator, folder: Path, overrides: list[str], *, atol: float = 0.0) -> None:
    """Run on the CPU and on the device at the same time, and compare all numbers of the run folders."""
    if not any(override.startswith("encoder=") for override in overrides):
        overrides = ["encoder.width=4", *overrides]
    calls = accelerator(run_on_device, [*BASE, *overrides, f"output_dir={folder / 'gpu'}"])
    run([*BASE, *overrides, "device=cpu", f"output_dir={folder / 'cpu'}"])
    assert calls.result() > OF_A_RUN
    assert_equal(numbers_of(folder / "gpu"), numbers_of(folder / "cpu"), atol=atol)


@pytest.fixture
def as_on_accelerator(monkeypatch) -> None:
    """Let runs on the CPU use the code that is meant for accelerators."""
    for module in OTHER_CODE:
        monkeypatch.setattr(f"fedssl.{module}.is_gpu", lambda device: True)


@pytest.mark.parametrize("name", some(RUNS, default=DEFAULT))
@pytest.mark.usefixtures("as_on_accelerator")
def test_a_run_gives_the_numbers_of_the_cpu(accelerator, name, tmp_path):
    compare(accelerator, tmp_path, RUNS[name], atol=TOLERANCES.get(name, 0.0))


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", ["simclr", "medical", "microscopy"])
def test_other_code_for_accelerators_gives_nearly_the_same_numbers(accelerator, recipe, tmp_path):
    channels = RGB if recipe == "simclr" else []
    compare(accelerator, tmp_path, [f"augmentation={recipe}", *channels], atol=1e-4)
