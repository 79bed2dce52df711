"""Sampling: the noise equals the published generator's, and draws equal those worked out by hand."""

import numpy as np
import pytest
import torch

from marsrl.rollout.engines.protocol import Sampling
from marsrl.rollout.engines.sampler import RowSampling, draw_from, low_bits, truncated, uniform

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("implementation")


def rows(n, *, temperature=1.0, top_p=1.0, top_k=-1):
    return RowSampling.of([Sampling(temperature, top_p, top_k)] * n, CPU)


def draw(logits, sampling, points):
    return draw_from(truncated(logits, sampling), sampling, points)


def noise(n, position):
    """Return the noise of the seeds 0 to n - 1."""
    return torch.from_numpy(uniform(low_bits(range(n)), np.full(n, position)))


def splitmix64(x):
    """Return SplitMix64's output for the state x (Steele, Lea and Flood, 2014), in Python integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_the_noise_is_53_bits_of_splitmix64():
    seeds = [0, 1, 5, 2**63 - 1, -1, -(2**63), 1234567891011]
    for position in (0, 1, 77):
        found = uniform(low_bits(seeds), np.full(len(seeds), position))
        right = [(splitmix64(splitmix64(s % 2**64) + position) >> 11) / 2**53 for s in seeds]
        assert found.tolist() == right and max(right) < 1


def test_the_least_likely_tokens_are_told_apart():
    """One token has nearly all probability, and 1000 others have 8e-10 each.

    In float32, cumulative probabilities of neighbouring tokens would be equal.
    """
    logits = torch.tensor([[21.0] + [0.0] * 1000])
    cumulative = np.cumsum(logits.log_softmax(-1)[0].exp().double().numpy())
    tokens, _ = draw(logits, rows(1), torch.tensor([1 - 4e-7], dtype=torch.float64))
    assert int(tokens) == np.flatnonzero(cumulative > (1 - 4e-7) * cumulative[-1])[0] > 100


@pytest.mark.parametrize("vocab_size", [1, 2, 511, 512, 513, 1025])  # around csrc/cpu's blocks of 512
def test_draws_are_those_of_float64_whatever_the_vocabulary(vocab_size):
    """Some logits are -inf, and rows have a stride larger than their length."""
    n, generator = 300, torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(vocab_size, n, generator=generator).T * 4
    logits[:, 1:][torch.rand(n, vocab_size - 1, generator=generator) < 0.5] = -torch.inf
    logits[0, 0], logits[0, -1] = -torch.inf, 0.0  # noise 0 must not draw the first token, whose probability is 0
    points = noise(n, 5)
    points[:3] = torch.tensor([0.0, 0.5, 1 - 2**-53])
    exact = logits.double().log_softmax(-1)
    cumulative = exact.exp().cumsum(-1)
    tokens, logprobs = draw(logits, rows(n), points)
    chosen = tokens[:, None]
    torch.testing.assert_close(logprobs.double(), exact.gather(1, chosen)[:, 0], atol=2e-6, rtol=0)
    above = cumulative.gather(1, chosen)[:, 0] / cumulative[:, -1] - points
    below = points - (cumulative - exact.exp()).gather(1, chosen)[:, 0] / cumulative[:, -1]
    assert bool((logprobs > -torch.inf).all()) and float(above.min()) > -1e-6 and float(below.min()) > -1e-6


def test_temperature_0_takes_the_top_token_and_1_draws():
    logits = torch.tensor([0.1, 0.6, 0.3]).log().expand(400, -1)
    sampling = RowSampling.of([Sampling(0.0), Sampling(1.0)] * 200, CPU)
    tokens, logprobs = draw(logits, sampling, noise(400, 0))
    assert set(tokens[::2].tolist()) == {1} and set(tokens[1::2].tolist()) == {0, 1, 2}
    torch.testing.assert_close(logprobs, logits[0][tokens])  # log-probs at temperature 1


def test_top_k_and_top_p_cut_and_renormalise():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    kept = {
        Sampling(top_k=1): {1},
        Sampling(top_k=2): {1, 3},
        Sampling(top_k=9): {0, 1, 2, 3},
        Sampling(top_k=0, top_p=0.4): {1},
        Sampling(top_p=0.7): {1, 3},
        Sampling(top_p=0.85): {1, 2, 3},
        Sampling(top_k=2, top_p=0.6): {1},  # 2/3 of what top_k keeps
        Sampling(top_k=2, top_p=0.8): {1, 3},
        Sampling(): {0, 1, 2, 3},
    }
    n = 300
    for sampling, right in kept.items():  # each row by its own settings
        both = RowSampling.of([sampling, Sampling(top_k=3)] * n, CPU)
        tokens, logprobs = draw(logits.expand(2 * n, -1), both, noise(2 * n, 0))
        assert set(tokens[::2].tolist()) == right and set(tokens[1::2].tolist()) == {1, 2, 3}
        share = logits.exp() / logits[list(right)].exp().sum()
        torch.testing.assert_close(logprobs[::2].exp(), share[tokens[::2]])
