"""Atomic writes: what a failed or interrupted write raises and leaves."""

import errno
import os

import pytest
import torch

from fedssl.atomic_files import atomic_write


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_an_interrupted_write_raises_its_cause_and_keeps_the_file(error, tmp_path):
    """Closing torch's writer after an incomplete write raises another error."""
    file = tmp_path / "weights.pt"
    file.write_bytes(b"previous")

    class Failing:
        """A stream that fails after some bytes."""

        def __init__(self, stream):
            self.stream, self.left = stream, 3000

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise error
            return self.stream.write(data)

        def flush(self):
            self.stream.flush()

    with pytest.raises(type(error)) as raised:
        atomic_write(file, lambda stream: torch.save({"w": torch.zeros(10_000)}, Failing(stream)))
    assert raised.value is error
    assert file.read_bytes() == b"previous"
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_an_error_of_writing_names_the_file(tmp_path):
    def fail(stream):
        raise OSError(errno.EFBIG, "File too large")

    with pytest.raises(OSError, match="File too large") as caught:
        atomic_write(tmp_path / "out.csv", fail)
    assert caught.value.filename == str(tmp_path / "out.csv")
