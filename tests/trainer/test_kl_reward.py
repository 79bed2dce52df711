"""The KL penalty in the reward equals exact sums over every sequence of two tokens."""

import itertools

import torch

from marsrl.trainer.learner.kl_reward import KlToGo


def test_the_penalty_has_the_gradient_of_the_samples_kl() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    frozen_first, frozen_second = torch.randn(3).double(), torch.randn(3, 3).double()
    leaves = first.requires_grad_(), second.requires_grad_()
    pairs = torch.tensor(list(itertools.product(range(3), repeat=2)))

    def logprobs(of_first: torch.Tensor, of_second: torch.Tensor) -> torch.Tensor:
        """Return the log-probs [9, 2] of both tokens of every sequence."""
        later = of_second.log_softmax(-1)[pairs[:, 0], pairs[:, 1]]
        return torch.stack([of_first.log_softmax(-1)[pairs[:, 0]], later], 1)

    logp, of_reference = logprobs(*leaves), logprobs(frozen_first, frozen_second)
    drawn = logp.sum(1).exp()
    exact = torch.autograd.grad((drawn * (logp - of_reference).sum(1)).sum(), leaves, retain_graph=True)
    log_ratio, trained = (logp - of_reference).detach().flatten(), torch.ones(18, dtype=torch.bool)
    to_go = KlToGo.of(log_ratio, trained, torch.arange(10) * 2, torch.arange(9)).values.view(9, 2)
    found = torch.autograd.grad((drawn.detach() * (to_go * logp).sum(1)).sum(), leaves)
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-6)


def test_a_penalty_is_compared_with_the_agents_other_samples() -> None:
    """The samples are in two batches. The untrained token is in no mean; the second agent has only one sample."""
    log_ratio, trained = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0]), torch.tensor([True, True, False, True, True])
    first = KlToGo.of(log_ratio, trained, torch.tensor([0, 2, 5]), torch.tensor([0, 1]))
    second = KlToGo.of(torch.tensor([7.0]), torch.tensor([True]), torch.tensor([0, 1, 1]), torch.tensor([0, 0]))
    assert first.values.tolist() == [3.0, 2.0, 9.0, 9.0, 5.0]
    totals = first.totals(2) + second.totals(2)
    assert first.centred(totals).tolist() == [-4.0, -5.0, 9.0, 9.0, 5.0]
    assert second.centred(totals).tolist() == [4.5]
