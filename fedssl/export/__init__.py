"""Export of a trained encoder for other programs, compared with the encoder before it is stored.

``formats.py`` has the formats, ``cli.py`` the command ``fedssl-export``; every format has its own module.
"""

from fedssl.export.encoder_file import (
    describe_encoder,
    load_encoder,
    load_user_encoder,
    load_weights,
    read_content,
    save_encoder,
    saved_target,
)
from fedssl.export.preprocess import Preprocess

__all__ = [
    "Preprocess",
    "describe_encoder",
    "load_encoder",
    "load_user_encoder",
    "load_weights",
    "read_content",
    "save_encoder",
    "saved_target",
]
