"""A made-up run whose texts all try to attack the pages that show them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from made_up_run import make_group, make_run, make_sample

from marsrl.rollout.types import Finish, Reward, Sample, Segment
from marsrl.trainer.learner.trained_tokens import CLIPPED, GATED, MASKED, TrainedTokens
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.report.token_log import token_record, write_tokens
from marsrl.trainer.runs.directory import RunDirectory

ATTACK = (
    "</pre></script></title></style><script>document.title='PWNED'</script>"
    "<img src=http://example.invalid/x onerror=\"document.title='PWNED'\"><svg onload=document.title='PWNED'>"
    "<style>*{display:none}</style><a href=\"javascript:document.title='PWNED'\">x</a>"
    "' onmouseover='x \" onload=\"y ${7*191} {{7*191}} "
    "[x](javascript:document.title='PWNED') ![x](http://example.invalid/x) $\\href{javascript:document.title='PWNED'}{x}$ "
    "\x00\x07\x1b[2J\x1b]0;PWNED\x07\x9b31m\r\u2028\u202e\u2067\ud800 \udfff -->"
)

CHAT = """<|im_start|>system
{system}<|im_end|>
<|im_start|>user
Two & lines
of a *problem*: 3*4*5, $12 an hour and $5 more.<|im_end|>
<|im_start|>assistant
"""
WRITTEN = r"""**First**, let $x = \frac{1}{2}$, not $\frac{1$.

\begin{align}
x &= 2 \label{words} \\
  &= 3
\end{align}

| a | b |
|---|---|
| 1 | \(\sqrt{2}\) |

```python
x = "$y$"  # *no* Markdown
z = 1
```
[a link](http://example.invalid/a "its title") ![an image](http://example.invalid/b) <b>no HTML</b> &#x202e; $\char"202E$

[gone]: http://example.invalid/c

It is \boxed{\frac{7}{2}}

#### 72
"""


class Pieces:
    """Stands in for a renderer. Its tokens are pieces of the sample's text with about the same length, cut at any character."""

    def __init__(self, text: str) -> None:
        self._text = text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        cuts = [len(self._text) * k // len(ids) for k in range(len(ids) + 1)]
        return [self._text[start:end] for start, end in itertools.pairwise(cuts)]


def write_made_up_tokens(run: RunDirectory, step: int, samples: dict[int, Sample], trained: set[str]) -> None:
    """Write token logs. samples: samples by line. trained: uids of the trained samples.

    Token k has trainer log-prob -k / 10, entropy k / 20, and alternating marks.
    """
    records = []
    for line, sample in samples.items():
        renderer: Any = Pieces(sample.text)
        num = np.arange(int(sample.is_sampled.sum()), dtype=np.float32)
        marks = np.array([0, CLIPPED, GATED | MASKED, MASKED], np.uint8)[num.astype(int) % 4]
        found = TrainedTokens(sample.uid, -num / 10, num / 20, marks) if sample.uid in trained else None
        records.append(token_record(sample, step, line, "main", renderer, found))
    write_tokens(run, step, records)


def make_hostile_run(root: Path) -> Path:
    """Write eight steps of made-up samples, with ATTACK in all texts that come from a model, data or a config.

    The seventh step has long texts by three policy versions, some with tools or chats, and token logs of two samples. The
    samples of the eighth step and the token log of the first are damaged.
    """
    run = make_run(root, text=ATTACK)
    unclosed = "<tool_call>" * 50_000
    talk = f"I look it up. <tool_call>{ATTACK}</tool_call><tool_response>{ATTACK}</tool_response> So: {ATTACK}"
    shared = {"rollout_id": f"long{ATTACK}", "problem_id": f"long{ATTACK}", "num_tokens": 30}
    solver = make_sample("L/solver:0", **shared, text="x" * (1 << 20), prompt_text=ATTACK, finish=Finish.LENGTH)
    ring = {"group_id": "v", "parent_uid": "L/solver:0", "verdict": False}
    wrong = make_sample("L/verifier1:0", "verifier1", **shared, **ring, reward=Reward(0.0, 0.0, {"verdict": 0.0}))
    segments = tuple(Segment(40 * k, 40 * k + 40, 4 + k) for k in range(3))
    long = {**shared, "num_tokens": 120, "segments": segments, "is_sampled": np.arange(120) < 110}
    repaired = make_sample("L/corrector1:0", "corrector1", **long, group_id="c", parent_uid="L/verifier1:0", text=talk)
    endless = make_sample(
        "L/corrector1:1", "corrector1", **shared, group_id="c", parent_uid="L/corrector1:1", text=unclosed
    )
    prompt = CHAT.format(system="Be strict.\n" * 100)
    chat = make_sample("chat", "judge", problem_id="chat", prompt_text=prompt, text=WRITTEN, reward=Reward(0.0, 0.0))
    groups = [make_group(solver), make_group(wrong), make_group(repaired, endless), make_group(chat)]
    write_samples(run, 6, groups, {"L/solver:0": -0.5})
    write_made_up_tokens(run, 6, {1: solver, 3: repaired}, {"L/corrector1:0"})
    (run.tokens / "step_0.parquet").write_bytes(ATTACK.encode("utf-8", "replace"))
    damaged = write_samples(run, 7, [make_group(make_sample("d", text=ATTACK, prompt_text=ATTACK))])
    damaged.write_bytes(damaged.read_bytes()[:-40] + ATTACK.encode("utf-8", "replace"))
    return run.path
