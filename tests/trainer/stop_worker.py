"""A job of two ranks: rank 0 is asked to stop in the middle of its work, the other stands by. See test_stop."""

from __future__ import annotations

import torch.distributed as dist

from marsrl.trainer.runs.collective import gather_bytes, rank
from marsrl.trainer.runs.stop import Stopped
from marsrl.trainer.weights.sync import Standby


def job() -> list[str]:
    """What each rank got, by rank."""
    dist.init_process_group("gloo")

    def stopped() -> None:
        raise Stopped

    standby = Standby({}, {}, {}, {} if rank() == 0 else None)
    said = [str(standby.during(lambda: "done"))]
    try:
        standby.during(stopped)
    except Stopped:
        said.append("stopped")
    said.append(str(standby.during(lambda: "again")))
    both = [each.decode() for each in gather_bytes(" ".join(said).encode())]
    dist.destroy_process_group()
    return both
