import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import fedssl
from examples import without_engine

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "flwr"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
"""


def test_probes_are_printed_and_the_script_is_short(monkeypatch, capsys):
    monkeypatch.setattr(without_engine, "LinearProbe", partial(fedssl.evaluation.LinearProbe, max_iterations=5))
    assert len(Path(without_engine.__file__).read_text().splitlines()) < 80
    without_engine.main(rounds=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["pixels", "untrained", "federated"]
    assert all(re.fullmatch(r"\w+ +knn [\d.]+% linear [\d.]+%", line) for line in lines)
    assert lines[1].split()[1:] != lines[2].split()[1:]


@pytest.mark.parametrize("rounds", ["x", "-1", "--help"])
def test_wrong_numbers_of_rounds_are_refused(rounds, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["without_engine.py", rounds])
    with pytest.raises(SystemExit, match=f"ROUNDS={rounds} is not a number of rounds"):
        runpy.run_path(without_engine.__file__, run_name="__main__")


USE = """
import torch
from fedssl.datasets.images import TensorImages
import fedssl
labels = torch.arange(100) % 4
images = TensorImages(torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8))
data = fedssl.partition.PartitionInput(
    labels=labels, images=fedssl.partition.ImageSubset(images, torch.arange(100)), num_clients=5, seed=0
)
assert sum(map(len, fedssl.partition.dirichlet(data, alpha=1.0, min_size=2))) == 100
z = torch.randn(8, 4)
assert fedssl.losses.nt_xent(z, z, temperature=0.5) > 0
labeled = fedssl.evaluation.LabeledImages(images, labels)
pixels = fedssl.evaluation.EvaluationInput(
    encoder=None, train=labeled, test=labeled, mean=(0.5,), std=(0.5,), device=torch.device("cpu")
)
for probe in (fedssl.evaluation.KNN(k=1), fedssl.evaluation.LinearProbe()):
    (score,) = fedssl.evaluation.evaluate(probe, pixels, seed=0).values()
    assert score.value == 1  # the test images are those of the training
"""


def test_public_names_need_neither_ray_nor_flower():
    done = subprocess.run([sys.executable, "-c", BLOCKED + USE], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("package", [fedssl.losses, fedssl.partition, fedssl.evaluation], ids=lambda p: p.__name__)
def test_public_names_exist(package):
    assert package.__all__
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
