"""The built library: what it exports, what it needs, and that one of another version is refused."""

import re
import subprocess

from marsrl.kernels import library

LIBRARY = library.FOLDER / "marsrl_cpu.so"


def test_only_our_functions_are_exported_and_all_that_python_calls():
    command = ["nm", "-D", "--defined-only", LIBRARY]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in lines.splitlines()} == {*library._CPU_FUNCTIONS, "marsrl_abi_version"}


def test_the_library_needs_neither_torch_nor_python():
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in needed and not re.search(r"NEEDED.*(cuda|torch|python)", needed)
