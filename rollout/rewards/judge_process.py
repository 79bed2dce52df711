"""The process that judges math answers for RewardPool: one JSON line in, one JSON line out.

    python -P -m marsrl.rollout.rewards.judge_process module:function

A request is {"reference", "answer"}, a reply {"correct"} or {"error"}. The first line says that the judge is loaded.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import re
import resource
import signal
import sys
import threading

_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
_MEMORY_BYTES = 4 << 30  # of address space: a tower of powers must not take the machine with it


def compare_math(reference: str, answer: str) -> bool:
    """Are two answers the same mathematics? Timeouts of math-verify are off: the pool kills what hangs."""
    if " ".join(reference.split()) == " ".join(answer.split()):
        return True
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):  # most answers; math-verify takes 2 s to import
        return int(reference) == int(answer)
    from math_verify import parse, verify

    # The dollar signs make it LaTeX wherever it can be read so; a bare number is read either way.
    gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the reference answer {reference[:80]!r} cannot be parsed")
    target = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(verify(gold, target, timeout_seconds=None))


def main(path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; we end when it closes our input
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, as we want them
    module, _, function = path.partition(":")
    judge = getattr(importlib.import_module(module), function)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # the parent has gone or closed us: end even in the middle of a comparison that hangs

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while True:
        request = json.loads(requests.get())
        reply: dict[str, bool | str]
        try:
            reply = {"correct": bool(judge(request["reference"], request["answer"]))}
        except (Exception, RecursionError) as error:  # any failure of the judge is the parent's to count
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
