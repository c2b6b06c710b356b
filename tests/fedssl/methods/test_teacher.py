"""The teacher's features: those of its saved encoder, computed once, in a cache of limited size."""

import os
import time

import pytest
import safetensors.torch
import torch

from fedssl.datasets.images import TensorImages
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.export import describe_encoder, load_encoder, load_weights
from fedssl.methods.teacher import TeacherFeatures, build_teacher
from tests.methods import save_teacher

DIM = 16  # of a `conv_small` of width 4


class Counting(torch.nn.Module):
    """A teacher that counts the images that it encodes."""

    feature_dim = DIM

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.images = conv_small(channels=1, size=8, width=4), 0

    def forward(self, images):
        self.images += len(images)
        return self.encoder(images)


def make_images(count: int = 20, *, channels: int = 1, size: int = 8, seed: int = 0) -> TensorImages:
    generator = torch.Generator().manual_seed(seed)
    return TensorImages(torch.randint(256, (count, channels, size, size), dtype=torch.uint8, generator=generator))


def features_of(bytes_: int = 10**6, *, size: int = 8) -> TeacherFeatures:
    return TeacherFeatures(size=size, mean=(0.3,), std=(0.4,), cache_bytes=bytes_)


def ask(features, teacher, images, indices):
    targets = features.targets(teacher, images, indices, on_step_start=lambda: None)
    return targets(indices, images[indices])


@pytest.mark.parametrize(
    "overrides",
    [
        ["encoder.width=4"],
        ["encoder.width=4", "dataset.size=12", "dataset.mean=[0.2]", "dataset.std=[0.7]"],
        ["encoder.width=4", "dataset.channels=3", "dataset.mean=[0.1,0.2,0.3]", "dataset.std=[0.4,0.5,0.6]"],
        ["encoder=vit_tiny", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch=2"],
    ],
    ids=["same", "other-size-and-statistics", "color", "vit"],
)
@pytest.mark.parametrize("cache_bytes", [0, 10**6])
def test_features_are_those_of_the_saved_encoder(tmp_path, overrides, cache_bytes):
    """The teacher of a file, and `load_encoder` with its preprocessing of the same images, which are gray."""
    file, images = save_teacher(tmp_path / "encoder.pt", *overrides), make_images()
    described, known = describe_encoder(file), load_encoder(file)
    teacher = build_teacher(described)
    load_weights(file, teacher)
    features = TeacherFeatures(
        size=described["arguments"]["size"], mean=described["mean"], std=described["std"], cache_bytes=cache_bytes
    )
    indices = torch.tensor([7, 3, 11])
    with torch.no_grad():
        gray = images[indices].expand(-1, known.channels, -1, -1)
        expected = known(known.preprocess(gray))
    found = ask(features, teacher, images, indices)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not found.requires_grad
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_features_are_computed_once_whatever_the_order():
    teacher, images, features = Counting(), make_images(), features_of()
    indices = torch.tensor([9, 2, 5, 14])
    first = ask(features, teacher, images, indices)
    assert teacher.images == 4
    shuffled = indices[torch.tensor([2, 0, 3, 1])]
    assert torch.equal(ask(features, teacher, images, shuffled), first[torch.tensor([2, 0, 3, 1])])
    assert teacher.images == 4
    targets = features.targets(teacher, images, indices, on_step_start=lambda: None)
    assert torch.equal(targets(indices[2:], images[indices[2:]]), first[2:])
    assert teacher.images == 4
    assert torch.equal(ask(features_of(), teacher, images, shuffled), first[torch.tensor([2, 0, 3, 1])])


def test_the_least_recently_used_features_are_dropped_beyond_the_limit():
    """Features of 4 images of 4 bytes times 16 have 256 bytes: two clients fit into 600."""
    teacher, images, features = Counting(), make_images(), features_of(600)
    one, two, three = torch.arange(12).split(4)
    for indices in (one, two, one, three):  # drops `two`
        ask(features, teacher, images, indices)
    assert (teacher.images, features.nbytes) == (12, 512)
    ask(features, teacher, images, one)
    assert teacher.images == 12
    ask(features, teacher, images, two)
    assert (teacher.images, features.nbytes) == (16, 512)


def test_a_description_has_plain_values(tmp_path):
    file = save_teacher(tmp_path / "encoder.pt", "encoder.width=6")
    arguments = {"channels": 1, "size": 8, "width": 6, "norm": "batch"}
    described = {"encoder": "conv_small", "arguments": arguments, "mean": [0.3053], "std": [0.3761]}
    assert describe_encoder(file) == described


DESCRIPTION = {"encoder": "conv_small", "arguments": {"channels": 1, "size": 8, "width": 4}}
DESCRIPTION |= {"mean": [0.5], "std": [0.5]}


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": None},
        {"arguments": {"channels": 1}},
        {"arguments": {"channels": 1, "size": 0}},
        {"arguments": {"channels": 1, "size": 5000}},
        {"arguments": {"channels": True, "size": 8}},
        {"mean": [0.5, 0.5]},
        {"mean": 0.5},
        {"mean": [float("nan")]},
        {"std": [0.0]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_description_is_validated(changes):
    assert build_teacher(DESCRIPTION).feature_dim == DIM
    with pytest.raises(InputError, match="method.teacher_encoder does not describe an encoder; leave it out"):
        build_teacher({**DESCRIPTION, **changes})


def test_another_process_reads_the_features_from_files(tmp_path):
    images, indices = make_images(), torch.tensor([9, 2, 5, 14])
    first, other = features_of(), features_of()
    for features in (first, other):
        features.store_in(tmp_path)
    expected = ask(first, Counting(), images, indices)
    (file,) = tmp_path.iterdir()
    teacher, again = Counting(), torch.tensor([14, 9, 5, 2])
    assert torch.equal(ask(other, teacher, images, again), expected[torch.tensor([3, 0, 2, 1])])
    assert teacher.images == 0
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "change",
    [
        lambda features, teacher, images: images.tensor[5, 0, 0, 0].bitwise_xor_(1),
        lambda features, teacher, images: next(teacher.parameters()).data.add_(1e-3),
        lambda features, teacher, images: setattr(teacher, "encoder", torch.nn.Sequential(teacher.encoder)),
        lambda features, teacher, images: setattr(features, "mean", (0.31,)),
        lambda features, teacher, images: setattr(features, "std", (0.41,)),
        lambda features, teacher, images: setattr(features._resize, "size", 9),
    ],
    ids=["image", "weight", "layer", "mean", "std", "size"],
)
def test_files_are_those_of_teacher_images_and_preprocessing(tmp_path, change):
    indices = torch.tensor([2, 5])
    for changed in (False, True):
        features, teacher, images = features_of(), Counting(), make_images()
        if changed:
            change(features, teacher, images)
        features.store_in(tmp_path)
        ask(features, teacher, images, indices)
        assert teacher.images == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-8]),
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x07"),
        lambda file: file.write_bytes(b"0" * 200),
        lambda file: safetensors.torch.save_file({"features": torch.zeros(3, DIM)}, file),
        lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    ],
    ids=["short", "another number", "no safetensors", "no checksum", "no file"],
)
def test_features_of_a_damaged_file_are_computed_again(tmp_path, damage, caplog):
    images, indices = make_images(), torch.tensor([2, 5, 9])
    for number in range(3):
        features, teacher = features_of(), Counting()
        features.store_in(tmp_path)
        found = ask(features, teacher, images, indices)
        assert teacher.images == (3, 3, 0)[number]
        assert torch.equal(found, ask(features_of(), Counting(), images, indices))
        if number == 0:
            (file,) = tmp_path.iterdir()
            damage(file)
            assert "is damaged" not in caplog.text
    assert caplog.text.count("the teacher computes its features again") == 1


def test_the_least_recently_used_files_are_deleted_beyond_the_limit(tmp_path):
    """A file of 4 images has 256 bytes of features, and less than 200 others."""
    images, (one, two, three) = make_images(), torch.arange(12).split(4)
    for number, (indices, computed) in enumerate(((one, 4), (two, 4), (one, 0), (three, 4), (one, 0), (two, 4))):
        features, teacher = features_of(1000), Counting()
        features.store_in(tmp_path)
        ask(features, teacher, images, indices)
        assert teacher.images == computed
        for file in tmp_path.iterdir():
            if time.time() - file.stat().st_mtime < 3600:  # used now: order by number
                os.utime(file, (number, number))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000


def test_a_cache_belongs_to_one_source_of_images():
    teacher, features, indices = Counting(), features_of(), torch.arange(4)
    first, second = (ask(features, teacher, make_images(seed=seed), indices) for seed in (1, 2))
    assert not torch.equal(first, second)
