"""glibc's allocator as the process sets it."""

import os
import subprocess
import sys

import pytest

ARENAS = """
import ctypes, sys, threading
from fedssl.machine.threads import tune_allocator
if sys.argv[1] == "tuned" and not tune_allocator():
    sys.exit("another C library")
libc = ctypes.CDLL("libc.so.6")
libc.fopen.restype = ctypes.c_void_p
thread = threading.Thread(target=lambda: libc.malloc(1000))
thread.start()
thread.join()
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
@pytest.mark.parametrize(("how", "arenas"), [("tuned", 1), ("as it is", 2)])
def test_threads_share_one_arena(tmp_path, how, arenas):
    told = tmp_path / "malloc.xml"
    own = {name: value for name, value in os.environ.items() if name not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    done = subprocess.run([sys.executable, "-c", ARENAS, how, str(told)], capture_output=True, text=True, env=own)
    if "another C library" in done.stderr:
        pytest.skip("needs glibc")
    assert done.returncode == 0, done.stderr
    assert told.read_text().count("<heap nr=") == arenas
