"""`fedssl-runs verify`: the encoder of a run that the user's own package builds."""

from pathlib import Path

from torch import nn

from fedssl.export import save_encoder
from fedssl.runs.verify import verify_run
from tests.runs import flip_bit, write_run


def test_an_encoder_of_the_users_package_is_read_completely(tmp_path: Path):
    folder = write_run(tmp_path / "run", [], final={})
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "overrides.yaml").write_text("[]\n")
    file = folder / "encoder.pt"

    def save(target: str) -> None:
        settings = {"_target_": target, "channels": 1, "size": 8}
        save_encoder(file, nn.Linear(4, 64), settings=settings, mean=[0.5], std=[0.5], metadata={})

    save("fedssl.encoders.unknown")
    assert "which is not part of fedssl" in verify_run(folder).problems[0]
    save("mylab.encoders.tiny")
    assert verify_run(folder).problems == ()
    flip_bit(file, file.stat().st_size // 2)
    assert "is damaged" in verify_run(folder).problems[0]
