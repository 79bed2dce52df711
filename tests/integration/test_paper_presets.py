"""The papers' presets train with only the machine, the model, the lengths and the number of problems changed.

A script answers in place of the agents; half of its answers are right, so that every agent is called. The rest is real, except
for a search server's answers: tools, credit, the learner of a tiny model, verified weight syncs.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from completions_server import Handler, completions_server
from scripted_pool import ScriptedWithWeights, engines_are, rows_of, samples_of, saying, train_here
from small_run import sevens

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.tools.config import HttpSearch
from marsrl.trainer.config.read import CONFIGS, read_config
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.summary import load_summary

MACHINE = (
    "run.device=cpu", "run.steps=2", "run.evaluate=false", "policies.main.dtype=float32", "policies.main.recompute=none",
    "policies.main.layout={tensor: 1, expert: 1, pipeline: 1, context: 1}",
    "rollout.engine=local", "rollout.placement=local", "rollout.engines=1",
    "rollout.ray_address=null", "rollout.vllm.tensor_parallel=1",
)  # fmt: skip
TOKENS = 4096  # maximum for any prompt and any completion
TRAINED = {
    "qwen3_30b_a3b": {"solver", "verifier1"},  # the other agents play in later steps
    "ulorl": {"solver"},
    "drmas_math": {"solver", "verifier"},
    "drmas_search": {"verifier", "search", "answer"},
    "mars_qwen3_8b": {"system1", "system2"},
}
CALL = json.dumps({"tool": "search", "arguments": {"queries": ["seven"]}, "purpose": "to find it"})
FOUND = {"result": [[{"document": {"id": "7", "contents": '"Seven"\nIt is 7.'}, "score": 1.0}]]}
PAGE = f"<html><body><article><h1>Seven</h1><p>{'The number that is asked for is 7. ' * 20}</p></article></body></html>"


def script(request: DecodeRequest) -> str:
    rng = random.Random(f"{request.uid} {len(request.token_ids)}")
    agent, answer = request.uid.rpartition("/")[2].partition(":")[0].partition("#")[0], rng.choice("78")
    verdict = rng.choice(["correct", "wrong"])
    completions = {
        "solver": f"\\boxed{{{answer}}}",
        **dict.fromkeys(("verifier1", "verifier2"), f"Findings: none\nVerdict: {verdict}"),
        **dict.fromkeys(("corrector1", "corrector2"), f"\\boxed{{{answer}}}"),
        "verifier": rng.choice(
            ["<verify>approve</verify> <verify>yes</verify>", "<verify>reject</verify> <verify>no</verify>"]
        ),
        "search": "<search>seven</search>",
        "answer": f"<answer>{answer}</answer>",
        "system1": "It is 7.",
        "system2": rng.choice([f"<tool_call>{CALL}</tool_call>", f"<answer>{answer}</answer>"]),
    }
    return completions[agent]


def serve(handler: Handler, body: dict[str, Any], before: int) -> None:
    """Serve a retrieval server, SerpApi, and the page that it finds."""
    if handler.path.startswith("/page"):
        handler.send(200, PAGE.encode(), Content_Type="text/html; charset=utf-8")
    elif "q" in body:
        link = f"http://{handler.headers['Host']}/page/{body['engine']}"
        handler.send(200, json.dumps({"organic_results": [{"title": "Seven", "link": link, "snippet": "7"}]}).encode())
    else:
        handler.send(200, json.dumps(FOUND).encode())


class Keeping(ScriptedWithWeights):
    """Engine whose sampler keeps all tokens, and reports that if requested."""

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        return [
            replace(result, kept_tokens=KeptTokens.nothing_left_out(len(result.token_ids)))
            for result in super().collect(timeout_s)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("preset", TRAINED)
def test_a_preset_reaches_version_2(preset: str, tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    os.environ["SERPAPI_API_KEY"] = "key"
    with completions_server(serve) as server, engines_are(saying(model, script, Keeping)):
        paper, _ = read_config(CONFIGS / f"{preset}.yaml")
        words = [f"policies.main.model={model}", f"data.train={sevens(tmp_path, 300)}"]
        words += [f"agents.{name}.max_input_tokens={TOKENS}" for name in paper.agents]
        words += [f"agents.{name}.max_response_tokens=64" for name, a in paper.agents.items() if a.max_response_tokens]
        words += ["rollout.max_response_tokens=1024", "trainer.max_tokens_per_micro_batch=16384"]
        # Five updates need two problems.
        words += [f"rollout.prompts_per_step={min(2, paper.trainer.updates_per_step)}"]
        address = server.base_url.removesuffix("/v1")
        if isinstance(paper.tools.search, HttpSearch):
            words.append(f"tools.search.url={address}/retrieve")
        elif paper.tools.search is not None:  # MARS searches the web and reads pages
            words += [f"tools.{tool}.base_url={address}" for tool in ("search", "scholar")]
            words.append("tools.pages={allow_hosts: [127.0.0.1], concurrency: 8, workers: 1}")
        words += ["task_options.workers=1"] if paper.task == "math" else []
        directory = train_here(tmp_path, [f"preset={preset}", *MACHINE, *words])
    assert load_summary(directory.path / "summary.json").verified_syncs == 3  # versions 0, 1 and 2
    rows = rows_of(directory)
    assert [row["actor/updates"] for row in rows] == [paper.trainer.updates_per_step] * 2
    assert all(row["actor/grad_norm"] for row in rows)
    assert TRAINED[preset] <= {record.agent for record in samples_of(directory)}
    if paper.tools.search is not None:
        asked = [body for body in server.bodies if body]
        assert asked and {int(body.get("topk") or body["num"]) for body in asked} == {paper.tools.search.top_k}
        if not isinstance(paper.tools.search, HttpSearch):
            assert sum(row["tools/pages/read"] or 0 for row in rows) > 0
        assert sum(row["tools/search/errors"] or 0 for row in rows) == 0
