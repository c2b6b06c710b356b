"""Shares and domains that only the test has, and presets with domains; files have the schema of the Hub's."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedssl.config.load import compose
from fedssl.config.settings import DataSettings
from fedssl.datasets.base import load_federated, load_split
from fedssl.datasets.holdout import stratified_holdout
from fedssl.errors import InputError
from tests.fedssl.datasets.made import make_image, png

DOMAINS = ["clipart", "real", "sketch"]


def write(path: Path, split: str, domains: list[int], *, named: bool = True) -> None:
    """Write images of value 10 * row with alternating classes, and domains as class numbers or as names."""
    images = [{"bytes": png(make_image(10 * row)), "path": None} for row in range(len(domains))]
    column = pa.array(domains) if named else pa.array([DOMAINS[number] for number in domains])
    columns = {"image": pa.array(images), "label": pa.array([row % 2 for row in range(len(domains))]), "domain": column}
    features = {"image": {"_type": "Image"}, "label": {"names": ["ant", "bee"], "_type": "ClassLabel"}}
    features |= {"domain": {"names": DOMAINS, "_type": "ClassLabel"}} if named else {}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path / f"{split}-00000-of-00001.parquet")


def settings(path: Path, preset: str, *overrides: str) -> DataSettings:
    fixed = [f"dataset={preset}", f"dataset.path={path}", "dataset.size=4", "dataset.cache=null"]
    return compose([*fixed, *overrides]).data


def held(image_data) -> list[str]:
    return [image_data.owner_names[owner] for owner in image_data.owners.tolist()]


def test_held_out_images_are_those_of_the_test_split(tmp_path: Path) -> None:
    write(tmp_path, "train", [2, 0, 1, 2, 1, 0])
    write(tmp_path, "test", [0, 2, 2, 1])
    data = settings(tmp_path, "domainnet", "dataset.held_out=sketch")
    clients, test = load_federated(data), load_split(data, "test")
    assert held(clients) == ["clipart", "real", "real", "clipart"]
    assert held(test) == ["sketch", "sketch"]
    assert clients.labels.tolist() == [1, 0, 0, 1]
    every = load_federated(settings(tmp_path, "domainnet"))
    assert torch.equal(clients.images[torch.arange(4)], every.images[torch.tensor([1, 2, 4, 5])])
    assert load_federated(data) is clients
    assert load_split(data, "train") is clients
    both = settings(tmp_path, "domainnet", "dataset.held_out=[sketch,real]")
    assert held(load_federated(both)) == ["clipart"] * 2
    assert held(load_split(both, "test")) == ["sketch", "sketch", "real"]


def test_all_held_out_images_are_the_missing_test_split(tmp_path: Path) -> None:
    write(tmp_path, "train", [2, 0, 1, 2, 1, 0], named=False)
    overrides = ["dataset.held_out=real", "dataset.test_fraction=0.5"]
    data = settings(tmp_path, "pacs", *overrides)
    assert held(load_federated(data)) == ["sketch", "clipart", "sketch", "clipart"]
    assert held(load_split(data, "test")) == ["real", "real"]
    assert len(load_split(settings(tmp_path, "pacs", *overrides, "dataset.test_limit=1"), "test").images) == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["dataset.held_out=photo"], r"there is no domain 'photo'; the training images have clipart, real, sketch"),
        (["dataset.held_out=[clipart,real,sketch]"], r"names every domain of the training images; leave one for"),
        (["dataset.held_out=real", "dataset.owner=null"], r"held_out=real needs the domain of every image but the"),
    ],
)
def test_impossible_domains_are_refused(tmp_path: Path, overrides, sentence) -> None:
    write(tmp_path, "train", [2, 0, 1, 2])
    with pytest.raises(InputError, match=sentence):
        load_federated(settings(tmp_path, "pacs", *overrides))


def test_folders_of_domains_are_owners(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        for name in ("cat", "dog"):
            (tmp_path / domain / name).mkdir(parents=True)
            make_image(7).save(tmp_path / domain / name / "1.png")
    data = settings(tmp_path, "folder", "dataset.folders=domain/class", "dataset.held_out=photo")
    assert (held(load_federated(data)), held(load_split(data, "test"))) == (["sketch"] * 2, ["photo"] * 2)


@pytest.mark.parametrize(
    ("preset", "split"),
    [("svhn", "test"), ("imagenet100", "validation"), ("mini_imagenet", "test"), ("domainnet", "test")],
)
def test_presets_read_files_of_their_schema(tmp_path: Path, preset: str, split: str) -> None:
    write(tmp_path, "train", [0, 1, 2])
    write(tmp_path, split, [0, 1])
    data = settings(tmp_path, preset)
    assert [len(load_split(data, name).images) for name in ("federated", "train", "test")] == [3, 3, 2]
    assert load_federated(data).labels.tolist() == [0, 1, 0]
    assert (load_federated(data).owners is not None) == (preset == "domainnet")


def test_hold_out_by_hand() -> None:
    # A quarter of 5, 3 and 2 images is 1.25, 0.75 and 0.5: the floors are 1, 0, 0, and as round(10 / 4) = 2 the class
    # with the largest remainder, the second, gives one more.
    labels = np.array([0] * 5 + [1] * 3 + [2] * 2)
    train, test = stratified_holdout(labels, fraction=0.25)
    assert np.bincount(labels[test], minlength=3).tolist() == [1, 1, 0]
    assert sorted([*train, *test]) == list(range(10))
    assert np.array_equal(test, stratified_holdout(labels, fraction=0.25)[1])
    everything, nothing = stratified_holdout(labels, fraction=0)
    assert everything.tolist() == list(range(10))
    assert nothing.tolist() == []
