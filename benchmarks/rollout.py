"""Our scheduler and Ray actors against bare vLLM on the same prompts and lengths: tokens per second of wall time.

    python benchmarks/rollout.py [--json FILE] [--repeats 5] [--problems 64]

Ours is one stage of the scheduler: prompts rendered, requests sent to a vLLM actor, log-probs brought back, texts
decoded, parsed and judged. Bare is vllm.LLM.generate in a process of its own with as many threads, told beforehand how
long every completion is (max_tokens = ours, ignore_eos), without log-probs or seeds. The two take turns; `ratio:` is the
median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO


def bare(model_dir: str, max_num_seqs: int, max_model_len: int, kv_cache_mib: int, threads: int) -> None:
    """Child: one JSON list of [prompt ids, length] a line in, seconds of LLM.generate a line out."""
    from marsrl.rollout.engines.vllm_engine import vllm_environment

    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # vLLM prints to stdout
    os.dup2(2, 1)
    os.environ.update(vllm_environment(threads))
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    torch.set_num_threads(threads)
    llm = LLM(
        model=model_dir, dtype="float32", enforce_eager=True, block_size=32, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, kv_cache_memory_bytes=kv_cache_mib << 20, skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in work]
        sampling = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        decoded = [len(o.outputs[0].token_ids) for o in outputs]
        if decoded != [n for _, n in work]:
            raise SystemExit("bare vLLM did not decode the lengths it was told to")
        print(json.dumps(seconds), file=out, flush=True)


class Bare:
    """The child process."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--bare", *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - for the life of the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._answer("start")

    def seconds(self, work: list[tuple[list[int], int]]) -> float:
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(work) + "\n")
        stdin.flush()
        return float(self._answer("generate"))

    def _answer(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"bare vLLM failed at {what}:\n{self._log.read()[-3000:]}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64, help="new problems of the stage, 8 samples each")
    parser.add_argument("--bare", nargs=5, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.bare:
        bare(words.bare[0], *map(int, words.bare[1:]))
        return 0
    from marsrl.rollout.scheduler import Scheduler
    from marsrl.trainer.build import open_team
    from marsrl.trainer.init_model import init_model
    from marsrl.trainer.machine import commit, device_name
    from marsrl.trainer.preflight import preflight
    from marsrl.trainer.read_config import read_config

    settings = [f"rollout.prompts_per_step={words.problems}", "rollout.max_response_tokens=56"]
    checked = preflight(read_config(None, settings)[0], world_size=1)
    config = checked.config
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = f"{folder}/model"
        init_model("cpu_default", "arithmetic", Path(model_dir), seed=0, dtype="float32")
        longest = config.agents["solver"].max_input_tokens + config.rollout.max_response_tokens
        vllm = config.rollout.vllm
        threads = config.rollout.threads or os.cpu_count() or 1
        child = Bare(model_dir, *map(str, (vllm.max_num_seqs, longest, vllm.kv_cache_mib, threads)))
        try:
            with open_team(checked, {"main": model_dir}) as team:
                for repeat in range(words.repeats + 1):  # the first is a warm-up
                    scheduler = Scheduler(config.rollout, team, checked.task.problems(repeat), seed=repeat)
                    start = time.perf_counter()
                    batch = scheduler.next_batch({"main": 0})
                    ours = time.perf_counter() - start
                    samples = [s for group in batch.groups for s in group.samples]
                    tokens = sum(len(s.token_ids) for s in samples)
                    theirs = child.seconds([(s.prompt_ids.tolist(), len(s.token_ids)) for s in samples])
                    row = {"tokens": tokens, "ours_s": ours, "bare_s": theirs, "ratio": theirs / ours}
                    print(
                        f"{'warm-up' if not repeat else f'turn {repeat}'}: {len(samples)} samples, {tokens} tokens; ours "
                        f"{tokens / ours:,.0f} tokens/s, bare {tokens / theirs:,.0f} tokens/s, ratio {theirs / ours:.3f}"
                    )
                    if repeat:
                        rows.append(row)
        finally:
            child.close()
    ratios = [row["ratio"] for row in rows]
    if words.json:
        record = {"device": device_name(), "commit": commit(), "turns": rows}
        Path(words.json).write_text(json.dumps(record, indent=1))
    print(f"spread of the turns: {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"ratio: {statistics.median(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
