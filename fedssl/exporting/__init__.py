"""A trained encoder for other programs: a file or a folder of their format, compared with ours before it is left there.

``formats.py`` has the table of formats, ``cli.py`` the command ``fedssl-export``, and every format a module of its own.
"""
