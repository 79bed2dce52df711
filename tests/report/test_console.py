"""The console of a run, if it is not a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from made_up_run import make_evaluation, make_sample

from marsrl.rollout.types import MISSING, Reward
from marsrl.trainer.report import console
from marsrl.trainer.report.console import MOST_SHOWN, RunConsole


def test_parts_of_the_start_print_their_name_and_seconds() -> None:
    printed = io.StringIO()
    with RunConsole(stream=printed).part("starting engines"):
        assert printed.getvalue() == "starting engines ...\n"
    assert re.fullmatch(r"starting engines: \d+\.\d s", printed.getvalue().splitlines()[-1])


def test_the_first_sample_shows_prompt_output_answer_and_reward() -> None:
    printed, sample = io.StringIO(), make_sample("000001/solver:0")
    asked = replace(sample, prompt_text="2 + 2\x1b[2J", full_text="a" * (MOST_SHOWN + 7) + "\nIt is [bold]4[/bold].")
    RunConsole(stream=printed).sample(replace(asked, answer="4"))
    RunConsole(rank=1, stream=printed).sample(asked)  # another rank's console prints nothing
    text = printed.getvalue()
    assert text.startswith(
        f"first sample, 000001/solver:0\n--- solver read {len(sample.prompt_ids):,} tokens:\n2 + 2␛[2J\n"
    )
    assert "[29 characters]" in text and text.count("first sample") == 1
    assert text.endswith("It is [bold]4[/bold].\n--- parsed: the answer '4'; reward 1\n")
    unread = replace(asked, answer=None, verdict=None, reward=Reward(MISSING, MISSING, note="no judgement"))
    RunConsole(stream=printed).sample(unread)
    assert printed.getvalue().endswith("parsed: neither an answer nor a verdict; no reward (no judgement)\n")
    RunConsole(stream=printed).sample(replace(unread, verdict=False))
    assert "the verdict wrong; no reward" in printed.getvalue()


def test_an_evaluation_is_printed_as_soon_as_it_is_made() -> None:
    printed = io.StringIO()
    RunConsole(stream=printed).accuracies("evaluation before", make_evaluation(0.5))
    (line,) = printed.getvalue().splitlines()
    estimate = r"0\.\d{3} \(0\.\d{3}-0\.\d{3}, n \d+\)"
    rows = ("solver", "verifier1", "corrector1", "system")
    assert re.fullmatch("evaluation before: " + "; ".join(f"{row} {estimate}" for row in rows), line)
    assert "solver 0.500 (" in line and "system 0.530 (" in line


def test_rate_and_time_left_are_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with RunConsole(stream=printed).progress("evaluation", unit="episodes") as bar:
        bar.played(16, 64, 0, "verifier1, round 3: 12 of 40 calls")  # 16 are saved by an earlier process
        for clock[0], num_over in ((400.0, 16), (700.0, 22), (710.0, 23), (1000.0, 64)):
            bar.played(num_over, 64, 1234, "verifier1, round 3: 12 of 40 calls" if num_over < 64 else "")
    assert printed.getvalue().splitlines() == [
        "evaluation: 16/64 episodes  verifier1, round 3: 12 of 40 calls; 1,234 tokens",
        "evaluation: 22/64 episodes  0.6 episodes/min  70 min left  verifier1, round 3: 12 of 40 calls; 1,234 tokens",
        "evaluation: 64/64 episodes  3.2 episodes/min  1,234 tokens",
        "evaluation: 64/64 episodes  3.2 episodes/min  1,234 tokens",
    ]
