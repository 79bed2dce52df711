"""VllmEngine on Model Runner V2 with vLLM's own sampler, as GPUs run it: `python v2_worker.py MODEL CHANGED CYCLE OUT`.

vLLM's CPU build has that runner, whose kernels are Triton's; Triton's interpreter runs them here. That changes the process
for good: hence one of its own. CHANGED: a directory of new weights. CYCLE: of a model whose tokens mostly come in one order,
which an engine with draft tokens guesses. OUT: a pickle of what was decoded, by the name of a test.
"""

from __future__ import annotations

import os
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engine_cases import decoded, prompt, request

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.protocol import EngineSpec, Records, WeightUpdate
from marsrl.rollout.engines.vllm import engine
from marsrl.rollout.engines.vllm.arguments import vllm_environment
from marsrl.rollout.engines.vllm.engine import VllmEngine
from marsrl.rollout.imports import imports_for_good

STOP = "w013 w014"  # texts of two tokens of the cycle
CUT = {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "records_kept": True}


def pretend_triton_for_cpus() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", **vllm_environment(threads=1)}
    import triton.backends
    from triton.runtime import interpreter

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]
    builder = interpreter.interpreter_builder
    # computed at each + - *, and dropped: debug is off
    builder.options = replace(builder.options, sanitize_overflow=False)
    with imports_for_good():
        import vllm.entrypoints.llm  # noqa: F401
        import vllm.v1.sample.ops.topk_topp_sampler as cut
        import vllm.v1.worker.gpu.sample.sampler as sampler
        import vllm.v1.worker.gpu.sample.states as states
        from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config

    def ahead(config: Any) -> None:
        settle(config)
        config.scheduler_config.async_scheduling = True  # as on GPUs; "not required on CPU"

    CpuPlatform.check_and_update_config = staticmethod(ahead)  # type: ignore[method-assign, assignment]
    # Its kernel for top_k and top_p is too much for the interpreter; this is vLLM's other one.
    sampler.apply_top_k_top_p = states.apply_top_k_top_p = lambda logits, k, p: (  # type: ignore[attr-defined]
        logits if k is None and p is None else cut.apply_top_k_top_p_pytorch(logits, k, p)
    )


def start(model: Path, draft_tokens: int = 0) -> VllmEngine:
    """As on a GPU, as far as the sampler goes."""
    engine.vllm_refusals = lambda *words: ()  # on a CPU users have V1
    options = VllmOptions(max_num_seqs=12, kv_cache_mib=32, sampler="engine", draft_tokens=draft_tokens)
    records = Records(kept_tokens=True, experts=True)
    return VllmEngine(EngineSpec("vllm", str(model), "float32", 256, vllm=options, records=records))


def with_drafts(cycle: Path) -> dict[str, Any]:
    """Results of an engine that guesses four tokens at once."""
    served = start(cycle, draft_tokens=4)
    config = served._llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "drafts_by": config.speculative_config.method,
        "drafts_async": config.scheduler_config.async_scheduling,
    }
    turns = np.tile(np.arange(10, 17, dtype=np.int32), 4)  # the tokens of the cycle, in order
    cut = [request(f"{i}", turns[i:], 24, seed=i, experts_from=3, **CUT) for i in range(6)]
    served.submit(cut, version=0)
    results, found["num_steps"] = list[Any](), 0
    while len(results) < len(cut):
        results += served.collect(0.0)
        found["num_steps"] += 1
    found["guessed_cut"] = cut, sorted(results, key=lambda result: str(result.uid))
    many = [request(f"m{i}", turns, 30, seed=i, temperature=1.0) for i in range(12)]
    found["guessed"] = many, decoded(served, many)
    stopped = [replace(ask, sampling=replace(ask.sampling, stop=(STOP,))) for ask in cut]
    found["stopped"] = stopped, decoded(served, stopped)
    found["guessed_scores"] = served.score([joined(*pair) for pair in zip(*found["guessed_cut"], strict=True)])
    served.close()
    return found


def main(model: Path, changed: Path, cycle: Path, out: Path) -> None:
    pretend_triton_for_cpus()
    served = start(model)
    config = served._llm.llm_engine.vllm_config
    told: dict[str, Any] = {"runner": config.use_v2_model_runner, "async": config.scheduler_config.async_scheduling}
    cut = [request(f"{i}", prompt(40 + 9 * i, seed=i), 6, seed=i, experts_from=0, **CUT) for i in range(4)]
    told["cut"] = cut, decoded(served, cut)
    told["again"] = cut, decoded(served, cut)  # behind cached prefixes
    whole = [request(f"w.{i}", prompt(40), 3, seed=i, temperature=1.3) for i in range(4)]
    told["whole"] = whole, decoded(served, whole)
    on = [
        request(f"{ask.uid}.on", joined(ask, result), 4, seed=100, experts_from=len(joined(ask, result)) - 1, **CUT)
        for ask, result in zip(*told["cut"], strict=True)
    ]
    told["on"] = on, decoded(served, on)
    long = [request(f"{i}.long", prompt(30, seed=i), 200, seed=i, experts_from=10, **CUT) for i in range(3)]
    served.submit(long, version=0)
    for _ in range(6):
        served.collect(0.0)
    served.abort()
    told["aborted"] = long, sorted(served.collect(0.0), key=lambda result: result.uid)
    told["receipt"] = served.update_weights(WeightUpdate(str(changed), 1))
    told["changed"] = cut, decoded(served, cut, version=1)
    told["scores"] = served.score([joined(*pair) for pair in zip(*told["changed"], strict=True)])
    told["cold"] = [decoded(served, [request("c", prompt(9), 3, temperature=t)], version=1)[0] for t in (0.0, 0.005)]
    told["num_decoded"] = served.num_decoded()
    served.close()
    told |= with_drafts(cycle)
    out.write_bytes(pickle.dumps(told))


def joined(ask: Any, result: Any) -> Any:
    return np.concatenate([ask.token_ids, result.token_ids])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
