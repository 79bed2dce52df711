"""A transfer that is given up ends every wait for it, on both sides; over gloo and a mapped file, in one process: about 4 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import TORN, WeightUpdate, WrongVersion
from marsrl.rollout.state import encode
from marsrl.rollout.weights.connections import GroupConnection, Rendezvous, SharedBuffer, TransferBroken, TransferStore
from marsrl.rollout.weights.direct import ReceivePlan
from marsrl.rollout.weights.layout import EngineShard

CPU = torch.device("cpu")
HUNG_S = 240.0  # nothing here waits so long, or the test fails
MANY = 1 << 20  # numbers: more than sockets hold


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    """One trainer rank meets one engine of one shard; who waits for HUNG_S hangs."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HUNG_S))
    yield Rendezvous("session", "127.0.0.1", server.port, "nccl", 1, 1, "float32", MANY, HUNG_S)


def connected(rendezvous: Rendezvous, member: int) -> GroupConnection:
    return GroupConnection(TransferStore(rendezvous), member, CPU)


def pair(rendezvous: Rendezvous) -> tuple[GroupConnection, GroupConnection]:
    """Both ends: the rank's and the shard's."""
    ends: dict[int, GroupConnection] = {}

    def connect(member: int) -> None:
        ends[member] = connected(rendezvous, member)

    threads = [threading.Thread(target=connect, args=(member,)) for member in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[0], ends[1]


Wait = Callable[[], object]


def send_to_nobody(rendezvous: Rendezvous) -> Wait:
    rank, shard = pair(rendezvous)
    return lambda: (rank.send(torch.zeros(MANY), 0), shard)  # which is there, and takes nothing


def receive_from_nobody(rendezvous: Rendezvous) -> Wait:
    rank, shard = pair(rendezvous)
    return lambda: (shard.receive(0, MANY), rank)


def hand_over_to_nobody(rendezvous: Rendezvous) -> Wait:
    relay = SharedBuffer(TransferStore(rendezvous), 0, CPU, is_relay=True)

    def wait() -> None:
        try:
            relay.hand_over()
        finally:
            relay.close()

    return wait


WAITS: dict[str, Callable[[Rendezvous], Wait]] = {
    "a rank, for an engine that does not connect": lambda found: lambda: connected(found, 0),
    "a rank, in a send": send_to_nobody,
    "an engine, for a bucket": receive_from_nobody,
    "a relay, for an engine": hand_over_to_nobody,
    "an engine, for its relay": lambda found: lambda: SharedBuffer(TransferStore(found), 0, CPU, is_relay=False),
}


@pytest.mark.parametrize("who", WAITS)
def test_nobody_waits_where_the_transfer_is_given_up(rendezvous: Rendezvous, who: str) -> None:
    ended: list[BaseException | object] = []
    wait = WAITS[who](rendezvous)  # those who wait have met

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
    thread.join(HUNG_S / 4)
    assert isinstance(ended[0], TransferBroken) and str(ended[0]) == "its process has died", ended


def test_who_does_not_answer_in_time_is_given_up(rendezvous: Rendezvous) -> None:
    start = time.monotonic()
    with pytest.raises(TransferBroken, match=r"^waiting for member1 has taken sync\.timeout_s = 0\.3 s"):
        store = TransferStore(replace(rendezvous, timeout_s=0.3), rendezvous.client())
        GroupConnection(store, 0, CPU)
    assert time.monotonic() - start >= 0.3
    with pytest.raises(TransferBroken, match="waiting for member1"):  # and the others know
        TransferStore(rendezvous).check()
    TransferStore(replace(rendezvous, session="another")).check()


def test_an_engine_whose_weights_did_not_arrive_says_why_and_decodes_nothing(
    rendezvous: Rendezvous, checkpoint: Callable[[str], str]
) -> None:
    engine = LocalEngine(checkpoint("qwen3"), dtype="float32", max_model_len=128)
    TransferStore(rendezvous).give_up("rank 3 cannot reach it")
    receipt = engine.update_weights(WeightUpdate("", 1, (encode(ReceivePlan(rendezvous, 0, EngineShard(), {}, ())),)))
    assert (receipt.version, receipt.checksums, receipt.broken) == (TORN, (), "rank 3 cannot reach it")
    for version in (0, 1):
        with pytest.raises(WrongVersion, match=f"version {TORN} is loaded"):
            engine.submit([], version=version)
