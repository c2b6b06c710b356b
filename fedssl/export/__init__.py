"""A trained encoder for other programs: a file or a folder of their format, compared with ours before it is left there.

``formats.py`` has the table of formats, ``cli.py`` the command ``fedssl-export``, and every format a module of its own.
"""

from fedssl.export.encoder_file import (
    Preprocess,
    load_encoder,
    load_weights,
    read_content,
    save_encoder,
    saved_target,
)

__all__ = ["Preprocess", "load_encoder", "load_weights", "read_content", "save_encoder", "saved_target"]
