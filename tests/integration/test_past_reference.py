"""KL to an earlier version of the policy, the reference: it is refreshed after a publish, and checkpointed."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_pool import engines_are, half_right, on_sevens, opened, rows_of, saying, train_here

from marsrl.rollout.adapter import AdapterConfig
from marsrl.trainer.loop import train
from marsrl.trainer.models.init_model import init_model

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

ADAPTER = AdapterConfig(rank=4, targets=("attention",))


class Killed(Exception):
    """Raised in place of a kill signal: nothing is saved on exit."""


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_refreshed_reference_survives_a_kill(kind: str, tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    adapters = {"main": ADAPTER} if kind == "adapter" else {}
    words = [
        *on_sevens(tmp_path, model), "orchestration=solver", "policies.main.optimizer={lr: 0.01}", "run.evaluate=false",
        *(["policies.main.adapter={rank: 4, targets: [attention]}"] if adapters else []),
        "policies.main.reference=past", "policies.main.reference_every=2", "loss.kl=k3", "loss.kl_coef=0.1",
        "rollout.placement=local", "rollout.pipeline=trajectory", "run.steps=4", "run.checkpoint_every=1",
    ]  # fmt: skip
    with engines_are(saying(model, half_right, adapters=adapters)):
        whole = rows_of(train_here(tmp_path / "whole", words))
        with pytest.raises(Killed), opened(tmp_path / "killed", words) as run:
            play = run.play

            def play_three() -> object:
                if run.step == 4:
                    raise Killed
                return play()

            run.play = play_three  # type: ignore[method-assign,assignment]
            train(run)
        resumed = rows_of(train_here(tmp_path / "killed", [*words, "run.resume=auto"]))
    assert [row["actor/updates"] for row in whole] == [1] * 4
    kl = [row["actor/kl"] for row in whole]
    # Steps 1 and 3 start from versions 0 and 2, which then become the reference.
    assert max(kl[0::2]) < 1e-9 < 1e-6 < min(kl[1::2])
    same = ("actor/kl", "actor/loss", "actor/grad_norm")
    assert [[row[name] for name in same] for row in resumed] == [[row[name] for name in same] for row in whole]
