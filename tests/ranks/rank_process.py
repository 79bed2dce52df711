"""One rank of rank_pair: runs the jobs that come on stdin, and answers each with one line on what was its stdout.

Arguments: modules to import before the first job. Each job has a process of its own, forked from this one: it finds them
imported, and its process groups, whose threads poll for as long as they stand, end with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def answer(file: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """{value: of job(**arguments) of the file}, or {error: its traceback}."""
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        return {"value": importlib.import_module(file.stem).job(**arguments)}
    except Exception:  # told to the test that asked
        return {"error": traceback.format_exc()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a job prints is no answer
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # jobs that look for garbage, as each checkpoint does, need not look through it
    for line in sys.stdin:
        file, port, arguments = json.loads(line)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody waits for it when its parent is gone
            if os.getppid() != parent:
                os._exit(1)  # it was gone before
            os.environ["MASTER_PORT"] = str(port)
            print(json.dumps(answer(Path(file), arguments)), file=answers, flush=True)
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
