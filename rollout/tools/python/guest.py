"""The program inside the sandbox. Standard library only, because its source is passed to a bare interpreter.

It drops its rights, reports that it is ready, waits for one snippet on stdin (a socket), runs the snippet, sends back the exit
code and waits to be killed:

    argv[1]: {"uid", "tmp_inodes", "limits", "filter", "packages", "preload"} -> b"ready\\n" -> snippet -> its output -> a byte

As soon as the snippet is read, this process counts as hostile: it holds no secrets, and the host treats all its output as plain
text.
"""

from __future__ import annotations

import _signal
import ast
import ctypes
import json
import linecache
import os
import resource
import sys
import traceback
import types
from typing import Any

_FILE = "<code>"
_MOST_FRAMES = 6  # innermost frames shown of a traceback
_MOST_ERROR_CHARS = 4000
_SPARE_BYTES = 32 << 20  # memory reserved for reporting that memory has run out
_MS_REMOUNT, _MS_NOSUID, _MS_NODEV = 32, 2, 4
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _SECCOMP = 1, 4, 38, 22  # options PR_SET_... of prctl
_CAPABILITIES_V3 = 0x20080522


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))  # sock_fprog


def confine(settings: dict[str, Any]) -> None:
    """Drop the user id and capabilities, and limit the resources, of this process and all its children."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process before the trainer
    # Bubblewrap bounds a tmpfs's bytes, not its number of files.
    options = f"nr_inodes={settings['tmp_inodes']}".encode()
    must(libc.mount(None, b"/tmp", None, _MS_REMOUNT | _MS_NOSUID | _MS_NODEV, options), "remounting /tmp")
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
        libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # makes /proc/self belong to this process again
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    must(libc.capset(header, none), "capset")
    libc.prctl(_PDEATHSIG, 9, 0, 0, 0)
    for path in settings["packages"]:
        sys.path.append(path)
    for name in settings["preload"]:
        __import__(name)
    for name, value in settings["limits"].items():
        limit = getattr(resource, name)
        resource.setrlimit(limit, (value, value + (_SPARE_BYTES if name == "RLIMIT_AS" else 0)))
    must(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    program = bytes.fromhex(settings["filter"])
    must(libc.prctl(_SECCOMP, 2, ctypes.byref(_Program(len(program) // 8, program)), 0, 0), "seccomp")


def run(code: str) -> int:
    """Run a snippet as a REPL would, print the value of its last expression, and return the exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [_FILE]
    module.__dict__.update(exit=sys.exit, quit=sys.exit)
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    status = 0
    try:
        tree = ast.parse(code, _FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _FILE, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval"), module.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code)
    except BaseException as error:
        status = 1
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        inner = error.__traceback__
        # Drop frames of this file and of ast.
        while inner is not None and inner.tb_frame.f_code.co_filename != _FILE:
            inner = inner.tb_next
        text = "".join(traceback.format_exception(type(error), error, inner, limit=-_MOST_FRAMES))
        print(text if len(text) <= _MOST_ERROR_CHARS else f"{text[:1000]}\n...\n{text[1000 - _MOST_ERROR_CHARS :]}")
    if threading := sys.modules.get("threading"):
        threading._shutdown()  # waits for the snippet's threads, as an interpreter does at its end
    return status & 0xFF


def main() -> None:
    confine(json.loads(sys.argv[1]))
    first = os.getpid()
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr = sys.stdout
    run("None")  # warm-up, so that the snippet does not pay the costs of the first call
    os.write(1, b"ready\n")
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    host = os.dup(0)  # connection to the host; closed in programs that the snippet executes, but not in its forks
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    status = run(code)
    sys.stdout.flush()
    if os.getpid() == first:
        os.write(host, bytes([status]))
        while True:  # the host kills this process later, since an exit takes longer than many snippets
            _signal.pause()
    os._exit(status)  # exits without cleanup: everything is discarded


if __name__ == "__main__":
    main()
