"""One rank of rank_pair: runs the jobs that come on stdin, and answers each with one line on what was its stdout."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


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
    for line in sys.stdin:
        file, arguments = json.loads(line)
        print(json.dumps(answer(Path(file), arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
