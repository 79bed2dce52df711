"""A run whose every text is an attack on whoever shows it: test data, no result of any model."""

from __future__ import annotations

from pathlib import Path

import zstandard
from made_up_run import make_group, make_run, make_sample

from marsrl.rollout.types import Finish, Reward, Segment
from marsrl.trainer.report.samples_log import write_samples

ATTACK = (
    "</pre></script></title></style><script>document.title='PWNED'</script>"
    "<img src=http://example.invalid/x onerror=\"document.title='PWNED'\"><svg onload=document.title='PWNED'>"
    "<style>*{display:none}</style><a href=\"javascript:document.title='PWNED'\">x</a>"
    "' onmouseover='x \" onload=\"y ${7*191} {{7*191}} "
    "\x00\x07\x1b[2J\x1b]0;PWNED\x07\x9b31m\r\u2028\u202e\u2067\ud800 \udfff -->"
)


def make_hostile_run(root: Path) -> Path:
    """Six steps of made-up samples with ATTACK in all that a model, data or a config may hold; a seventh of long texts, a
    tool's among them, by three policy versions; an eighth whose file is damaged."""
    run = make_run(root, text=ATTACK)
    unclosed = "<tool_call>" * 50_000
    talk = f"I look it up. <tool_call>{ATTACK}</tool_call><tool_response>{ATTACK}</tool_response> So: {ATTACK}"
    shared = {"rollout_id": f"long{ATTACK}", "problem_id": f"long{ATTACK}", "num_tokens": 30}
    solver = make_sample("L/solver:0", **shared, text="x" * (1 << 20), prompt_text=ATTACK, finish=Finish.LENGTH)
    ring = {"group_id": "v", "parent_uid": "L/solver:0", "verdict": False}
    wrong = make_sample("L/verifier1:0", "verifier1", **shared, **ring, reward=Reward(0.0, 0.0, {"verdict": 0.0}))
    segments = tuple(Segment(10 * k, 10 * k + 10, 4 + k) for k in range(3))
    repaired = make_sample(
        "L/corrector1:0", "corrector1", **shared, group_id="c", parent_uid="L/verifier1:0", text=talk, segments=segments
    )
    endless = make_sample(
        "L/corrector1:1", "corrector1", **shared, group_id="c", parent_uid="L/corrector1:1", text=unclosed
    )
    groups = [make_group(solver), make_group(wrong), make_group(repaired, endless)]
    write_samples(run, 6, groups, {"L/solver:0": -0.5})
    damaged = write_samples(run, 7, [make_group(make_sample("d", text=ATTACK, prompt_text=ATTACK))])
    line = zstandard.ZstdDecompressor().stream_reader(damaged.read_bytes()).readall()
    damaged.write_bytes(zstandard.compress(line + b'{"uid": "\xff\xfe' + ATTACK.encode("utf-8", "replace")))
    return run.path
