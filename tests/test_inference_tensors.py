"""No network runs in inference mode, because an inference tensor can neither be trained nor copied."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from simulation.run import run

TINY = ["engine=local", "threads=1", "dataset.limit=60", "dataset.test_limit=30", "num_clients=2"]
TINY += ["local_epochs=1", "rounds=2", "evaluate_every=2"]
VIT = ["encoder=vit_tiny", "encoder.depth=2", "encoder.width=12", "encoder.patch=4"]
FEATARC = ["strategy=featarc", "strategy.num_images=16", "final_evaluation=knn"]
FINE_TUNE = ["final_evaluation=fine_tune", "final_evaluation.epochs=1", "final_evaluation.shares=[1.0]"]
PROBE = ["evaluation=l_dawa/linear", "evaluation.epochs=1"]


@contextmanager
def all_networks_checked() -> Iterator[list[str]]:
    """Check every module before it runs; yields the names of their classes."""
    classes = []

    def check(module: nn.Module, args: tuple[object, ...]) -> None:
        assert not torch.is_inference_mode_enabled(), type(module)
        tensors = [*module.parameters(), *module.buffers(), *(arg for arg in args if isinstance(arg, torch.Tensor))]
        assert not any(tensor.is_inference() for tensor in tensors), type(module)
        classes.append(type(module).__name__)

    handle = register_module_forward_pre_hook(check)
    try:
        yield classes
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([*FEATARC, "encoder.width=4", "regularizer=alignment", "collapse_images=16"], "ConvSmall"),
        (["method=supervised", "encoder.width=4", "final_evaluation=none"], "Linear"),
        ([*VIT, "method=moco_v3", *PROBE, *FINE_TUNE], "ViTEncoder"),
    ],
    ids=["featarc", "supervised", "vit_tiny"],
)
def test_networks_of_a_run_have_no_inference_tensors(overrides, expected, tmp_path):
    with all_networks_checked() as classes:
        run([*TINY, f"output_dir={tmp_path}", *overrides])
    assert expected in classes


def test_a_network_in_inference_mode_is_detected():
    with all_networks_checked() as classes:
        with torch.inference_mode(), pytest.raises(AssertionError, match="Linear"):
            nn.Linear(1, 1)(torch.zeros(1, 1))
        with torch.inference_mode():
            built_in_inference_mode = nn.Linear(1, 1)
        with pytest.raises(AssertionError, match="Linear"):
            built_in_inference_mode(torch.zeros(1, 1))
    assert not classes
