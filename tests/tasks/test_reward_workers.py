import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from marsrl.rollout.rewards.config import JudgeOptions
from marsrl.rollout.rewards.judge import RewardPool
from marsrl.rollout.types import Problem, Reward

# The judge does what the answer says; "hang" ignores signals, as sympy can.
ODD_JUDGE = """
import os, signal, sys
def judge():
    return compare
def compare(problem, answer):
    if answer == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM, signal.SIGINT])
        while True:
            sum(range(100000))
    if answer == "die":
        os._exit(7)
    if answer == "memory":
        bytearray(1 << 40)
    if answer == "raise":
        raise RecursionError("too deep")
    if answer == "print":
        print('{"correct": true}')
        os.write(1, b"noise")
    if answer == "read":
        return float(bool(sys.stdin.readline()))
    return VALUES[answer] if answer in VALUES else answer == problem.answer
VALUES = {"seven": 7, "nan": float("nan"), "word": "0.5", "none": None, "part": 0.25}
"""


def problem(answer: str | None) -> Problem:
    return Problem("p", "q", answer, "math")


def judged(pool: RewardPool, answers: Sequence[tuple[Problem, str]]) -> list[Reward]:
    """All at once."""
    return [each.result(120) for each in [pool.submit(*pair) for pair in answers]]


@pytest.fixture
def odd_judge(tmp_path: Path) -> str:
    (tmp_path / "odd_judge.py").write_text(ODD_JUDGE)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return "odd_judge:judge"


def test_answers_are_compared_in_processes() -> None:
    table = [
        ("70", "70.0", 1),
        (r"\frac{1}{2}", r"\dfrac12", 1),
        ("x+1", "1+x", 1),
        ("(3,4)", "(4,3)", 0),
        ("5", "no", 0),
    ]
    with contextlib.closing(RewardPool(JudgeOptions(workers=2, timeout_s=60))) as pool:
        rewards = judged(pool, [(problem(reference), answer) for reference, answer, _ in table])
    assert [r.value for r in rewards] == [right for _, _, right in table], rewards


def test_crashes_and_errors_are_missing_with_a_note_and_the_rest_is_judged(odd_judge: str) -> None:
    answers = ["1", "2", "die", "1", "raise", "memory", "print", "1"]
    with contextlib.closing(RewardPool(JudgeOptions(workers=2, timeout_s=60.0), judge=odd_judge)) as pool:
        rewards = judged(pool, [(problem("1"), answer) for answer in answers])
    values = [None if r.is_missing else r.value for r in rewards]
    assert values == [1, 0, None, 1, None, None, 0, 1]
    assert "code 7" in rewards[2].note and "RecursionError" in rewards[4].note and "MemoryError" in rewards[5].note
    assert [bool(r.note) for r in rewards] == [r.is_missing for r in rewards]


def test_an_answer_that_hangs_is_missing_with_a_note_and_another_process_judges_on(odd_judge: str) -> None:
    with contextlib.closing(RewardPool(JudgeOptions(workers=1, timeout_s=2.0), judge=odd_judge)) as pool:
        (hung,) = judged(pool, [(problem("1"), "hang")])
        assert hung.is_missing and "took over 2 s and was killed" in hung.note
        end = time.monotonic() + 120.0
        while (reward := judged(pool, [(problem("1"), "1")])[0]).is_missing and time.monotonic() < end:
            assert "was killed" in reward.note  # a process that is paused for long is late
        assert reward.value == 1


def test_a_reward_is_a_number_from_0_to_1_and_anything_else_is_missing(odd_judge: str) -> None:
    with contextlib.closing(RewardPool(JudgeOptions(workers=1, timeout_s=60.0), judge=odd_judge)) as pool:
        part, *others = judged(pool, [(problem("1"), a) for a in ("part", "seven", "nan", "word", "none", "read")])
        assert (part.value, part.correct, part.parts) == (0.25, 0.25, {"answer": 0.25})
        assert [r.is_missing for r in others] == [True, True, True, True, False]
        assert "it returned 7, expected a number from 0 to 1" in others[0].note and "nan" in others[1].note
        assert others[4].value == 0  # requests are not what a judge reads as its input


def test_a_reference_that_is_not_there_is_missing_and_an_endless_answer_is_wrong() -> None:
    with contextlib.closing(RewardPool(JudgeOptions(max_answer_chars=10))) as pool:  # no process is started for these
        nothing, endless = judged(pool, [(problem(None), "1"), (problem("1"), "1" * 11)])
    assert nothing.is_missing and "no reference" in nothing.note
    assert endless.value == 0 and "11 characters" in endless.note


def test_an_answer_that_hangs_holds_up_no_other_and_close_leaves_no_process(odd_judge: str) -> None:
    before = set(psutil.Process().children())
    pool = RewardPool(JudgeOptions(workers=2, timeout_s=600.0), judge=odd_judge)
    hangs = pool.submit(problem("1"), "hang")
    assert [r.value for r in judged(pool, [(problem("1"), "1")] * 3)] == [1, 1, 1] and not hangs.done()
    assert len(set(psutil.Process().children()) - before) == 2
    waits = [pool.submit(problem("1"), "hang") for _ in range(2)][1]
    pool.close()
    pool.close()
    assert waits.cancelled() and isinstance(hangs.exception(), CancelledError)
    assert set(psutil.Process().children()) <= before
    with pytest.raises(RuntimeError, match="after shutdown"):
        judged(pool, [(problem("1"), "1")])


def test_a_judge_ends_with_its_parent_even_while_it_hangs(odd_judge: str) -> None:
    lines = (
        "from marsrl.rollout.rewards.config import JudgeOptions",
        "from marsrl.rollout.rewards.judge import RewardPool",
        "from marsrl.rollout.types import Problem",
        f"pool = RewardPool(JudgeOptions(workers=1, timeout_s=600.0), judge={odd_judge!r})",
        "print(pool.submit(Problem('p', 'q', '1', 'math'), '1').result(), flush=True)",
        "pool.submit(Problem('p', 'q', '1', 'math'), 'hang').result()",
    )
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        (judge,) = psutil.Process(parent.pid).children()
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        judge.wait(timeout=60)


def test_a_judge_that_cannot_be_loaded_is_an_error_not_a_reward() -> None:
    with (
        contextlib.closing(RewardPool(judge="no_such_module:judge")) as pool,
        pytest.raises(RuntimeError, match="before it was ready"),
    ):
        judged(pool, [(problem("1"), "1")])
