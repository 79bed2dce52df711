"""Jobs of two ranks: the first comes late to two meetings, later than a collective waits; and is asked to stop in the middle of
its work, while the other stands by. See test_stop."""

from __future__ import annotations

import datetime
import threading
import time

import torch.distributed as dist

from marsrl.trainer.runs import collective
from marsrl.trainer.runs.collective import all_true, barrier, broadcast_bytes, gather_bytes, rank, stop_together
from marsrl.trainer.runs.stop import Stopped
from marsrl.trainer.weights.sync import Standby


def job(limit_s: float = 0, late_s: float = 0) -> list[list[str]]:
    """What each rank got, by rank. limit_s: of a meeting; none: they stand by."""
    dist.init_process_group("gloo")  # the two may meet as late as a busy machine has them
    told = meet(limit_s, late_s) if limit_s else stand_by()
    both = [each.decode().split("\n") for each in gather_bytes("\n".join(told).encode())]
    dist.destroy_process_group()
    return both


def meet(limit_s: float, late_s: float) -> list[str]:
    """With the CPU seconds that rank 1 took in all, most of which it waited."""
    limit = datetime.timedelta(seconds=limit_s)
    dist.distributed_c10d._set_pg_timeout(limit)  # type: ignore[attr-defined]
    dist.distributed_c10d._get_default_store().set_timeout(limit)  # type: ignore[attr-defined]
    found = []
    begin = time.process_time()
    for call, is_late in (
        (barrier, True),
        (lambda: broadcast_bytes(b"batch" if rank() == 0 else None), True),
        (lambda: b" ".join(gather_bytes(str(rank()).encode())), False),
        (lambda: all_true(rank() == 0), False),
        (lambda: stop_together(None, "fine"), False),
    ):
        if rank() == 0 and is_late:
            time.sleep(late_s)  # it plays
        found.append(str(call()))
    cpu_s = time.process_time() - begin
    sleepers = [thread.name for thread in threading.enumerate() if thread.name == "marsrl-meeting"]
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    left = sum(store.check([f"marsrl/meeting/{n}/{key}"]) for n in range(1, 5) for key in ("here", "all"))
    collective.PIECE_BYTES = 7  # of what is told after this, many
    return [*found, str(cpu_s), str(len(sleepers)), str(left)]


def stand_by() -> list[str]:
    def stopped() -> None:
        raise Stopped

    standby = Standby({}, {}, {}, {} if rank() == 0 else None)
    said = [str(standby.during(lambda: "done"))]
    try:
        standby.during(stopped)
    except Stopped:
        said.append("stopped")
    return [*said, str(standby.during(lambda: "again"))]
