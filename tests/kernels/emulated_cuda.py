"""csrc/cuda compiled for the CPU (cuda_on_cpu/), in the place of the library that needs a GPU.

The same sources, the same ctypes calls: only threads and streams are made up.
"""

import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from marsrl.kernels import cuda_library, library

ROOT = Path(__file__).parents[2]


@cache
def _build() -> Path:
    """The path of the library; about 5 s, once a process."""
    path = Path(mkdtemp(prefix="marsrl-cuda-on-cpu-")) / "marsrl_cuda.so"
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    include = [f"-I{Path(__file__).parent / 'cuda_on_cpu'}", f"-I{ROOT / 'csrc' / 'include'}"]
    command = ["g++", "-std=c++17", "-O1", "-Wno-unknown-pragmas", "-shared", "-fPIC", *include, "-x", "c++"]
    subprocess.run([*command, *map(str, sources), "-o", str(path)], check=True)
    return path


def use_emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test the ops that have CUDA kernels run them, on CPU tensors."""
    found = library.open_library(_build(), cuda_library._CUDA_FUNCTIONS)
    assert not isinstance(found, str), found
    monkeypatch.setattr(cuda_library, "_cuda", lambda: found)
    monkeypatch.setattr(cuda_library, "_why_no_device", lambda: None)
    monkeypatch.setattr(cuda_library, "stream_of", lambda tensor: 0)
    monkeypatch.setattr(cuda_library, "_can_read", lambda tensor: True)
    monkeypatch.setenv("MARSRL_KERNELS", "policy_loss=cuda,linear_policy_loss=cuda,linear_logprob=cuda")
