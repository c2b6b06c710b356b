"""The teacher: an encoder from a file of the server's, which a method gives to clients as it is.

The file is read here and nowhere else. A device learns no path: the weights travel, once per client.
"""

import logging
from pathlib import Path

from fedssl.config.settings import DataSettings
from fedssl.errors import InputError
from fedssl.export import load_weights
from fedssl.methods.base import TEACHER, SSLMethod

log = logging.getLogger("fedssl")


def load_teacher(method: SSLMethod, file: Path | None, *, data: DataSettings) -> None:
    """Read the teacher into the server's copy of the method, from which clients get it.

    Raises
    ------
    InputError
        One of the two has no use for the other, or the file does not fit.
    """
    name = type(method).__name__
    if TEACHER not in method.static_parts:
        if file is not None:
            raise InputError(
                f"teacher={file} but {name} learns from no teacher; set method=fedca method.alignment_weight=0.1, or "
                "leave teacher out"
            )
        return
    if file is None:
        raise InputError(
            f"teacher=null but {name} is aligned with a teacher; give teacher=FILE, the encoder.pt of a run on public "
            "images, or set method.alignment_weight=0"
        )
    found = load_weights(file, method.get_submodule(TEACHER))
    here = {"size": data.size, "mean": list(data.mean), "std": list(data.std)}
    others = [f"dataset.{key}={here[key]} (there {found[key]})" for key in here if here[key] != found[key]]
    if others:
        log.warning("the teacher of %s was trained on other images than it sees here: %s", file, ", ".join(others))
