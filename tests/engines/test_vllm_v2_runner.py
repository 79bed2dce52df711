"""vLLM as GPUs run it: Model Runner V2, its sampler and async scheduling. 60 s in one process.

vLLM's CPU build contains that runner with its Triton kernels, which Triton's interpreter runs here. A process cannot leave this
mode, so a separate one runs `python test_vllm_v2_runner.py MODEL CHANGED CYCLE DRAFT OTHER OUT`:

    CHANGED   directory with new weights of MODEL
    CYCLE     model whose tokens mostly come in one order, which an engine with draft tokens can guess
    DRAFT     EAGLE-3 draft for CYCLE
    OTHER     directory with new weights of CYCLE
    OUT       pickle of the results, by test
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import ROUNDING, assert_drawn_from, decoded, perturbed, prompt, request, spec_of, tensors_of
from safetensors.torch import save_file

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import Records, WeightUpdate
from marsrl.rollout.engines.vllm.arguments import vllm_environment
from marsrl.rollout.engines.vllm.engine import VllmEngine
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.types import Finish

pytestmark = pytest.mark.slow

STOP = "w013 w014"  # stop string of two tokens of the cycle
WARM = 1.3  # temperature at which some drafts are rejected, so that few tokens suffice
CUT = {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "records_kept": True}


def pretend_triton_for_cpus() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", **vllm_environment(threads=1)}
    import triton.backends
    from triton.runtime import interpreter

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]
    builder = interpreter.interpreter_builder
    # Overflow checks would be computed at each + - * and then dropped, because debug is off.
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
        config.scheduler_config.async_scheduling = True  # as on GPUs; the check above switches it off on a CPU

    CpuPlatform.check_and_update_config = staticmethod(ahead)  # type: ignore[method-assign, assignment]
    # vLLM's kernel for top_k and top_p is too much for the interpreter; this is its other implementation.
    sampler.apply_top_k_top_p = states.apply_top_k_top_p = lambda logits, k, p: (  # type: ignore[attr-defined]
        logits if k is None and p is None else cut.apply_top_k_top_p_pytorch(logits, k, p)
    )


RECORDS = Records(kept_tokens=True, experts=True)


def start(model: Path, records: Records = RECORDS, **drafts: Any) -> VllmEngine:
    """Start an engine with the Model Runner V2 and its sampler, as on GPUs; on a CPU, users get V1."""
    options = VllmOptions(max_num_seqs=12, kv_cache_mib=32, sampler="engine", **drafts)
    return VllmEngine(spec_of(model, kind="vllm", vllm=options, records=records))


def with_drafts(cycle: Path, **drafts: Any) -> dict[str, Any]:
    """Return the results of an engine that drafts several tokens per step."""
    served = start(cycle, **drafts)
    config = served._llm.llm_engine.vllm_config
    recorded: dict[str, Any] = {
        "drafts_by": config.speculative_config.method,
        "drafts_async": config.scheduler_config.async_scheduling,
    }
    turns = np.tile(np.arange(10, 17, dtype=np.int32), 4)  # the tokens of the cycle, in order
    cut = [request(f"{i}", turns[i:], 24, seed=i, experts_from=3, **CUT) for i in range(4)]
    served.submit(cut, version=0)
    results, recorded["num_steps"] = list[Any](), 0
    while len(results) < len(cut):
        results += served.collect(0.0)
        recorded["num_steps"] += 1
    recorded["guessed_cut"] = cut, sorted(results, key=lambda result: str(result.uid))
    many = [request(f"m{i}", turns, 24, seed=i, temperature=WARM) for i in range(4)]
    recorded["guessed"] = many, decoded(served, many)
    stopped = [replace(ask, sampling=replace(ask.sampling, stop=(STOP,))) for ask in cut]
    recorded["stopped"] = stopped, decoded(served, stopped)
    recorded["guessed_scores"] = served.score([joined(*pair) for pair in zip(*recorded["guessed_cut"], strict=True)])
    served.close()
    return recorded


def with_draft_model(cycle: Path, draft: Path, other: Path) -> dict[str, Any]:
    """Return the results of an engine with a draft model, before and after an update of the policy."""
    served = start(cycle, Records(), draft_tokens=3, draft_model=str(draft))
    runner = served._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model, guesser = runner.get_model(), runner.get_draft_model()
    greedy = [request(f"g{i}", prompt(9 + i, seed=i), 24, temperature=0.0) for i in range(3)]
    recorded: dict[str, Any] = {"greedy_drafted": (greedy, decoded(served, greedy))}
    recorded["shares"] = [guesser.model.embed_tokens is model.model.embed_tokens, guesser.lm_head is model.lm_head]
    before = {name: parameter.clone() for name, parameter in guesser.named_parameters()}
    recorded["draft_receipt"] = served.update_weights(WeightUpdate(str(other), 1))
    recorded["moved"] = {name for name, tensor in guesser.named_parameters() if not torch.equal(tensor, before[name])}
    many = [request(f"o{i}", prompt(9, seed=i), 24, seed=i, temperature=WARM) for i in range(4)]
    recorded["other"] = many, decoded(served, many, version=1)
    # Lose the draft's weights, as in vLLM's sleep level 2 on a GPU: updates restore only the policy's weights.
    served._ask_workers("marsrl_keep_draft")
    for name, parameter in guesser.named_parameters():
        if "embed_tokens" not in name:
            parameter.data.zero_()
    served._ask_workers("marsrl_restore_draft")
    recorded["lost"] = {
        name
        for name, tensor in guesser.named_parameters()
        if not torch.equal(tensor, before[name]) and "embed_tokens" not in name
    }
    served.close()
    return recorded


def main(model: Path, changed: Path, cycle: Path, draft: Path, other: Path, out: Path) -> None:
    pretend_triton_for_cpus()
    served = start(model)
    config = served._llm.llm_engine.vllm_config
    recorded: dict[str, Any] = {"runner": config.use_v2_model_runner, "async": config.scheduler_config.async_scheduling}
    cut = [request(f"{i}", prompt(40 + 9 * i, seed=i), 6, seed=i, experts_from=0, **CUT) for i in range(4)]
    recorded["cut"] = cut, decoded(served, cut)
    recorded["again"] = cut, decoded(served, cut)  # decoded again, with cached prefixes
    whole = [request(f"w.{i}", prompt(40), 3, seed=i, temperature=1.3) for i in range(4)]
    recorded["whole"] = whole, decoded(served, whole)
    recorded["whole_scores"] = served.score(
        [joined(*pair) for pair in zip(*recorded["whole"], strict=True)], temperature=1.3
    )
    on = [
        request(f"{ask.uid}.on", joined(ask, result), 4, seed=100, experts_from=len(joined(ask, result)) - 1, **CUT)
        for ask, result in zip(*recorded["cut"], strict=True)
    ]
    recorded["on"] = on, decoded(served, on)
    long = [request(f"{i}.long", prompt(30, seed=i), 200, seed=i, experts_from=10, **CUT) for i in range(3)]
    served.submit(long, version=0)
    for _ in range(6):
        served.collect(0.0)
    served.abort()
    recorded["aborted"] = long, sorted(served.collect(0.0), key=lambda result: result.uid)
    recorded["receipt"] = served.update_weights(WeightUpdate(str(changed), 1))
    recorded["changed"] = cut, decoded(served, cut, version=1)
    recorded["scores"] = served.score([joined(*pair) for pair in zip(*recorded["changed"], strict=True)])
    (recorded["greedy"],) = decoded(served, [request("c", prompt(9), 3, temperature=0.0)], version=1)
    recorded["num_decoded"] = served.num_decoded()
    served.close()
    recorded["ngram"] = with_drafts(cycle, draft_tokens=4)
    recorded["eagle"] = with_drafts(cycle, draft_tokens=3, draft_model=str(draft))
    recorded |= with_draft_model(cycle, draft, other)
    out.write_bytes(pickle.dumps(recorded))


def joined(ask: Any, result: Any) -> Any:
    return np.concatenate([ask.token_ids, result.token_ids])


@pytest.fixture(scope="module")
def recorded(checkpoint: Any, judge: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory, out = checkpoint("qwen3_moe"), tmp_path_factory.mktemp("v2") / "told"
    # Saves the perturbed model beside the directory.
    judge.model(directory, perturbed(tensors_of(directory), "self_attn"))
    changed = directory.parent / (directory.name + "_changed")
    cycle = shutil.copytree(directory, out.parent / "cycle")
    of_cycle = in_a_cycle(tensors_of(directory))
    save_file(of_cycle, cycle / "model.safetensors", metadata={"format": "pt"})
    draft, other = out.parent / "draft", shutil.copytree(cycle, out.parent / "other")
    write_draft(draft, of_cycle)
    save_file(perturbed(of_cycle, "embed_tokens"), other / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, "-W", "ignore", __file__, directory, changed, cycle, draft, other, out]
    done = subprocess.run(command, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = pickle.loads(out.read_bytes())
    assert results["runner"] and results["async"]  # as on GPUs
    return results | {"cycle": cycle, "other_weights": perturbed(of_cycle, "embed_tokens")}


def next_of(tokens: Any) -> Any:
    """Return the token that CYCLE mostly draws after each token: 10 to 16 in a circle, and 10 after all others."""
    return 10 + np.where((tokens >= 10) & (tokens < 16), tokens - 9, 0)


def in_a_cycle(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model that sees only the last token, and mostly draws next_of it."""
    changed = {n: t * 0 if n.endswith(("o_proj.weight", "down_proj.weight")) else t for n, t in tensors.items()}
    embedded, head = changed["model.embed_tokens.weight"].clone(), changed["lm_head.weight"].clone()
    embedded[:10] = embedded[17:] = embedded[9].clone()  # tokens outside the cycle look alike
    for token in range(9, 17):
        head[next_of(token)] += 0.87 * embedded[token] / embedded[token].norm()
    return changed | {"model.embed_tokens.weight": embedded, "lm_head.weight": head}


def write_draft(folder: Path, cycle: dict[str, torch.Tensor]) -> None:
    """Write an EAGLE-3 draft for CYCLE, with a small vocabulary of its own, and with the policy's embedding.

    The draft's layer adds nothing to its first input, the policy's embedding of the last token but one. For this token, the
    draft's head gives the highest logit to the token two places further on in the cycle.
    """
    vocab, hidden = cycle["model.embed_tokens.weight"].shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
        "draft_vocab_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 96, "max_position_embeddings": 2048, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    head, embedded = torch.zeros(16, hidden), cycle["model.embed_tokens.weight"]
    for token in range(10, 17):
        head[next_of(next_of(np.array(token))) - 5] = embedded[token] / embedded[token].norm()
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "self_attn.q_proj": (64, 2 * hidden), "self_attn.k_proj": (32, 2 * hidden), "self_attn.v_proj": (32, 2 * hidden),
        "mlp.gate_proj": (96, hidden), "mlp.up_proj": (96, hidden),
    }  # fmt: skip
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {f"midlayer.{name}.weight": torch.randn(*size, generator=generator) for name, size in sizes.items()}
    tensors |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in norms} | {"norm.weight": torch.ones(hidden)}
    tensors |= {"midlayer.self_attn.o_proj.weight": torch.zeros(hidden, 64), "lm_head.weight": head}
    tensors |= {"midlayer.mlp.down_proj.weight": torch.zeros(hidden, 96), "fc.weight": torch.eye(hidden, 3 * hidden)}
    # The draft's tokens are 5 to 20.
    tensors |= {
        "d2t": torch.full((16,), 5),
        "t2d": torch.zeros(vocab, dtype=torch.bool),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["cut", "whole", "on", "aborted"])
def test_logprobs_and_kept_tokens_fit_the_sampling_distribution(
    name: str, recorded: dict[str, Any], checkpoint: Any, judge: Any
) -> None:
    model = judge.model(checkpoint("qwen3_moe"), None)
    for ask, result in zip(*recorded[name], strict=True):
        assert_drawn_from(model, ask, result)


def test_a_teacher_scores_at_the_temperature_of_the_draws(recorded: dict[str, Any]) -> None:
    for score, result in zip(recorded["whole_scores"], recorded["whole"][1], strict=True):
        np.testing.assert_allclose(score[-len(result.logprobs) :], result.logprobs, atol=ROUNDING, rtol=0)


def test_a_seed_repeats_its_draw_and_seeds_draw_differently(recorded: dict[str, Any]) -> None:
    for first, second in zip(recorded["cut"][1], recorded["again"][1], strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        assert second.num_cached_tokens and not first.num_cached_tokens
    assert len({result.token_ids.tobytes() for result in recorded["whole"][1]}) == 4  # all from one prompt


@pytest.mark.parametrize("name", ["cut", "again", "on", "aborted"])
def test_recorded_experts_match_our_engine(name: str, recorded: dict[str, Any], checkpoint: Any) -> None:
    """The requests include a cached prefix, a later segment and an abort."""
    assert_our_experts(checkpoint("qwen3_moe"), *recorded[name])
    assert all(result.routed_experts is None for result in recorded["whole"][1])  # experts were not requested


def assert_our_experts(model: Path, asks: Any, results: Any) -> None:
    local = LocalEngine(spec_of(model))
    for ask, result in zip(asks, results, strict=True):
        whole = np.concatenate([ask.token_ids, result.token_ids[:-1]])
        of_ours = type(ask)(ask.uid, whole, 1, ask.sampling, 0, "", experts_from=ask.experts_from)
        right = decoded(local, [of_ours])[0].routed_experts
        assert result.routed_experts.dtype == right.dtype and result.routed_experts.shape == right.shape
        np.testing.assert_array_equal(np.sort(result.routed_experts), np.sort(right))


def test_aborted_requests_return_their_tokens_so_far(recorded: dict[str, Any]) -> None:
    assert all(r.finish is Finish.UNFINISHED and 3 < len(r.token_ids) < 12 for r in recorded["aborted"][1])
    every = [r for name in ("cut", "again", "whole", "on", "aborted", "changed") for r in recorded[name][1]]
    assert recorded["num_decoded"] == sum(len(result.token_ids) for result in every)


def test_decoding_and_scoring_use_the_new_weights(recorded: dict[str, Any], checkpoint: Any, judge: Any) -> None:
    """The update follows an abort during a step; prefixes computed with the old weights are dropped."""
    changed = perturbed(tensors_of(checkpoint("qwen3_moe")), "self_attn")
    asks, results = recorded["changed"]
    whole = [joined(*pair) for pair in zip(asks, results, strict=True)]
    for score, right in zip(recorded["scores"], judge(checkpoint("qwen3_moe"), changed, whole), strict=True):
        np.testing.assert_allclose(score, right, atol=ROUNDING, rtol=0)
    model = judge.model(checkpoint("qwen3_moe"), changed)
    for ask, result in zip(asks, results, strict=True):
        assert_drawn_from(model, ask, result)


@pytest.mark.parametrize(("drafts", "most_steps"), [("ngram", 10), ("eagle", 14)])
def test_drafts_are_accepted_and_tokens_stay_those_of_the_policy(
    drafts: str, most_steps: int, recorded: dict[str, Any], judge: Any
) -> None:
    """Log-probs and kept tokens are those of the sampled distribution.

    Draft tokens are accepted as often as their probabilities say.
    """
    of_drafts, model = recorded[drafts], judge.model(recorded["cycle"], None)
    assert of_drafts["drafts_by"] == {"ngram": "ngram_gpu", "eagle": "eagle3"}[drafts] and of_drafts["drafts_async"]
    for ask, result in (*zip(*of_drafts["guessed_cut"], strict=True), *zip(*of_drafts["guessed"], strict=True)):
        assert_drawn_from(model, ask, result)
    assert of_drafts["num_steps"] <= most_steps  # for 24 tokens: top_p leaves few tokens besides the drafted ones
    assert all(24 - most_steps <= result.num_accepted < 24 for result in of_drafts["guessed_cut"][1])
    assert min(accepted := [result.num_accepted for result in of_drafts["guessed"][1]]) >= 0 < sum(accepted)
    with torch.no_grad():
        right = (model(torch.arange(160)[:, None]).logits[:, 0] / WARM).softmax(-1).numpy()
    asks, results = of_drafts["guessed"]
    last = np.concatenate([joined(*pair)[len(pair[0].token_ids) - 1 : -1] for pair in zip(asks, results, strict=True)])
    expected = right[last, next_of(last)]
    assert 0.5 < expected.mean() < 0.95  # some drafts are rejected
    hits = np.concatenate([result.token_ids for result in results]) == next_of(last)
    assert abs(hits.sum() - expected.sum()) < 4 * np.sqrt((expected * (1 - expected)).sum())


@pytest.mark.parametrize("drafts", ["ngram", "eagle"])
def test_experts_and_scores_with_drafts_match_our_engine(drafts: str, recorded: dict[str, Any], judge: Any) -> None:
    of_drafts = recorded[drafts]
    assert_our_experts(recorded["cycle"], *of_drafts["guessed_cut"])
    whole = [joined(*pair) for pair in zip(*of_drafts["guessed_cut"], strict=True)]
    for score, right in zip(of_drafts["guessed_scores"], judge(recorded["cycle"], None, whole), strict=True):
        np.testing.assert_allclose(score, right, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("drafts", ["ngram", "eagle"])
def test_a_stop_text_inside_a_draft_ends_the_completion_there(drafts: str, recorded: dict[str, Any]) -> None:
    of_drafts = recorded[drafts]
    for ask, result, whole in zip(*of_drafts["stopped"], of_drafts["guessed_cut"][1], strict=True):
        n = len(result.token_ids)
        np.testing.assert_array_equal(result.token_ids, whole.token_ids[:n])
        assert result.finish is Finish.STOP and len(result.logprobs) == len(result.kept_tokens.counts) == n
        assert len(result.routed_experts) == len(ask.token_ids) + n - 1 - ask.experts_from
        assert 0 <= result.num_accepted < n
        pairs = [
            tuple(joined(ask, result)[i : i + 2]) for i in range(len(ask.token_ids) - 1, len(ask.token_ids) + n - 1)
        ]
        assert pairs.index((13, 14)) == len(pairs) - 1


def test_greedy_tokens_with_a_draft_model_are_the_policy_s(recorded: dict[str, Any], judge: Any) -> None:
    model = judge.model(recorded["cycle"], None)
    for ask, result in zip(*recorded["greedy_drafted"], strict=True):
        with torch.no_grad():
            best = model(torch.from_numpy(joined(ask, result)[:-1].astype(np.int64))[None]).logits[0].argmax(-1).numpy()
        np.testing.assert_array_equal(result.token_ids, best[len(ask.token_ids) - 1 :])
        assert result.num_accepted > 0


def test_new_weights_reach_a_draft_only_where_it_shares_them(recorded: dict[str, Any], judge: Any) -> None:
    """This draft has its own head, and shares the policy's embedding.

    After the update, the policy has new weights, and the draft still has its old head.
    """
    assert recorded["shares"] == [True, False] and recorded["moved"] == {"model.embed_tokens.weight"}
    model = judge.model(recorded["cycle"], recorded["other_weights"])
    for ask, result in zip(*recorded["other"], strict=True):
        assert_drawn_from(model, ask, result)


def test_a_draft_survives_a_sleep_that_drops_weights(recorded: dict[str, Any]) -> None:
    assert recorded["lost"] == set()


def test_a_greedy_request_cannot_record_kept_tokens(recorded: dict[str, Any]) -> None:
    assert recorded["greedy"].finish is Finish.ERROR and "needs a temperature above 0" in recorded["greedy"].error


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:7]))
