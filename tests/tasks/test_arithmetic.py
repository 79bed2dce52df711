"""The default run's task, and its new model."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER, Chain, apply, arithmetic_task, draw_chain, is_held_out
from marsrl.rollout.tasks.arithmetic.tutor import ChainTutor
from marsrl.rollout.tasks.config import ArithmeticOptions, TutorConfig
from marsrl.trainer.models.init_model import init_model

OPTIONS = ArithmeticOptions()
TASK = arithmetic_task(OPTIONS)


def test_the_documented_chain_has_its_documented_answer() -> None:
    chain = Chain(3, ("*7", "*7", "-5", "-9"))
    assert (chain.answer, chain.text) == ("3", "a 3 b *7 c *7 d -5 e -9")
    assert apply(2, "-5") == 7
    problem = Chain(3, ("*7",)).problem()
    assert [TASK.judge(problem, answer).result().value for answer in ("1", "2", "11")] == [1, 0, 0]


def test_training_and_held_out_problems_never_overlap() -> None:
    train = list(map(TASK.problems(0), range(500)))
    held_out = TASK.held_out(300, 0)
    assert TASK.held_out(None, 0) == held_out[:64]
    assert not any(is_held_out(p.question) for p in train)
    assert all(is_held_out(p.question) for p in held_out)
    assert TASK.held_out(300, 0) == held_out != TASK.held_out(300, 1)


def test_every_problem_is_of_the_documented_form() -> None:
    rng = random.Random(0)
    chains = [draw_chain(rng, OPTIONS, held_out=False) for _ in range(300)]
    assert {len(chain.operations) for chain in chains} == {4, 5, 6, 7}
    assert {operation for c in chains for operation in c.operations} == set(ARITHMETIC_TOKENIZER.vocabulary) & {
        sign + digit for sign in "+-*" for digit in "123456789"
    }
    assert all(word in ARITHMETIC_TOKENIZER.vocabulary for chain in chains for word in chain.text.split())


def test_flawless_tutors_are_right_and_flag_corrector_inputs() -> None:
    rng = random.Random(0)
    for _ in range(20):
        chain = draw_chain(rng, OPTIONS, held_out=False)
        assert ChainTutor(rng, TutorConfig(), OPTIONS).solution(chain, 0.0).endswith(f"Answer: {chain.answer}")
    traces = list(ChainTutor(rng, TutorConfig(), OPTIONS).team(chain))
    assert len(traces) == 3 and traces[2].prompt[-1].content.endswith("Verdict: wrong fix")  # type: ignore[union-attr]
    # Without slips, a Verifier that computes by itself agrees with the Solver.
    alone = ChainTutor(rng, TutorConfig(slip_solver=0.5, slip_verifier=0, slip_corrector=0, anchor=0), OPTIONS)
    alone.restate = alone.hard_claims = 0
    for _ in range(20):
        chain = draw_chain(rng, OPTIONS, held_out=False)
        solver, verifier, corrector = alone.team(chain)
        is_right = solver.completion.endswith(chain.answer)
        assert verifier.completion.endswith("correct" if is_right else "wrong")
        assert corrector.completion.endswith(f"Answer: {chain.answer}")


def test_weights_have_the_recipe_scale_and_follow_the_seed(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> dict[str, torch.Tensor]:
        return load_file(str(init_model("cpu_default", "arithmetic", tmp_path / name, seed) / "model.safetensors"))

    one, same, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])
    assert one["lm_head.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    for name in ("self_attn.o_proj", "mlp.experts.3.down_proj"):
        assert one[f"model.layers.1.{name}.weight"].std().item() == pytest.approx(0.05 / 6**0.5, rel=0.05)


def test_nothing_is_overwritten_and_wrong_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty directory"):
        init_model("tiny", "bytes", tmp_path / "full")
    with pytest.raises(ValueError, match="tiny, cpu_default"):
        init_model("huge", "bytes", tmp_path / "x")
    with pytest.raises(ValueError, match="bytes, arithmetic"):
        init_model("tiny", "letters", tmp_path / "y")
