"""Position embeddings of weights from elsewhere, also of this project's exports."""

from itertools import product
from pathlib import Path

import pytest
import torch

from fedssl.encoders import vit_tiny
from fedssl.errors import InputError
from fedssl.export import save_encoder
from fedssl.export.formats import export
from fedssl.export.source import ExportSource
from fedssl.pretrained.loading import load_pretrained
from fedssl.pretrained.positions import adapt_positions

SMALL = {"channels": 3, "size": 8, "patch": 4, "depth": 1, "width": 32, "heads": 2}


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_positions_are_interpolated_and_tokens_before_them_kept(prefix):
    """Bicubically: 2 x 2 patches (a, b; c, d) become 1 x 1 in their middle, whose weights are those of t = 0.5.

    With Keys' kernel and A = -0.75, weights of the four neighbors along an axis are -0.09375, 0.59375, 0.59375,
    -0.09375; the outer neighbors repeat the border, so that both values have 0.5: the mean of a, b, c and d.
    """
    tokens = torch.rand(1, prefix, 3)
    patches = torch.tensor([1.0, 2.0, 3.0, 10.0]).reshape(1, 4, 1).expand(1, 4, 3)
    adapted = adapt_positions(torch.cat((tokens, patches), dim=1), side=1, prefix=prefix)
    assert torch.equal(adapted[:, :prefix], tokens)
    torch.testing.assert_close(adapted[0, prefix:], torch.full((1, 3), 4.0))


def test_positions_of_the_same_square_and_without_prefix():
    patches = torch.rand(1, 9, 4)
    assert torch.equal(adapt_positions(patches, side=3, prefix=0), patches)
    with_token = adapt_positions(patches, side=3, prefix=1)  # the source has no position for the class token
    assert torch.equal(with_token[:, 1:], patches)
    assert with_token[:, :1].eq(0).all()
    assert adapt_positions(torch.rand(1, 9 + 5, 4), side=3, prefix=1) is None  # registers that the encoder lacks


@pytest.mark.parametrize(("positions", "pool", "registers"), product(("learned", "sincos"), ("token", "mean"), (0, 2)))
def test_exports_for_timm_are_initial_weights(tmp_path: Path, positions: str, pool: str, registers: int):
    settings = {**SMALL, "positions": positions, "pool": pool, "registers": registers}
    encoder, source, target = vit_tiny(**settings).eval(), tmp_path / "encoder.pt", tmp_path / "x.timm.safetensors"
    stored = {"_target_": "fedssl.encoders.vit_tiny", **settings}
    save_encoder(source, encoder, settings=stored, mean=[0.5] * 3, std=[0.5] * 3, metadata={})
    export(ExportSource.read(source), "timm", target)
    torch.manual_seed(1)
    started, images = vit_tiny(**settings).eval(), torch.rand(2, 3, 8, 8)
    adapted = "the register tokens by their positions" in load_pretrained(started, str(target))
    assert adapted == (registers > 0 and positions == "learned")
    torch.testing.assert_close(started(images), encoder(images), rtol=0, atol=1e-6)
    larger = vit_tiny(**{**settings, "size": 16})
    load_pretrained(larger, str(target))
    assert larger(torch.rand(2, 3, 16, 16)).isfinite().all()


def test_positions_of_registers_are_added_to_them(tmp_path: Path):
    """A register r with the position p enters the first block as r + p, as a register r + p without position does."""
    theirs = vit_tiny(**SMALL, positions="learned", registers=2).state_dict()
    expected = {name: value.clone() for name, value in theirs.items()}
    of_registers, positions = torch.rand(1, 2, 32), theirs["encoder.pos_embedding"]
    theirs["encoder.pos_embedding"] = torch.cat((positions[:, :1], of_registers, positions[:, 1:]), dim=1)
    torch.save(theirs, tmp_path / "theirs.pt")
    ours = vit_tiny(**SMALL, positions="learned", registers=2)
    load_pretrained(ours, str(tmp_path / "theirs.pt"))
    expected["register_tokens"] += of_registers
    torch.testing.assert_close(dict(ours.state_dict()), expected, rtol=0, atol=0)


def test_positions_of_patches_alone_are_not_those_of_registers(tmp_path: Path):
    """Nine positions are those of 3 x 3 patches, or of a class token, 4 registers and 2 x 2 patches."""
    for size, is_folded in ((8, True), (16, False)):
        ours = vit_tiny(**{**SMALL, "size": size}, positions="learned", registers=4)
        theirs = {**ours.state_dict(), "encoder.pos_embedding": torch.rand(1, 9, 32)}
        torch.save(theirs, tmp_path / f"{size}.pt")
        assert ("by their positions" in load_pretrained(ours, str(tmp_path / f"{size}.pt"))) == is_folded
        stored = torch.load(tmp_path / f"{size}.pt")["register_tokens"]
        assert torch.equal(ours.register_tokens, stored) != is_folded


def test_positions_that_the_encoder_does_not_compute_are_refused(tmp_path: Path):
    fixed = vit_tiny(**SMALL, positions="sincos")
    learned = vit_tiny(**SMALL, positions="learned").state_dict()
    learned["encoder.pos_embedding"] = fixed.positions(2) + 0.01
    torch.save(learned, tmp_path / "others.pt")
    with pytest.raises(InputError, match=r"1 are unexpected \(encoder.pos_embedding\); set encoder.positions=learned$"):
        load_pretrained(fixed, str(tmp_path / "others.pt"))
    registers = vit_tiny(**SMALL, positions="learned", registers=2).state_dict()
    registers["encoder.pos_embedding"] = torch.rand(1, 7, 32)
    torch.save(registers, tmp_path / "registers.pt")
    for pool in ("token", "mean"):
        remedy = "set encoder.registers to the number of register tokens of the weights$"
        remedy = remedy if pool == "token" else f"set encoder.pool=token and {remedy}"
        with pytest.raises(InputError, match=f"; {remedy}"):
            load_pretrained(vit_tiny(**SMALL, positions="learned", pool=pool), str(tmp_path / "registers.pt"))


def test_fixed_positions_in_half_precision_and_beside_another_class_token(tmp_path: Path):
    fixed = vit_tiny(**SMALL, positions="sincos")
    stored = {**fixed.state_dict(), "encoder.pos_embedding": fixed.positions(2)}
    torch.save({name: value.bfloat16() for name, value in stored.items()}, tmp_path / "half.pt")
    load_pretrained(vit_tiny(**SMALL, positions="sincos"), str(tmp_path / "half.pt"))
    with pytest.raises(InputError, match=r"1 are unexpected \(class_token\); set encoder.pool=token$"):
        load_pretrained(vit_tiny(**SMALL, positions="sincos", pool="mean"), str(tmp_path / "half.pt"))
