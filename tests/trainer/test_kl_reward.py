"""The KL penalty in the reward, against exact sums over every sequence of two tokens."""

import itertools

import torch

from marsrl.trainer.learner.kl_reward import kl_to_go


def test_the_penalty_has_the_gradient_of_the_samples_kl() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    frozen_first, frozen_second = torch.randn(3).double(), torch.randn(3, 3).double()
    leaves = first.requires_grad_(), second.requires_grad_()
    pairs = torch.tensor(list(itertools.product(range(3), repeat=2)))

    def logprobs(of_first: torch.Tensor, of_second: torch.Tensor) -> torch.Tensor:
        """[9, 2] of both tokens of every sequence."""
        later = of_second.log_softmax(-1)[pairs[:, 0], pairs[:, 1]]
        return torch.stack([of_first.log_softmax(-1)[pairs[:, 0]], later], 1)

    logp, of_reference = logprobs(*leaves), logprobs(frozen_first, frozen_second)
    drawn = logp.sum(1).exp()
    exact = torch.autograd.grad((drawn * (logp - of_reference).sum(1)).sum(), leaves, retain_graph=True)
    to_go = kl_to_go((logp - of_reference).detach().flatten(), torch.arange(10) * 2).double().view(9, 2)
    found = torch.autograd.grad((drawn.detach() * (to_go * logp).sum(1)).sum(), leaves)
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-6)


def test_the_penalty_stays_within_its_sequence() -> None:
    found = kl_to_go(torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0]), torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert found.tolist() == [3.0, 2.0, 9.0, 9.0, 5.0]
