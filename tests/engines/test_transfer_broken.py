"""A transfer that is given up ends every wait for it, on both sides; over gloo and a mapped file, in one process: about 4 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import TORN, EngineLost, WeightUpdate, WrongVersion
from marsrl.rollout.engines.vllm.engine import VllmEngine
from marsrl.rollout.engines.vllm.worker import WorkerExtension
from marsrl.rollout.state import encode
from marsrl.rollout.weights.connections import (
    GroupConnection,
    Rendezvous,
    SharedBuffer,
    TransferBroken,
    TransferStore,
)
from marsrl.rollout.weights.receiver import ReceivePlan, WeightReceiver

CPU = torch.device("cpu")
HUNG_S = 60.0  # nothing here waits so long, or the test fails
MANY = 1 << 20  # numbers: more than sockets hold


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    """One trainer rank meets one engine of one shard; who waits for HUNG_S hangs."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HUNG_S))
    yield Rendezvous("session/0", "127.0.0.1", server.port, "nccl", 1, 1, "float32", MANY, HUNG_S)


def given_up_in(rendezvous: Rendezvous, wait: Callable[[], object]) -> float:
    """Seconds that `wait` lasts after the engine is given up; it must not end before that, and say why then."""
    ended: list[BaseException | object] = []

    def run() -> None:
        try:
            ended.append(wait())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.5)
    assert not ended, ended
    store = TransferStore(rendezvous)
    store.give_up("its process has died")
    store.give_up("another reason")
    start = time.monotonic()
    thread.join(HUNG_S / 2)
    assert isinstance(ended[0], TransferBroken) and str(ended[0]) == "its process has died", ended
    return time.monotonic() - start


def pair(rendezvous: Rendezvous) -> tuple[GroupConnection, GroupConnection]:
    """Both ends: the rank's and the shard's."""
    ends: dict[int, GroupConnection] = {}

    def connect(member: int) -> None:
        ends[member] = GroupConnection(rendezvous, member, CPU)

    threads = [threading.Thread(target=connect, args=(member,)) for member in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[0], ends[1]


def send_to_nobody(rendezvous: Rendezvous) -> object:
    rank, shard = pair(rendezvous)
    rank.send(torch.zeros(MANY), 0)
    return shard


def receive_from_nobody(rendezvous: Rendezvous) -> object:
    rank, shard = pair(rendezvous)
    shard.receive(0, MANY)
    return rank


def meet_a_shard_that_dies_while_it_connects(rendezvous: Rendezvous) -> object:
    TransferStore(rendezvous).set("member1")
    return GroupConnection(rendezvous, 0, CPU)


def hand_over_to_nobody(rendezvous: Rendezvous) -> None:
    relay = SharedBuffer(rendezvous, 0, CPU, is_relay=True)
    try:
        relay.hand_over()
    finally:
        relay.close()


WAITS: dict[str, Callable[[Rendezvous], object]] = {
    "a rank, for an engine that does not connect": lambda found: GroupConnection(found, 0, CPU),
    "a rank, while an engine connects": meet_a_shard_that_dies_while_it_connects,
    "an engine, for ranks that do not connect": lambda found: GroupConnection(found, 1, CPU),
    "a rank, in a send": send_to_nobody,
    "an engine, for a bucket": receive_from_nobody,
    "a relay, for an engine": hand_over_to_nobody,
    "an engine, for its relay": lambda found: SharedBuffer(found, 0, CPU, is_relay=False),
}


@pytest.mark.parametrize("who", WAITS)
def test_nobody_waits_for_an_engine_that_is_given_up(rendezvous: Rendezvous, who: str) -> None:
    # a few looks, on a machine that has time
    assert given_up_in(rendezvous, lambda: WAITS[who](rendezvous)) < HUNG_S / 4


def test_who_does_not_answer_in_time_is_given_up(rendezvous: Rendezvous) -> None:
    hasty = replace(rendezvous, timeout_s=0.3)
    with pytest.raises(TransferBroken, match=r"^waiting for member1 has taken sync\.timeout_s = 0\.3 s"):
        GroupConnection(hasty, 0, CPU)
    with pytest.raises(TransferBroken, match="waiting for member1"):  # and the others know
        TransferStore(rendezvous).check()
    TransferStore(replace(rendezvous, session="session/1")).check()  # of another engine nothing is said


def test_a_broken_way_is_everybody_s_news(rendezvous: Rendezvous) -> None:
    rank, shard = pair(rendezvous)
    rank.close()
    with pytest.raises(TransferBroken):
        shard.receive(0, 4)
    with pytest.raises(TransferBroken, match=r"^\w+: "):
        TransferStore(rendezvous).check()


def test_an_engine_whose_weights_did_not_arrive_is_lost_and_decodes_nothing(
    rendezvous: Rendezvous, checkpoint: Callable[[str], str]
) -> None:
    engine = LocalEngine(checkpoint("qwen3"), dtype="float32", max_model_len=128)
    TransferStore(rendezvous).give_up("rank 3 cannot reach it")
    plan = ReceivePlan(rendezvous, 0, (), {})
    with pytest.raises(EngineLost, match="its weights did not arrive: rank 3 cannot reach it"):
        engine.update_weights(WeightUpdate("", 1, (plan,)))
    for version in (0, 1):
        with pytest.raises(WrongVersion, match=f"version {TORN} is loaded"):
            engine.submit([], version=version)
    assert WeightReceiver(CPU)._connection is engine._receiver._connection is None


class Worker(WorkerExtension):
    """A worker whose model is one norm, on a device that is no CPU."""

    rank = 0

    def __init__(self) -> None:
        model = torch.nn.Module()
        model.norm = torch.nn.LayerNorm(4, device="meta")
        self.model_runner = SimpleNamespace(get_model=lambda: model)


def test_a_worker_of_vllm_says_what_broke_and_raises_nothing(rendezvous: Rendezvous) -> None:
    TransferStore(rendezvous).give_up("rank 3 cannot reach it")
    plan = ReceivePlan(rendezvous, 0, (), {"norm.weight": (4,)})
    assert Worker().marsrl_receive([encode(plan)]) == "rank 3 cannot reach it"


def vllm_engine(*, is_failed: bool, answer: Callable[[], list[str]]) -> VllmEngine:
    """One whose workers answer so."""
    engine = object.__new__(VllmEngine)
    engine._options = VllmOptions()
    engine._llm = SimpleNamespace(collective_rpc=lambda method, args: answer())
    executor = SimpleNamespace(is_failed=is_failed)
    engine._core = SimpleNamespace(model_executor=executor, has_unfinished_requests=lambda: False, engine_core=None)
    return engine


def test_a_vllm_engine_is_lost_with_one_of_its_workers(rendezvous: Rendezvous) -> None:
    plans = (ReceivePlan(rendezvous, 0, (), {}), ReceivePlan(rendezvous, 1, (), {}))
    broken = vllm_engine(is_failed=False, answer=lambda: ["", "rank 3 cannot reach it"])
    with pytest.raises(EngineLost, match="its weights did not arrive: rank 3 cannot reach it"):
        broken.update_weights(WeightUpdate("", 1, plans))
    assert broken._version == TORN

    def fails() -> list[str]:
        raise RuntimeError("cancelled")

    for update in (WeightUpdate("", 1, plans), WeightUpdate("a file", 1)):
        with pytest.raises(EngineLost, match="a process of one of its GPUs has ended"):
            vllm_engine(is_failed=True, answer=fails).update_weights(update)
        with pytest.raises(RuntimeError, match="cancelled") as raised:
            vllm_engine(is_failed=False, answer=fails).update_weights(update)
        assert not isinstance(raised.value, EngineLost)
