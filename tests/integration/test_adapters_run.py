"""Two adapters and their base play in one pool of engines, and both adapters are trained. Completions come
from a script; the local engine loads the published weights and computes log-probs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scripted_pool import BRIEFLY, engines_are, half_right, on_sevens, opened, rows_of, samples_of, saying, train_here

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeResult, WeightReceipt
from marsrl.trainer.config.read import read_config
from marsrl.trainer.learner.learner import Together
from marsrl.trainer.loop import train
from marsrl.trainer.models.init_model import init_model

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

ADAPTERS = {
    "solver": AdapterConfig(rank=4, targets=("attention",)),
    "verifier": AdapterConfig(rank=2, targets=("attention",)),
}


class Killed(Exception):
    """Raised in place of a kill signal: nothing is saved on exit."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("adapters")
    model = init_model("tiny", "bytes", folder / "model")
    words = [
        *on_sevens(folder, model, "policies.main.frozen=true", "run.evaluate=false"),
        *(f"policies.{name}={{base: main, adapter: {{rank: {each.rank}, targets: [attention]}}, optimizer: {{lr: 0.01}}}}"
          for name, each in ADAPTERS.items()),
        "agents={solver: {policy: solver}, verifier1: {policy: verifier}, verifier2: {policy: verifier}}", *BRIEFLY,
        "credit.train_agents=[solver, verifier1, verifier2]",
        "rollout.placement=local", "rollout.pipeline=trajectory", "run.steps=2", "run.checkpoint_every=1",
    ]  # fmt: skip
    with engines_are(saying(model, half_right, adapters=ADAPTERS)):
        yield words


def test_policies_of_one_base_share_a_pool_and_resume_exactly(words: list[str], tmp_path: Path) -> None:
    with opened(tmp_path / "whole", words) as run:
        assert run.driver is not None
        pools = run.driver.team.pools
        assert list(pools) == ["main"] and pools["main"].infos()[0].adapters == ("solver", "verifier")
        train(run)
        assert run.versions == {"main": 0, "solver": 2, "verifier": 2}
        probe = [np.arange(2, 40, dtype=np.int32)]
        bare, *of_adapters = (pools["main"].score(probe, name)[0][0] for name in ("", "solver", "verifier"))
        for one, other in ((bare, of_adapters[0]), (bare, of_adapters[1]), (of_adapters[0], of_adapters[1])):
            assert np.abs(one - other).max() > 1e-3
    rows, samples = rows_of(run.directory), samples_of(run.directory)
    assert max(row[f"{name}/sync/probe_diff_max"] for row in rows for name in ADAPTERS) < 1e-3  # nats
    versions = {(each.agent[0], segment.version) for each in samples for segment in each.segments}
    assert versions == {("c", 0), *((agent, version) for agent in "sv" for version in range(2))}

    # A run is killed after its last publish, so the published versions are lost with the engines. The resumed run loads the
    # checkpoint's versions.
    with pytest.raises(Killed), opened(tmp_path / "killed", words) as run:
        publish = run.publish

        def publish_last(group: Together, is_new: Mapping[str, bool]) -> None:
            publish(group, is_new)
            if run.step == 2:
                raise Killed

        run.publish = publish_last  # type: ignore[method-assign]
        train(run)
    resumed = train_here(tmp_path / "killed", [*words, "run.resume=auto"])
    assert [(each.uid, each.text) for each in samples_of(resumed)] == [(each.uid, each.text) for each in samples]
    same = [key for key in rows[-1] if "actor/loss" in key or "actor/grad_norm" in key]
    assert len(same) >= 4 and [rows_of(resumed)[-1][key] for key in same] == [rows[-1][key] for key in same]


def test_a_publish_of_adapters_is_one_message_to_engines(words: list[str], tmp_path: Path) -> None:
    with opened(tmp_path, [*words, "rollout.overlap=1"]) as run:
        assert run.driver is not None
        pool, drained = run.driver.team.pools["main"], list[str | None]()
        drain = pool.drain

        def noted(adapter: str | None = None) -> list[DecodeResult]:
            drained.append(adapter)
            return drain(adapter)

        pool.drain = noted  # type: ignore[method-assign]
        sent, update = list[list[str]](), pool.update_adapters

        def counted(updates: Sequence[AdapterUpdate]) -> list[list[WeightReceipt]]:
            sent.append([each.name for each in updates])
            return update(updates)

        pool.update_adapters = counted  # type: ignore[method-assign]
        train(run)
        assert run.versions == {"main": 0, "solver": 2, "verifier": 2} and drained == ["solver", "verifier"] * 2
        assert sent == [["solver", "verifier"]] * 3
    rows = rows_of(run.directory)
    assert max(row[f"{name}/sync/probe_diff_max"] for row in rows for name in ADAPTERS) < 1e-3  # nats


def test_a_run_resumes_with_an_adapter_more_or_less(words: list[str], tmp_path: Path) -> None:
    longer = [*words, "run.resume=auto"]
    first = train_here(tmp_path / "more", [*words, "run.steps=1"])
    shutil.copytree(tmp_path / "more", tmp_path / "fewer")
    third, model = AdapterConfig(rank=8, targets=("attention",)), read_config(None, words)[0].policies["main"].model
    more = [
        *longer, "policies.third={base: main, adapter: {rank: 8, targets: [attention]}, optimizer: {lr: 0.01}}",
        "agents.verifier2.policy=third",
    ]  # fmt: skip
    engines = saying(Path(model or ""), half_right, adapters={**ADAPTERS, "third": third})
    with engines_are(engines), opened(tmp_path / "more", more) as run:
        train(run)
        assert run.versions == {"main": 0, "solver": 2, "verifier": 2, "third": 1}
    rows = rows_of(first)
    assert len(rows) == 2 and rows[1]["third/actor/updates"] == 1
    assert "adapter third is not in checkpoint" in first.warnings.read_text()
    fewer = [word for word in longer if not word.startswith("policies.verifier=")]
    with opened(
        tmp_path / "fewer", [*fewer, "agents.verifier1.policy=solver", "agents.verifier2.policy=solver"]
    ) as run:
        train(run)
        assert run.versions == {"main": 0, "solver": 2}
