"""Every op names a wrong argument, what was found and what was expected."""

import pytest
import torch
from fused_head import linear_policy_loss, policy_loss
from policy_cases import policy_case

from marsrl import kernels
from marsrl.kernels import PolicyObjective, Support

INF, NAN = float("inf"), float("nan")
zeros, ones, tensor = torch.zeros, torch.ones, torch.tensor


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def flags(*shape):
    return torch.ones(shape, dtype=torch.bool)


NO_TEMPERATURES = [
    ({"temperature": given}, rf"temperature{place} is {value}, expected a positive, finite number")
    for value in (0.0, -1.5, NAN, INF)
    for given, place in (
        (value, ""),
        (tensor([1.0, 1.0, value, 1.0]), r"\[2\]"),
        (tensor([1.0, 1.0, value, 1.0]).bfloat16(), r"\[2\]"),
    )
]
HEAD = {"hidden": zeros(4, 8), "weight": zeros(40, 8), "targets": ints(4)}
LOSS = {"objective": PolicyObjective(), "cu_seqlens": tensor([0, 4]), "normaliser": 1.0, "advantages": ones(1)}
OF_LOSS, LOGPROBS = policy_case()  # with 60 tokens and 6 sequences
ORDER = kernels.RowOrder.of_map(tensor([[True, False], [True, True]]), 3)
IDS = zeros(1, dtype=torch.int32)
FUNCTIONS = {**vars(kernels), "policy_loss": policy_loss, "linear_policy_loss": linear_policy_loss}
RIGHT = {
    "attention_decode": {
        **dict.fromkeys(("k_cache", "v_cache"), zeros(2, 5, 2, 8)),
        "q": zeros(2, 4, 8),
        "lengths": tensor([5, 1]),
    },
    "attention_varlen": {"q": zeros(5, 4, 8), "k": zeros(5, 2, 8), "v": zeros(5, 2, 8), "cu_seqlens": tensor([0, 5])},
    "group_advantage": {"rewards": zeros(2), "group_of": ints(2), "agent_of": ints(2), "instance_of": ints(2)},
    "grouped_linear": {"x": zeros(6, 8), "weights": zeros(2, 4, 8), "tokens_per_expert": [2, 4]},
    "kept_rows": {"mask": flags(4)},
    "linear_logprob": HEAD,
    "linear_policy_loss": {**HEAD, **LOSS},
    "moe_permute": {"hidden": zeros(2, 8), "weights": zeros(2, 2), "order": ORDER},
    "moe_unpermute": {"rows": zeros(3, 8), "order": ORDER},
    "mpt_gate": {"entropy": zeros(8), "mask": flags(8), "cu_seqlens": tensor([0, 3, 3, 5, 8]), "positive": flags(4)},
    "pack": {"token_ids": ints(4), "is_sampled": flags(4), "num_tokens": 4, "cu_seqlens": tensor([0, 4])},
    "policy_loss": {"logprobs": LOGPROBS, "entropy": zeros(60), "objective": PolicyObjective(), **OF_LOSS},
    "rms_norm": {"x": ones(3, 4), "weight": ones(4), "eps": 1e-6},
    "swiglu": {"products": ones(3, 4)},
}
# op -> (the change, how the error continues)
WRONG = {
    "attention_decode": [
        ({"k_cache": zeros(3, 5, 2, 8)}, r"k_cache has shape \[3, 5, 2, 8\], expected \[2, any, any, 8\]"),
        (dict.fromkeys(("k_cache", "v_cache"), zeros(2, 5, 3, 8)), "k_cache has 3 heads, expected a divisor of q's 4"),
        ({"lengths": tensor([0, 3])}, r"lengths lie in 0..3, expected 1..5"),
        ({"scale": NAN}, "scale is nan, expected a finite number or None"),
        ({"q": zeros(2, 4, 8, requires_grad=True)}, "an input requires a gradient, expected .* torch.no_grad"),
    ],
    "attention_varlen": [
        ({"k": zeros(5, 2, 4)}, r"k has shape \[5, 2, 4\], expected \[any, any, 8\]"),
        ({"k": zeros(5, 3, 8), "v": zeros(5, 3, 8)}, "k has 3 heads, expected a divisor of q's 4"),
        ({"cu_seqlens": tensor([0, 4])}, r"cu_seqlens is \[0, 4\], expected to rise from 0 to 5 tokens"),
        ({"cu_seqlens": tensor([1, 3, 5])}, r"cu_seqlens is \[1, 3, 5\], expected to rise from 0"),
        ({"cu_seqlens": tensor([0, 3, 2, 5])}, r"cu_seqlens is \[0, 3, 2, 5\], expected to rise from 0"),
        (
            {"cu_seqlens": tensor([0, 1, 5]), "cu_seqlens_k": tensor([0, 3, 5])},
            "cu_seqlens_k gives sequence 1 2 keys for 4 queries",
        ),
        *(({"scale": each}, f"scale is {each}, expected a finite number or None") for each in (NAN, INF, -INF)),
    ],
    "group_advantage": [
        ({"normalise": "batch"}, "normalise is 'batch', expected group or agent"),
        ({"group_of": tensor([0, 2])}, r"group_of has values in 0..2, expected 0..1"),
        ({"session_of": tensor([0, 2])}, r"session_of has values in 0..2, expected 0..1"),
        ({"rewards": ints(2)}, "rewards has dtype int64, expected float32 or float64"),
    ],
    "grouped_linear": [
        ({"tokens_per_expert": [2, 3]}, r"tokens_per_expert is \[2, 3\], expected 2 counts that add up to 6 rows"),
        ({"tokens_per_expert": [6]}, r"tokens_per_expert has shape \[1\], expected \[2\]"),
        ({"weights": zeros(2, 8)}, r"weights has shape \[2, 8\], expected \[any, any, 8\]"),
        ({"main_grad": zeros(2, 8, 4)}, r"main_grad has shape \[2, 8, 4\], expected \[2, 4, 8\]"),
        ({"main_grad": zeros(2, 8, 4).mT}, r"main_grad has strides \(32, 1, 4\), expected contiguous memory"),
    ],
    "kept_rows": [
        ({"mask": ints(4)}, "mask has dtype int64, expected bool"),
        ({"num_kept": 3}, "num_kept is 3, expected 4, the number of set elements"),
    ],
    "linear_logprob": [
        ({"weight": zeros(40, 9)}, r"weight has shape \[40, 9\], expected \[any, 8\]"),
        ({"targets": zeros(4)}, r"targets has dtype float32, expected int64 or int32"),
        ({"targets": tensor([0, 1, -1, -1])}, r"targets\[2\] is -1, expected 0..39"),
        *NO_TEMPERATURES,
        ({"temperature": ones(4, requires_grad=True)}, r"temperature requires a gradient"),
        ({"real_vocab_size": 41}, r"real_vocab_size is 41, expected 1..40"),
        ({"support": Support(IDS, ints(4), ints(3), 1)}, r"support.counts has shape \[3\], expected \[4\]"),
        ({"support": Support(IDS[:0], ints(4), ints(4), 0)}, "support.ids is empty"),
    ],
    "linear_policy_loss": [
        *NO_TEMPERATURES,
        ({"main_grad": zeros(40, 8).bfloat16()}, "main_grad has dtype bfloat16, expected float32"),
        ({"targets": tensor([0, 0, 0, 40])}, r"targets\[3\] is 40, expected 0..39"),
    ],
    "moe_permute": [
        ({"hidden": zeros(3, 8)}, "hidden has 3 tokens, expected 2 as in order"),
        ({"weights": zeros(2)}, r"order.weight_of has values in 0..3, expected 0..1"),
        ({"order": ORDER._replace(row_of=ints(2))}, r"order.token_of has shape \[3\], expected \[2\]"),
        ({"order": ORDER._replace(token_of=tensor([0, 1, 2]))}, r"order.token_of has values in 0..2, expected 0..1"),
    ],
    "moe_unpermute": [
        ({"rows": zeros(4, 8)}, r"order.token_of has shape \[3\], expected \[4\]"),
        ({"order": ORDER._replace(bounds=tensor([0, 2, 4]))}, r"order.bounds is \[0, 2, 4\], expected to rise from 0"),
    ],
    "mpt_gate": [({"scope": "token"}, "scope is 'token', expected sample or batch")],
    "pack": [
        ({"token_ids": ones(4)}, "token_ids has dtype float32, expected int64 or int32"),
        ({"num_tokens": 3}, "num_tokens is 3, expected at least the 4 of token_ids"),
        ({"num_tokens": 5}, r"cu_seqlens is \[0, 4\], expected to rise from 0 to 5 tokens"),
    ],
    "policy_loss": [
        ({"advantages": ones(5)}, r"advantages has shape \[5\], expected \[6\]"),
        ({"token_advantages": ones(60)}, r"both of advantages \[S\] and token_advantages \[T\] given"),
        ({"advantages": None}, r"neither of advantages"),
        (
            {"cu_seqlens": torch.arange(7)},
            r"cu_seqlens is \[0, 1, 2, 3, 4, 5, 6\], expected to rise from 0 to 60 tokens",
        ),
        ({"agent_of": tensor([0, 1, 2, 3, 0, 0])}, r"agent_of has values in 0..3, expected 0..2"),
        ({"agent_of": None}, r"num_agents is 3 and agent_of is missing"),
        ({"weights": ones(60)}, r"weights has shape \[60\], expected \[6\]"),
        ({"rollout_logprobs": None, "objective": PolicyObjective(correction="tis")}, "rollout_logprobs is missing"),
        ({"reference_logprobs": None, "objective": PolicyObjective(kl="k3")}, "reference_logprobs is missing"),
        ({"normaliser": tensor(0.0)}, "normaliser is 0.0, expected a positive number"),
        ({"num_agents": 0}, "num_agents is 0, expected 1 or more"),
        ({"objective": "clip"}, "objective is a str, expected a PolicyObjective"),
    ],
    "rms_norm": [
        ({"x": ints(3, 4)}, "x has dtype int64"),
        ({"weight": ones(3)}, r"weight has shape \[3\], expected \[4\]"),
        ({"rotation": ones(4, 4)}, r"rotation has shape \[4, 4\], expected \[3, 4\]"),
        ({"x": ones(3, 5), "weight": ones(5), "rotation": ones(3, 5)}, "x has 5 columns, expected an even number"),
    ],
    "swiglu": [
        ({"products": ones(3, 5)}, "products has 5 columns, expected an even number"),
        ({"weights": ones(2)}, r"weights has shape \[2\], expected \[3\]"),
    ],
}


@pytest.mark.parametrize("implementation", ["", "reference"])  # "": this machine's default
@pytest.mark.parametrize("op, change, message", [(op, *each) for op in WRONG for each in WRONG[op]])
def test_a_wrong_argument_is_named_with_what_was_expected(op, change, message, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    FUNCTIONS[op](**RIGHT[op])
    with pytest.raises(ValueError, match=f"{op}: {message}"):
        FUNCTIONS[op](**{**RIGHT[op], **change})


@pytest.mark.parametrize(
    "options", [{"kind": "ppo"}, {"clip_low": -0.1}, {"dual_clip": 1.1}, {"correction_low": 3.0}, {"kl": "k4"}]
)
def test_an_objective_with_invalid_options_is_refused(options):
    with pytest.raises(ValueError, match=f"PolicyObjective: .*{next(iter(options))}"):
        PolicyObjective(**options)
