"""Engines that move between policies: when they move, where they fit, and that they serve only their new policy's weights."""

from __future__ import annotations

from mortal import MortalReplicas, Places, asks, is_whole

from marsrl.rollout.engines.protocol import WeightUpdate
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.rebalance import PolicyEngines, Rebalancer, outlook, wanted

GPU, TWO = {"GPU": 1.0}, {"GPU": 2.0}


def policies(**of: tuple[int, float, dict[str, float]]) -> dict[str, PolicyEngines]:
    return {name: PolicyEngines(*each) for name, each in of.items()}


def test_an_engine_moves_if_loads_differ_twofold_and_it_helps() -> None:
    off = policies(big=(1, 30.0, GPU), small=(3, 30.0, GPU))
    move = wanted(off)
    assert move is not None and (move.giver, move.taker, move.num) == ("small", "big", 1)
    assert "big worked 30.0 s" in move.why
    for big, small, moves in (
        ((2, 30.0), (2, 30.0), False),
        ((1, 20.0), (3, 30.0), False),  # twice the load is not enough
        ((1, 20.1), (3, 30.0), True),
        ((1, 30.0), (1, 1.0), False),  # would take the policy's last engine
        ((1, 1.0), (2, 0.0), False),  # nearly no work was done
        ((1, 1.1), (2, 0.0), True),
        ((2, 84.0), (2, 40.0), False),  # loads of 42 and 20 s; 28 and 40 s after the move gain nothing
        ((9, 90.0), (2, 2.0), False),  # load of 10 s; 9 s after the move are only a tenth less
        ((8, 80.0), (2, 2.0), True),
    ):
        assert (wanted(policies(big=(*big, GPU), small=(*small, GPU))) is not None) == moves, (big, small)


def test_engines_of_another_size_move_only_where_they_fit() -> None:
    assert wanted(policies(wide=(1, 30.0, TWO), small=(4, 8.0, GPU))) is None
    narrow = wanted(policies(wide=(3, 6.0, TWO), small=(1, 30.0, GPU)))
    assert narrow is not None and narrow.num == 2
    assert outlook({"wide": 2, "small": 1}, {"wide": TWO, "small": GPU}).startswith(
        "rollout.rebalance may move an engine from wide to small (2 in its place), depending on their load"
    )
    assert "cannot move engines" in outlook({"wide": 1, "small": 3}, {"wide": TWO, "small": GPU})
    assert "cannot move engines" in outlook({"main": 3}, {"main": GPU})


class Stages:
    """Stages of two policies whose engines share four places. play: each engine of a policy works for the given seconds."""

    def __init__(self) -> None:
        self.replicas = {"solver": MortalReplicas(1), "verifier": MortalReplicas(3)}
        self.pools: dict[str, EnginePool] = {name: each.pool(name=name) for name, each in self.replicas.items()}
        for version, name in enumerate(self.pools, 3):
            self.pools[name].update_weights(WeightUpdate(name, version))
        places = Places()
        for each in self.replicas.values():
            each.places = places
        self.said: list[str] = []
        self.rebalancer = Rebalancer(self.pools, say=self.said.append)

    def play(self, **seconds: float) -> None:
        for version, (name, pool) in enumerate(self.pools.items(), 3):
            pool.submit(asks(12), version=version)
            self.replicas[name].seconds = seconds[name] * pool.num_engines / 12
            while pool.num_under_way:
                assert all(map(is_whole, pool.collect(0.0)))
        self.rebalancer.note_stage()


def test_an_engine_moves_on_lasting_load_and_returns_on_failure() -> None:
    stages = Stages()
    stages.play(solver=9.0, verifier=3.0)
    assert not stages.rebalancer.is_due  # one step is not enough
    stages.play(solver=3.0, verifier=3.0)
    stages.play(solver=9.0, verifier=3.0)
    assert not stages.rebalancer.is_due  # two unequal steps are not enough if an equal one is between them
    assert [round(pool.busy_s, 6) for pool in stages.pools.values()] == [21.0, 27.0]
    stages.play(solver=9.0, verifier=3.0)
    assert stages.rebalancer.is_due
    # The policy that gave the engine gets it back, at once or when the weights can be sent.
    for broken in (["solver"], ["solver", "verifier"]):
        for name in broken:
            stages.replicas[name].is_beyond_repair = True
        stages.rebalancer.move()
        assert [pool.num_engines for pool in stages.pools.values()] == [1, 4 - len(broken)]
        assert stages.rebalancer.take_moves() == 0 and "could not move" in stages.said[-1]
        for name in broken:
            stages.replicas[name].is_beyond_repair = False
        for _ in range(2):
            stages.play(solver=9.0, verifier=3.0)
    assert stages.pools["verifier"].engines == [0, 1, 2] and stages.pools["verifier"].is_whole
    stages.rebalancer.move()
    assert [pool.engines for pool in stages.pools.values()] == [[0, 1], [0, 1]] and stages.rebalancer.take_moves() == 1
    assert not stages.pools["solver"].take_engine()  # no place is free
    assert stages.said[-1].endswith("an engine of verifier has moved to solver; engines now: solver 2, verifier 2")
    stages.play(solver=3.0, verifier=3.0)  # the moved engine serves its new policy's current version
    assert all(stages.replicas["solver"].had) and not stages.rebalancer.is_due
    stages.play(solver=9.0, verifier=1.0)
    stages.play(solver=1.0, verifier=9.0)
    assert not stages.rebalancer.is_due  # after a move, loads are measured anew
