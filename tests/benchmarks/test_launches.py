"""Launches of a training step on a GPU, counted on a CPU, must not increase."""

import pytest

from benchmarks.launches import count


@pytest.mark.parametrize(
    ("overrides", "max_launches"),
    [
        pytest.param(["encoder=resnet18", "dataset.size=32", "method=byol"], 940, marks=pytest.mark.heavy),
        pytest.param(["regularizer=fur"], 930, marks=pytest.mark.heavy),
        (["regularizer=fur", "regularizer.variant=tangent_swd"], 345),
        (["method=byol", "regularizer=fur", "cuda_graphs=true", "optimizer.fused=true"], 90),
    ],
)
def test_launches_of_a_step_and_of_an_epoch(overrides, max_launches):
    batch = 2 if "encoder=resnet18" in overrides else 8  # some CPUs are slow in bfloat16
    step, epoch, _ = count("precision=bf16", "dataset.size=8", *overrides, batch=batch)
    assert step.launches <= max_launches
    assert (step.copies, step.waits) == (0, 0)
    assert (epoch.copies, epoch.waits) == (2, 1)  # places of the images and parameters of the views; the loss
