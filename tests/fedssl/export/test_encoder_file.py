"""Encoder files: exact round trips, and rejection of other files."""

import copy
import pickle
import resource
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from fedssl.encoders import Encoder, conv_small, resnet18, vit_tiny
from fedssl.errors import InputError
from fedssl.export import load_encoder, read_content, save_encoder, saved_target
from fedssl.export.weights import write_safetensors

SMALL = {"_target_": "fedssl.encoders.conv_small", "channels": 3, "size": 16, "width": 4}
MEAN, STD = (0.5, 0.25, 0.125), (0.5, 0.25, 1.0)
METADATA = {"method": "simclr", "strategy": "l_dawa", "round": 7, "dataset": "cifar10"}


def save(path: Path, **changes: Any) -> Path:
    settings = changes.pop("settings", SMALL)
    encoder = changes.pop("encoder", None) or conv_small(channels=3, size=16, width=4)
    arguments = {"settings": settings, "mean": MEAN, "std": STD, "metadata": METADATA} | changes
    save_encoder(path, encoder, **arguments)
    return path


def rewrite(path: Path, **changes: Any) -> None:
    content = torch.load(path, weights_only=True)
    torch.save(content | changes, path)


VIT = {"channels": 3, "size": 8, "patch": 2, "depth": 2}


@pytest.mark.parametrize(
    ("encoder", "settings"),
    [
        (conv_small(channels=3, size=16, width=4), SMALL),
        (
            resnet18(channels=3, size=9),
            {"_target_": "fedssl.encoders.resnet18", "channels": 3, "size": 9, "stem": "small"},
        ),
        (vit_tiny(channels=3, size=8, patch=2, depth=2), {"_target_": "fedssl.encoders.vit_tiny", **VIT}),
        (
            vit_tiny(channels=3, size=8, patch=2, depth=2, positions="sincos"),
            {"_target_": "fedssl.encoders.vit_tiny", **VIT, "positions": "sincos"},
        ),
    ],
    ids=["conv_small", "resnet18", "vit_tiny", "fixed_positions"],
)
def test_round_trip_is_exact(tmp_path: Path, encoder, settings: dict[str, Any]) -> None:
    encoder = copy.deepcopy(encoder)
    size = settings["size"]
    encoder.train()(torch.rand(4, 3, size, size))  # moves the running statistics
    loaded = load_encoder(save(tmp_path / "encoder.pt", encoder=encoder, settings=settings))

    assert not loaded.training
    assert list(loaded.state_dict()) == list(encoder.state_dict())
    assert all(torch.equal(value, encoder.state_dict()[name]) for name, value in loaded.state_dict().items())
    images = torch.rand(2, 3, size, size)
    assert torch.equal(loaded(images), encoder.eval()(images))
    assert loaded.feature_dim == encoder.feature_dim
    assert (loaded.channels, loaded.size, loaded.mean, loaded.std) == (3, size, MEAN, STD)
    assert loaded.metadata == METADATA


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "encoder.pt")
    old = path.read_bytes()

    def half(content: object, stream: BinaryIO) -> None:
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_encoder(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps([1, 2])], ids=["empty", "text", "pickle"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "encoder.pt"
    path.write_bytes(content)
    assert "damaged or not an encoder's file" in refused(path)


@pytest.mark.parametrize("content", [[1], {"format": "other"}, {"weights": {}}], ids=["list", "other", "weights"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "encoder.pt")
    assert "does not hold an encoder" in refused(tmp_path / "encoder.pt")


def test_a_format_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    torch.save({"format": "fedssl-encoder-3", "layers": []}, tmp_path / "encoder.pt")
    readable = "this version reads fedssl-encoder-1 and fedssl-encoder-2; upgrade fedssl here"
    assert f"has the format fedssl-encoder-3 and {readable}" in refused(tmp_path / "encoder.pt")


def adapted(path: Path, **changes: Any) -> Path:
    """Save an encoder with adapters after the last two of its four stages."""
    encoder = conv_small(channels=3, size=16, width=4)
    encoder.add_adapters(bottleneck=3, blocks=2)
    torch.nn.init.normal_(encoder.adapters["4"].up.weight)
    return save(path, encoder=encoder, **changes)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_adapters_are_rebuilt_from_the_file_alone(tmp_path: Path, ending: str) -> None:
    path = adapted(tmp_path / "encoder.pt")
    content = read_content(path)
    assert (content["format"], content["adapters"]) == ("fedssl-encoder-2", {"bottleneck": 3, "blocks": 2})
    if ending == ".safetensors":
        path = tmp_path / "encoder.safetensors"
        write_safetensors(path, content)
    loaded = load_encoder(path)
    assert list(loaded.adapters) == ["3", "4"]
    assert loaded.state_dict().keys() == content["weights"].keys()
    assert all(torch.equal(value, content["weights"][name]) for name, value in loaded.state_dict().items())
    images = torch.rand(2, 3, 16, 16)
    plain = conv_small(channels=3, size=16, width=4).eval()
    plain.load_state_dict({name: value for name, value in content["weights"].items() if "adapters" not in name})
    assert not torch.allclose(plain(images), loaded(images))
    again = save(tmp_path / "again.pt", encoder=loaded)  # an encoder of a file is saved with its adapters, too
    assert torch.equal(load_encoder(again)(images), loaded(images))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapters": {"bottleneck": 4, "blocks": 2}}, "do not fit its settings"),
        ({"adapters": {"bottleneck": 3, "blocks": 1}}, "do not fit its settings"),
        ({"adapters": {"bottleneck": 3, "blocks": 5}}, "the encoder has 4 stages"),
        ({"adapters": {"bottleneck": -3, "blocks": 2}}, "bottleneck=-3 must be an integer of at least 1"),
        ({"adapters": {"bottleneck": 3, "blocks": "x"}}, "blocks=x must be an integer of at least 1"),
        ({"adapters": {"bottleneck": 10**9, "blocks": 4}}, "do not fit its settings"),
        ({"adapters": {"bottleneck": 3, "blocks": 2, "evil": 1}}, "do not fit its settings"),
        ({"adapters": [3, 2]}, "does not hold an encoder"),
        ({"format": "fedssl-encoder-1"}, "does not hold an encoder"),
    ],
    ids=str,
)
def test_invalid_adapters_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = adapted(tmp_path / "encoder.pt")
    rewrite(path, **changes)
    assert reason in refused(path)


def test_adapters_of_an_encoder_of_another_class_are_refused(tmp_path: Path) -> None:
    path = adapted(tmp_path / "encoder.pt", settings={**SMALL, "_target_": "mine.Encoder"})
    assert len(load_encoder(path, build=conv_small).adapters) == 2
    with pytest.raises(InputError, match="do not fit its settings"):
        load_encoder(path, build=lambda channels, size, width: torch.nn.Linear(size, width))


def test_one_changed_byte_of_a_weight_is_detected(tmp_path: Path) -> None:
    """torch.load accepts such a file silently."""
    encoder = conv_small(channels=3, size=16, width=4)
    path = save(tmp_path / "encoder.pt", encoder=encoder)
    content = bytearray(path.read_bytes())
    place = content.find(encoder.blocks[3][0].weight.detach().numpy().tobytes())
    content[place + 100] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    assert "checksum" in refused(path)


@pytest.mark.parametrize(
    "target",
    [
        *("os.system", "fedssl.encoders.torch", "fedssl.encoders._resnet", "fedssl.encoders.factory.conv_small"),
        *("fedssl.encoders.Encoder", "conv_small", None, []),
    ],
)
def test_only_encoders_of_this_package_are_built(tmp_path: Path, target: object) -> None:
    path = save(tmp_path / "encoder.pt", settings={**SMALL, "_target_": target})
    assert f"holds the encoder {target}" in refused(path)


def test_an_encoder_of_timm_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"_target_": "fedssl.encoders.timm", "name": "test_resnet", "channels": 3, "size": 32}
    file = save(tmp_path / "encoder.pt", settings=settings)
    monkeypatch.setattr("fedssl.encoders.library.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match="encoder.pt needs timm; install it: uv sync --extra timm, or pip install timm$"
    ):
        load_encoder(file)


def test_a_user_encoder_is_built_by_the_given_function(tmp_path: Path) -> None:
    def mine(*, channels: int, size: int, breadth: int) -> Encoder:
        return conv_small(channels=channels, size=size, width=breadth)

    settings = {"_target_": "package.mine", "channels": 3, "size": 16, "breadth": 4}
    encoder = mine(channels=3, size=16, breadth=4)
    path = save(tmp_path / "encoder.pt", encoder=encoder, settings=settings)
    assert saved_target(path) == "package.mine"
    assert "holds the encoder package.mine, which is not part of fedssl; pass the function that builds it" in refused(
        path
    )
    assert "load_encoder(path, build=mine)" in refused(path)
    loaded = load_encoder(path, build=mine)
    assert all(torch.equal(value, encoder.state_dict()[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(InputError, match="do not fit its settings"):
        load_encoder(path, build=conv_small)


@pytest.mark.parametrize(
    "settings",
    [{**SMALL, "width": 5}, {**SMALL, "colour": 1}, {**SMALL, "size": 1}, {**SMALL, "width": "wide"}],
    ids=["width", "unknown", "size", "type"],
)
def test_settings_that_do_not_fit_the_weights_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert "do not fit its settings" in refused(save(tmp_path / "encoder.pt", settings=settings))


def test_missing_and_extra_weights_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "encoder.pt")
    weights = torch.load(path, weights_only=True)["weights"]
    rewrite(path, weights=weights | {"extra": torch.zeros(1)})
    assert "extra" in refused(path)
    weights.pop("blocks.0.0.weight")
    rewrite(path, weights=weights)
    assert "blocks.0.0.weight" in refused(path)


HUGE = {"conv_small": {"width": 10**7}, "vit_tiny": {"width": 12 * 10**5, "heads": 1, "positions": "learned"}}


@pytest.mark.parametrize("name", HUGE)
def test_settings_larger_than_the_weights_need_no_memory(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "encoder.pt")
    content = torch.load(path, weights_only=True)
    content["encoder"] = {"_target_": f"fedssl.encoders.{name}", "channels": 3, "size": 16, **HUGE[name]}
    torch.save(content, path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="do not fit its settings"):
        load_encoder(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("mean", value) for value in ([0.5], [0.5, "x", 0.5], [float("nan")] * 3, None)),
        *(("std", value) for value in ([0.0] * 3, 3)),
        ("weights", [1]),
        ("metadata", "x"),
        ("encoder", {"_target_": "fedssl.encoders.conv_small", "channels": "3", "size": 16}),
        ("encoder", {"_target_": "fedssl.encoders.conv_small", "channels": 3, "size": 10**9}),
    ],
)
def test_values_that_no_encoder_has_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = save(tmp_path / "encoder.pt")
    content = torch.load(path, weights_only=True)
    torch.save({**content, key: value}, path)
    with pytest.raises(InputError, match="does not hold an encoder"):
        load_encoder(path)


def test_a_file_without_adapters_keeps_its_format(tmp_path: Path) -> None:
    content = torch.load(save(tmp_path / "encoder.pt"), weights_only=True)
    assert content["format"] == "fedssl-encoder-1"
    assert content.keys() == {"format", "encoder", "mean", "std", "metadata", "weights"}
