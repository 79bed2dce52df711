"""The promises of stages, on a scripted engine with a tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish, Group, Sample

AGENTS = {"solver", "verifier1", "corrector1", "verifier2", "corrector2"}
SMALL = RolloutConfig(prompts_per_step=3, group_size=4, picks=2, max_response_tokens=12)


Make = Callable[..., Rollout]


@pytest.fixture(scope="module")
def rollout(scripted_team: Any) -> Make:
    def make(folder: Path, config: RolloutConfig = SMALL, **kwargs: object) -> Rollout:
        team, engine, task = scripted_team(folder, config=config, **kwargs)
        made = Rollout(config, team, task.problems(0), seed=0)
        made.engine = engine  # type: ignore[attr-defined]  # the tests tell it that weights have changed
        return made

    return make


def stages(player: Rollout, count: int, first_version: int = 0) -> list[tuple[Group, ...]]:
    """Plays `count` stages, one version a stage, as the loop does."""
    played = []
    for version in range(first_version, first_version + count):
        player.engine._version = version  # type: ignore[attr-defined]
        played.append(player.next_batch({"main": version}).groups)
    return played


def samples(groups: tuple[Group, ...]) -> list[Sample]:
    return [s for g in groups for s in g.samples]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, rollout: Make) -> list[tuple[Group, ...]]:
    """The groups of six stages."""
    return stages(rollout(tmp_path_factory.mktemp("played")), 6)


def test_each_stage_trains_every_agent_that_has_inputs(played: list[tuple[Group, ...]]) -> None:
    assert {g.agent for g in played[0]} == {"solver"}
    assert {g.agent for g in played[1]} == {"solver", "verifier1"}
    assert {g.agent for g in played[5]} == AGENTS


def test_a_group_is_one_agent_on_one_input_and_is_never_larger_than_wanted(played: list[tuple[Group, ...]]) -> None:
    for group in [g for groups in played for g in groups]:
        assert len(group.samples) == 4
        assert len({s.uid for s in group.samples}) == 4
        assert len({s.prompt_ids.tobytes() for s in group.samples}) == 1
        assert {s.group_id for s in group.samples} == {group.group_id}


def test_no_agent_is_asked_about_more_than_its_picks_of_an_instance(played: list[tuple[Group, ...]]) -> None:
    counts = Counter((g.rollout_id, g.agent) for groups in played for g in groups)
    assert all(counts[r, a] == 1 for r, a in counts if a == "solver")
    assert max(counts.values()) == 2


def test_a_corrector_sees_only_reports_that_flag_an_error(played: list[tuple[Group, ...]]) -> None:
    said = [s for groups in played for s in samples(groups)]
    verdicts = {s.uid: s.verdict for s in said if s.agent.startswith("verifier")}
    corrections = [s for s in said if s.agent.startswith("corrector")]
    assert corrections
    assert {verdicts[s.parent_uid] for s in corrections if s.parent_uid} == {False}


def test_a_verifiers_reward_is_its_agreement_with_the_solution_judged(played: list[tuple[Group, ...]]) -> None:
    said = {s.uid: s for groups in played for s in samples(groups)}
    reports = [s for s in said.values() if s.agent.startswith("verifier") and s.parent_uid in said]
    assert len(reports) > 20
    for report in reports:
        assert report.parent_uid is not None
        assert report.reward.value == (report.verdict == (said[report.parent_uid].reward.correct >= 1))


def test_trajectory_mode_ends_every_problem_of_the_step(tmp_path: Path, rollout: Make) -> None:
    player = rollout(tmp_path, SMALL.model_copy(update={"pipeline": "trajectory"}))
    batch = player.next_batch({"main": 0})
    assert {g.agent for g in batch.groups} == AGENTS
    assert not player.stages.state.pending and not player.stages.state.open and not player.stages.state.instances
    assert batch.metrics["rollout/stages"] == 5
    assert len({g.rollout_id for g in batch.groups}) == 3


def strip(played: list[tuple[Group, ...]]) -> list[list[tuple[object, ...]]]:
    return [
        [(s.uid, s.text, s.token_ids.tolist(), s.rollout_logprobs.tolist(), s.reward.value) for s in samples(groups)]
        for groups in played
    ]


def test_the_same_seed_plays_the_same_stages(tmp_path: Path, rollout: Make) -> None:
    assert strip(stages(rollout(tmp_path / "a"), 5)) == strip(stages(rollout(tmp_path / "b"), 5))


def test_segments_change_when_a_sample_is_trained_but_not_what_it_says(tmp_path: Path, rollout: Make) -> None:
    whole = {s.uid: s for groups in stages(rollout(tmp_path / "a"), 3) for s in samples(groups) if s.agent == "solver"}
    player = rollout(tmp_path / "b", SMALL.model_copy(update={"segments": 4}))
    cut = {s.uid: s for groups in stages(player, 6) for s in samples(groups) if s.agent == "solver"}
    shared = whole.keys() & cut.keys()
    assert len(shared) >= 8
    for uid in shared:
        assert cut[uid].token_ids.tolist() == whole[uid].token_ids.tolist()
        ends = [segment.end for segment in cut[uid].segments]
        assert [segment.start for segment in cut[uid].segments] == [0, *ends[:-1]]
        assert ends[-1] == len(cut[uid].token_ids)
        versions = [segment.version for segment in cut[uid].segments]
        assert versions == sorted(set(versions)) and len(versions) == 2  # 6 tokens in segments of 3


def test_a_group_waits_for_its_last_sample(tmp_path: Path, rollout: Make) -> None:
    def script(request: DecodeRequest, renderer: object, rng: object) -> str:
        return "= " * (9 if request.uid.endswith(":0") else 1) + "Answer: 3"

    config = SMALL.model_copy(update={"segments": 3})
    player = rollout(tmp_path, config, script=script)
    assert [len(groups) for groups in stages(player, 3)] == [0, 0, 3]


def test_an_overlong_completion_ends_with_reward_zero_and_is_not_picked(tmp_path: Path, rollout: Make) -> None:
    player = rollout(tmp_path, script=lambda request, renderer, rng: "= " * 40)
    first = samples(stages(player, 1)[0])
    assert {s.finish for s in first} == {Finish.LENGTH}
    assert {s.reward.value for s in first} == {0.0}
    assert {len(s.token_ids) for s in first} == {12}
    assert not player.stages.state.pending


@pytest.mark.parametrize("segments", [1, 4])
def test_a_state_through_bytes_goes_on_as_if_nothing_had_happened(tmp_path: Path, rollout: Make, segments: int) -> None:
    config = SMALL.model_copy(update={"segments": segments})
    unbroken = stages(rollout(tmp_path / "a", config), 6)
    first = rollout(tmp_path / "b", config)
    before = stages(first, 3)
    resumed = rollout(tmp_path / "c", config)
    resumed.restore(decode(RolloutState, encode(first.snapshot())))
    resumed.engine._answers = first.engine._answers  # type: ignore[attr-defined]  # what the script was in the middle of
    assert strip(before + stages(resumed, 3, first_version=3)) == strip(unbroken)
