"""What a run folder is begun with."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.base import ImageData
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.partition import Partition
from server_app.build import ClientData
from server_app.run_folder import RunFolder


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
