"""Training does without torch's compiler, and its steps are the optimizers' own."""

import functools
import subprocess
import sys

import pytest
import torch

from fedssl.machine.compiler import optimizer_step

RUN = """
import sys
from simulation.cli import run
words = ["num_clients=2", "rounds=1", "local_epochs=1", "dataset.limit=60", "encoder.width=4", "threads=1"]
run([*words, "final_evaluation=few_labels", f"output_dir={sys.argv[1]}"])
assert "torch" in sys.modules
found = sorted(name for name in sys.modules if name in ("torch._dynamo", "torch._inductor", "sympy", "torchvision"))
assert not found, found
"""


def test_a_run_does_not_import_it(tmp_path):
    ran = subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "run")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


class Own(torch.optim.SGD):
    """An optimizer with a wrapper of its own around its step."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        return super().step()


MADE = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "own": lambda weights: Own(weights, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_step_is_the_optimizers_own(kind):
    results = []
    for step in (optimizer_step, lambda optimizer: optimizer.step()):
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = MADE[kind]([weights])
        for _ in range(5):
            optimizer.zero_grad()
            (weights**3).sum().backward()
            step(optimizer)
        results.append(weights.detach())
    assert torch.equal(*results)
    assert torch.is_grad_enabled()
