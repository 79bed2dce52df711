"""The definition of the head over the columns that a token was drawn from, row by row; its implementations: head_tests.py."""

import torch
from fused_head import head_case, support_of

from marsrl.kernels.linear_logprob.reference import linear_logprob_reference


def test_log_probs_entropy_and_gradients_are_those_of_the_softmax_over_the_support():
    columns = 131  # and padding
    hidden, weight, targets = head_case(40, 16, 160)
    targets, heat = targets % columns, torch.rand(40).double() + 0.5
    leaves = [each.double().requires_grad_() for each in (hidden, weight)]
    support = support_of(targets, columns)
    logprobs, entropy = linear_logprob_reference(*leaves, targets, heat, columns, support)
    expected = []
    for row, (start, count) in enumerate(zip(support.starts.tolist(), support.counts.tolist())):
        ids = support.ids[start : start + count].long() if count else torch.arange(columns)
        share = torch.softmax(leaves[1][ids] @ leaves[0][row] / heat[row], 0)
        expected.append(torch.stack((share[ids == targets[row]][0].log(), -(share * share.log()).sum())))
    found, expected = torch.stack((logprobs, entropy), 1), torch.stack(expected)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(40, 2).double()
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, upstream) for each in (found, expected)))
