"""Processes that find their libraries imported: forked from one that has imported them, 3 to 9 s of a core cheaper each.

    python tests/forks/server.py FOLDER trainer &      # for torchrun, trainer/main.py, engines of our own
    python tests/forks/server.py FOLDER engine &       # for Ray's workers that serve a vLLM
    python tests/forks/server.py FOLDER torch &        # for what wants nothing of ours yet: pytest, benchmarks, `python -c`
    FOLDER/python trainer/main.py run.steps=2 ...      # as python would, from the first of them

Modules that follow KIND are imported in place of MODULES.

FOLDER/python (client.py) takes Python's place, and FOLDER has torchrun and marsrl too: what they are told to run is forked from
a server, with the environment, the directory, the open files and the exit status that a process of its own would have; signals
reach it. What no server is for, or would import otherwise (see _EARLY), is run by the real Python. torchrun that is forked forks
its ranks, and Ray that a forked process starts has its workers from here.

A server ends with the process that started it, and all that it has forked ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from forked import let_ray_fork

ROOT = Path(__file__).resolve().parents[2]
# What is read when a library is imported, or when the process starts: asked for otherwise, it takes a process of its own.
_EARLY = ("ATEN_", "CUDA", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON",
          "TOKENIZERS_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_LOGS", "TRANSFORMERS_", "TRITON_")  # fmt: skip
_EARLY_FOR_VLLM = {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_OF_TORCHRUN = "PYTHON_EXEC"  # what it starts ranks with
_PATH = "PYTHONPATH"
_LATE = (_OF_TORCHRUN, "PYTHONBREAKPOINT")
_TORCHRUN = "torch.distributed.run"
_PYTEST = "pytest"
# Ray reads its variables when vLLM asks for it, and each worker has others: it asks again in the forked process.
_ASKS_FOR_RAY = "vllm.v1.executor.ray_utils"
MODULES = {
    "trainer": (
        "preloaded",
        "torch._dynamo",
        _TORCHRUN,
        "transformers",
        "marsrl.rollout.engines.local.engine",
        "marsrl.trainer.checks.preflight",
        "marsrl.trainer.build",
        "marsrl.trainer.loop",
    ),
    "engine": ("vllm.entrypoints.llm", "marsrl.rollout.engines.vllm.engine"),
    "torch": ("torch._dynamo", "transformers", "pydantic", "hypothesis.strategies", _PYTEST),
}
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """What a client asks for. words: of the command line, behind `python`."""

    words: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]  # its stdin, stdout, stderr


def serve(listening: socket.socket, began: Mapping[str, str], late: Sequence[str] = _LATE) -> Order:
    """Forks a process for each client; returns in those alone, with what they are to run.

    began: the environment at the start. late: variables that may be others, though their names are of _EARLY.
    """
    by_imports = {name: value for name, value in os.environ.items() if began.get(name) != value}
    early = _early(os.environ, late)
    with selectors.DefaultSelector() as ready:
        ready.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is listening:
                    client = listening.accept()[0]
                    order = _receive(client)
                    if order is None:  # it has gone
                        client.close()
                        continue
                    server, pid = os.getpid(), 0
                    is_ours = _early(by_imports | order.environment, late) == early
                    if is_ours and (pid := os.fork()) == 0:
                        _end_with(server)
                        for file in [client, *(known.fileobj for known in ready.get_map().values())]:
                            os.close(file if isinstance(file, int) else file.detach())  # type: ignore[union-attr]
                        ready.close()
                        order.environment.update(by_imports)
                        return order
                    for file in order.files:
                        os.close(file)
                    client.sendall(struct.pack("i", pid))
                    if not is_ours:
                        client.close()
                        continue
                    ended = os.pidfd_open(pid)
                    ready.register(ended, selectors.EVENT_READ, (pid, client, ended))
                    ready.register(client, selectors.EVENT_READ, (pid, client, ended))
                else:
                    _settle(ready, key)


def _settle(ready: selectors.DefaultSelector, key: selectors.SelectorKey) -> None:
    """A process has ended, and its client is told; or the client has been killed, and the process is."""
    pid, client, ended = key.data
    if client.fileno() < 0:
        return  # both in one round
    if key.fileobj is client:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ready.unregister(ended)
    ready.unregister(client)
    os.close(ended)
    if key.fileobj is not client:
        client.sendall(struct.pack("i", status))
    client.close()


def _receive(client: socket.socket) -> Order | None:
    head, files, _, _ = socket.recv_fds(client, 4, 3)
    if len(head) < 4:
        return None
    length, told = struct.unpack("i", head)[0], b""
    while len(told) < length:
        if not (part := client.recv(length - len(told))):
            return None
        told += part
    words, environment, directory = json.loads(told)
    return Order(words, environment, directory, files)


def _early(environment: Mapping[str, str], late: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_EARLY) and name not in late}


def _end_with(process: int) -> None:
    """This process is killed when that one, its parent, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != process:
        os._exit(1)  # it had ended before


def become(order: Order, kind: str, python: str) -> None:
    """Run what was asked for, as the main program of this process."""
    os.setsid()
    for file, place in zip(order.files, (0, 1, 2), strict=True):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    if kind == "engine":
        importlib.reload(sys.modules[_ASKS_FOR_RAY])
        sys.executable = python
    elif kind == "torch":
        sys.path[1:1] = filter(None, order.environment.get(_PATH, "").split(os.pathsep))
        if _PYTEST not in order.words:  # some that its tests start import everything themselves
            sys.executable = python
    elif _TORCHRUN in order.words:
        os.environ[_OF_TORCHRUN] = python
    else:
        let_ray_fork(python)
    words = iter(order.words)
    for word in words:
        if word == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        elif word == "-B":
            sys.dont_write_bytecode = True
        elif word.startswith("-W"):
            action = word.removeprefix("-W") or next(words)
            sys.warnoptions.append(action)
            warnings.simplefilter(action)  # type: ignore[arg-type]
        elif word == "-c":
            program = compile(next(words), "<string>", "exec")
            sys.argv[:] = [word, *words]
            sys.path[0] = ""
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, vars(sys.modules["__main__"]))
        elif word == "-m":
            module = next(words)
            sys.argv[:] = [module, *words]
            sys.path[0] = order.directory
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [word, *words]
            sys.path[0] = str(Path(word).resolve().parent)
            if "/benchmarks/" in word:
                sys.executable = python
            runpy.run_path(word, run_name="__main__")


def listen(folder: Path, kind: str) -> socket.socket:
    """Where clients of this kind come; they wait there until all is imported."""
    client = folder / f"python.{kind}"
    client.write_text(f"#!{sys.executable} -IS\n{Path(__file__).with_name('client.py').read_text()}")
    client.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / kind))
    listening.listen(64)
    client.rename(folder / "python")
    for command in ("torchrun", "marsrl"):
        with contextlib.suppress(FileExistsError):  # another server's
            (folder / command).symlink_to("python")
    return listening


def preload(modules: Sequence[str]) -> None:
    """Import them. Threads would not be forked: none may be left.

    Raises:
        RuntimeError: a library has started one.
    """
    sys.path.insert(1, str(ROOT / "tests" / "ranks"))  # preloaded
    gc.disable()
    sys.modules["ray"] = None  # type: ignore[assignment]  # an ImportError
    for name in modules:
        importlib.import_module(name)
    del sys.modules["ray"]
    gc.freeze()
    gc.enable()
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"the libraries have started {num_threads - 1} thread(s), which a forked process would lack")


def main(folder: Path, kind: str, modules: Sequence[str]) -> Order:
    """The server; returns in the processes that it forks.

    Raises:
        OSError: a kernel without pidfd_open (before Linux 5.3), before any client can come.
    """
    os.close(os.pidfd_open(os.getpid()))
    _end_with(os.getppid())
    if kind == "engine":
        os.environ.update(_EARLY_FOR_VLLM)
    began, listening = dict(os.environ), listen(folder, kind)
    preload(modules or MODULES[kind])
    return serve(listening, began, (*_LATE, _PATH) if kind == "torch" else _LATE)  # which has imported nothing of ours


if __name__ == "__main__":
    _FOLDER = Path(sys.argv[1]).resolve()
    become(main(_FOLDER, sys.argv[2], sys.argv[3:]), sys.argv[2], str(_FOLDER / "python"))
