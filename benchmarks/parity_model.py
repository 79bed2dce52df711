"""Compare a model in the trainer, both engines and transformers: log-probs of the same tokens, and greedy completions.

Run by `python benchmarks/parity.py --model DIR [--dtypes float32 bfloat16] [--engines local vllm] [--prompts 50]`. The
model's chat template renders the prompts, and transformers answers them greedily, one after the other. All programs then score
the same prompts and answers. The reference is the float32 log-probs of transformers, also for bfloat16. One line per program and
dtype:

    median, largest   |difference| of log-probs from the reference, nats
    greedy            number of an engine's greedy answers that equal those of transformers in the same dtype, token by token. In
                      float32 all must be equal, or first differ at a tie: the log-probs of transformers' two most likely tokens
                      differ by less than TIE

The bfloat16 line of transformers shows the effect of rounding alone; the median of other bfloat16 lines may be twice as large.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import FloatArray, IntArray

if TYPE_CHECKING:
    from marsrl.rollout.engines.protocol import Engine

COLUMNS = ("median", "largest")
NUM_NEW = 32  # tokens per answer
TIE = 1e-3  # nats
LARGEST = 1e-3  # nats; largest allowed difference in float32, for 30 layers and log-probs down to -30
BFLOAT16_MEDIAN = 2.0  # largest allowed median, relative to the median of transformers in bfloat16


def chats() -> list[list[dict[str, str]]]:
    """Return fifty short chats: sums, words, code, other alphabets, white space, system prompts, several turns."""
    questions = [f"What is {a} + {b}?" for a, b in ((3, 4), (27, 58), (1024, 2048), (7, 193), (36, 64))]
    questions += [
        f"Tom has {n} apples and buys {n + 5} more.\n\nHow many has he? Think step by step." for n in range(8, 13)
    ]
    questions += [f"Spell the word {spelled} backwards." for spelled in ("river", "planet", "Über", "naïve", "κόσμος")]
    questions += [
        f"List {n} things in a {room}." for n, room in enumerate(("kitchen", "forest", "school", "harbour", "cave"), 3)
    ]
    questions += [
        f"def f(x):\n\treturn  x * {n}  # twice\n\n\nf({n})\nWhat does this print?" for n in (2, 20, 202, 7, 77)
    ]
    questions += [
        f"Translate to French: {text}" for text in ("good morning", "I am here.", "two dogs", "the sea", "Why not?")
    ]
    questions += [
        f"Solve for $x$: \\[{a}x + {b} = {a * 3 + b}\\]" for a, b in ((2, 1), (5, 10), (7, 0), (11, 4), (3, 33))
    ]
    alone = [[{"role": "user", "content": text}] for text in questions]
    guided = [
        [{"role": "system", "content": f"Answer in at most {n} words."}, *chat] for n, chat in enumerate(alone[:10], 1)
    ]
    reply = {"role": "assistant", "content": "Certainly. Which one?"}
    longer = [[*chat, reply, {"role": "user", "content": "  The first one,\tplease…  "}] for chat in alone[10:15]]
    return [*alone, *guided, *longer]


def model_lines(
    model: Path, dtypes: Sequence[str], engines: Sequence[str], num_prompts: int
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the table as they are measured."""
    renderer = ChatRenderer(model)
    prompts = [renderer.render(chat)[0] for chat in chats()[:num_prompts]]
    stops = renderer.stop_ids
    judge = _transformers(model, torch.float32)
    answers = [_greedy(judge, prompt, stops) for prompt in prompts]
    sequences = [np.concatenate([prompt, answer]) for prompt, (answer, _) in zip(prompts, answers, strict=True)]
    expected = [_scored(judge, sequence) for sequence in sequences]
    del judge
    allowed = LARGEST
    for dtype in dtypes:
        if dtype == "bfloat16":
            begin, judge = time.perf_counter(), _transformers(model, torch.bfloat16)
            answers = [_greedy(judge, prompt, stops) for prompt in prompts]
            off = _off([_scored(judge, sequence) for sequence in sequences], expected)
            allowed = BFLOAT16_MEDIAN * off["median"]
            yield {"layout": "transformers, bfloat16", "seconds": time.perf_counter() - begin, **off, "is_ok": True}
            del judge
        bound = "largest" if dtype == "float32" else "median"
        begin = time.perf_counter()
        off = _off(_trainer_scores(model, dtype, sequences), expected)
        yield {
            "layout": f"trainer, {dtype}",
            "seconds": time.perf_counter() - begin,
            **off,
            "is_ok": off[bound] <= allowed,
        }
        for engine in engines:
            begin = time.perf_counter()
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                job = process.submit(_engine, engine, model, dtype, prompts, sequences, stops)
                scores, completions = job.result()
            off = _off(scores, expected)
            same, ties = _compared(completions, answers)
            is_ok = off[bound] <= allowed and (dtype != "float32" or same + ties == len(prompts))
            greedy = f"{same} of {len(prompts)} greedy, {ties} ties"
            yield {
                "layout": f"{engine}, {dtype}: {greedy}", "seconds": time.perf_counter() - begin, **off, "is_ok": is_ok,
            }  # fmt: skip


def _off(scores: Sequence[FloatArray], expected: Sequence[FloatArray]) -> dict[str, float]:
    off = np.abs(np.concatenate(scores).astype(float) - np.concatenate(expected))
    return {"median": float(np.median(off)), "largest": float(off.max())}


def _compared(completions: Sequence[IntArray], answers: Sequence[tuple[IntArray, FloatArray]]) -> tuple[int, int]:
    """Return (number of answers equal to those of transformers, number of answers that first differ at a tie of two tokens)."""
    same = ties = 0
    for completion, (answer, margins) in zip(completions, answers, strict=True):
        if np.array_equal(completion, answer):
            same += 1
            continue
        shared = min(len(completion), len(answer))
        position = next((i for i in range(shared) if completion[i] != answer[i]), shared - 1)
        ties += bool(margins[position] < TIE)
    return same, ties


def _transformers(model: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


@torch.no_grad()
def _greedy(model: Any, prompt: IntArray, stops: Sequence[int]) -> tuple[IntArray, FloatArray]:
    """Return (tokens of the greedy answer, log-prob gap between the two most likely tokens at each position)."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    options = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": list(stops), "pad_token_id": stops[0]}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options
    )
    margins = [float(-step_logits[0].float().topk(2).values.diff()) for step_logits in out.logits]
    return out.sequences[0, len(prompt) :].numpy().astype(np.int32), np.array(margins, np.float32)


@torch.no_grad()
def _scored(model: Any, sequence: IntArray) -> FloatArray:
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    logprobs = model(ids).logits[0, :-1].double().log_softmax(-1)  # float32 errs by 1e-5 with 50,000 tokens
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].float().numpy()


def _trainer_scores(model: Path, dtype: str, sequences: Sequence[IntArray]) -> list[FloatArray]:
    from marsrl.kernels import PolicyObjective
    from marsrl.trainer.config import MptConfig, PolicyConfig
    from marsrl.trainer.learner.learner import Learner
    from marsrl.trainer.learner.megatron import parallel
    from marsrl.trainer.weights.comparison import sequence_scores

    policy = PolicyConfig.model_validate({"dtype": dtype})
    learner = Learner(policy, model, objectives=[PolicyObjective()], mpt=MptConfig(scope="off"), total_steps=1, seed=0)
    scores = sequence_scores(learner, sequences)
    parallel.stop()
    return scores


def _engine(
    kind: str,
    model: Path,
    dtype: str,
    prompts: Sequence[IntArray],
    sequences: Sequence[IntArray],
    stops: tuple[int, ...],
) -> tuple[list[FloatArray], list[IntArray]]:
    """Return (the engine's scores of the sequences, its greedy answers to the prompts). This process runs nothing else."""
    from marsrl.rollout.config import VllmOptions
    from marsrl.rollout.engines.local.engine import LocalEngine
    from marsrl.rollout.engines.protocol import DecodeRequest, EngineSpec, Sampling
    from marsrl.rollout.engines.vllm.arguments import vllm_environment
    from marsrl.rollout.engines.vllm.engine import VllmEngine

    os.environ.update(vllm_environment(threads=1))
    spec = EngineSpec(kind, str(model), dtype, max_model_len=max(map(len, sequences)) + NUM_NEW)
    of_vllm = replace(spec, vllm=VllmOptions(max_num_seqs=32, kv_cache_mib=512))
    engine: Engine = VllmEngine(of_vllm) if kind == "vllm" else LocalEngine(spec)
    sampling = Sampling(temperature=0.0, stop_token_ids=stops)
    requests = [DecodeRequest(str(i), ids, NUM_NEW, sampling, 0, str(i)) for i, ids in enumerate(prompts)]
    scores, answers = engine.score(sequences), dict[str, IntArray]()
    engine.submit(requests, version=0)
    while len(answers) < len(requests):
        answers |= {sample.uid: sample.token_ids for sample in engine.collect(1.0)}
    engine.close()
    return scores, [answers[request.uid] for request in requests]
