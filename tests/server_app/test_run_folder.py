"""The start of a run folder, and its move or deletion during a run."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError, RunError
from fedssl.partition import Partition
from server_app.build import ClientData
from server_app.callbacks.lines import Progress
from server_app.run_folder import RunFolder
from simulation.run import run
from tests.runs import SMALL, read_lines


def client_data(*parts):
    image_data = ImageData(TensorImages(torch.zeros(6, 1, 8, 8, dtype=torch.uint8)), torch.tensor([0, 0, 0, 1, 1, 1]))
    return ClientData(image_data, Partition([np.array(part) for part in parts]))


def test_a_resumed_run_keeps_the_images_of_clients(tmp_path):
    new = compose([f"output_dir={tmp_path / 'run'}"]).recording
    RunFolder(new, rounds=1).write_partition(client_data([0, 1, 2], [3, 4, 5]))
    folder = RunFolder(replace(new, resumed=0), rounds=2)
    folder.write_partition(client_data([0, 1, 2], [3, 4, 5]))
    with pytest.raises(InputError, match=r"partition.csv differs from the partition of this run: .*file of partition"):
        folder.write_partition(client_data([0, 1, 3], [2, 4, 5]))
    assert (tmp_path / "run" / "partition.csv").read_text().splitlines()[1:] == ["0,3,3,0", "1,3,0,3"]


@pytest.mark.parametrize("strategy", ["fedavg", "fedu"])  # with client states, whose folders are made again
def test_a_folder_that_is_moved_ends_the_run(tmp_path, monkeypatch, strategy):
    folder, append = tmp_path / "run", Progress.on_round_end

    def move(progress, end):
        append(progress, end)
        if end.state.round == 2:
            folder.rename(tmp_path / "moved")

    monkeypatch.setattr(Progress, "on_round_end", move)
    words = [*SMALL, f"strategy={strategy}", "method=byol", "rounds=4", "final_evaluation=none"]
    with pytest.raises(RunError, match="was moved or deleted during the run; move it back to its place, where"):
        run([*words, f"output_dir={folder}"])
    assert not (folder / "metrics.jsonl").exists()
    shutil.rmtree(folder, ignore_errors=True)
    (tmp_path / "moved").rename(folder)
    monkeypatch.setattr(Progress, "on_round_end", append)
    run([f"resume={folder}"])
    assert [line["round"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
