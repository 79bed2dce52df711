"""group_advantage: groups computed by hand, and properties of any batch."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marsrl.kernels import group_advantage

NAN = math.nan
pytestmark = pytest.mark.usefixtures("implementation")
EXAMPLES = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the fixture is the same for every example
)


def advantage(rewards, group_of, agent_of=None, instance_of=None, session_of=None, **options):
    zeros = [0] * len(rewards)
    ids = (torch.tensor(i, dtype=torch.int64) for i in (group_of, agent_of or zeros, instance_of or zeros))
    sessions = None if session_of is None else torch.tensor(session_of)
    wide = torch.tensor(rewards, dtype=torch.float64)
    return group_advantage(wide, *ids, session_of=sessions, eps=0.0, **options).tolist()


def test_a_group_by_hand():
    # mean 1/4, variance 3/16
    assert advantage([1, 0, 0, 0], [2, 2, 2, 2]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert advantage([1, 0, 0, 0], [2, 2, 2, 2], std="unbiased") == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_an_all_equal_group_trains_nothing():
    assert advantage([0.1] * 8, [0] * 8) == [0.0] * 8  # the mean of eight 0.1 is not exactly 0.1


def test_a_group_of_one_has_no_baseline_unless_raw_is_asked_for():
    assert advantage([0.7, 1, 0], [0, 1, 1]) == pytest.approx([0, 1, -1])
    assert advantage([0.7, 1, 0], [0, 1, 1], singleton="raw") == pytest.approx([0.7, 1, -1])


def test_std_none_leaves_the_sample_out_of_its_baseline():
    assert advantage([1, 0, 0, 0, NAN], [2] * 5, std="none") == pytest.approx([1, *[-1 / 3] * 3, 0])
    assert advantage([0.1] * 8, [0] * 8, std="none") == [0.0] * 8
    assert advantage([0.7, 1, 0], [0, 1, 1], std="none") == [0, 1, -1]
    assert advantage([0.7, 1, 0], [0, 1, 1], std="none", singleton="raw") == [0.7, 1, -1]
    found = advantage([1, 0, 0, 4], [0, 1, 2, 3], [0, 0, 1, 1], [2] * 4, std="none", normalise="agent")
    assert found == [1, -1, -4, 4]


def test_std_none_leaves_the_session_out_of_its_baseline():
    rewards, sessions = [1, 0, NAN, 1, 1, 1, 0, NAN], [2, 0, 2, 2, 2, 1, 1, 3]  # means 1, 0 and 1/2
    found = advantage(rewards, [0] * 8, session_of=sessions, std="none")
    assert found == pytest.approx([0.75, -0.75, 0, 0.75, 0.75, 0.5, -0.5, 0])
    assert advantage([1, 0, 0.5], [0] * 3, session_of=[0, 0, 1], std="none") == [0.5, -0.5, 0]  # equal means


# One instance of a problem. Agent 0 has the rewards 1 and 0, agent 1 has 4, 2 and 0; all five have mean 1.4 and variance 2.24.
@pytest.mark.parametrize(
    "normalise, means, stds",
    [
        ("agent", (0.5, 2.0), (0.5, (8 / 3) ** 0.5)),
        ("global", (1.4, 1.4), (2.24**0.5, 2.24**0.5)),
        ("agent_mean", (0.5, 2.0), (2.24**0.5, 2.24**0.5)),
        ("agent_std", (1.4, 1.4), (0.5, (8 / 3) ** 0.5)),
    ],
)
def test_the_normalisations_of_dr_mas_by_hand(normalise, means, stds):
    rewards, agents = [1, 4, 0, 2, 0], [0, 1, 0, 1, 1]
    expected = [(r - means[a]) / stds[a] for r, a in zip(rewards, agents)]
    assert advantage(rewards, [0, 1, 2, 3, 4], agents, [3] * 5, normalise=normalise) == pytest.approx(expected)


def test_a_session_counts_as_one_reward_its_mean():
    # Sessions 2, 0 and 1 have means 1, 0 and 1/2. Missing rewards are left out, and so is session 3, which has no others.
    rewards, sessions = [1, 0, NAN, 1, 1, 1, 0, NAN], [2, 0, 2, 2, 2, 1, 1, 3]
    expected = [0.5, -0.5, 0, 0.5, 0.5, 0.5, -0.5, 0]
    found = advantage(rewards, [0] * 8, session_of=sessions)
    assert found == pytest.approx([2 * a for a in expected])  # variance (1/4 + 1/4 + (1/4 + 1/4) / 2) / 3
    assert advantage([0.1] * 3 + [0.1], [0] * 4, session_of=[0, 0, 0, 1]) == [0] * 4  # equal to the last bit
    assert advantage([1, 0], [0, 0], session_of=[0, 0], singleton="raw") == [1, 0]


def test_spread_inside_a_session_is_part_of_the_deviation():
    rewards = [1, 0, 0.99, 0]  # means .5 and .495, which differ by far less than the rewards
    found = advantage(rewards, [0] * 4, session_of=[0, 0, 1, 1])
    assert found == pytest.approx([(r - 0.4975) / 0.24751875**0.5 for r in rewards])
    assert advantage([1, 0, 1, 0], [0] * 4, session_of=[0, 0, 1, 1]) == [1, -1, 1, -1]  # equal means


batches = st.integers(1, 24).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 1.0, -2.5, NAN]), min_size=n, max_size=n),
        *[st.lists(st.integers(0, n - 1), min_size=n, max_size=n)] * 3,
    )
)


@EXAMPLES
@given(
    batches,
    st.sampled_from(["group", "agent", "global", "agent_mean", "agent_std"]),
    st.sampled_from(["biased", "none"]),
    st.randoms(),
)
def test_sample_order_and_reward_shift_change_nothing(batch, normalise, std, random):
    order = list(range(len(batch[0])))
    random.shuffle(order)
    found = advantage(*batch, normalise=normalise, std=std)
    permuted = advantage(*([values[i] for i in order] for values in batch), normalise=normalise, std=std)
    assert [permuted[order.index(i)] for i in range(len(order))] == pytest.approx(found, abs=1e-9)
    shifted = advantage([r + 3.0 for r in batch[0]], *batch[1:], normalise=normalise, std=std)
    assert shifted == pytest.approx(found, abs=1e-6)


@EXAMPLES
@given(
    batches,
    st.sampled_from(["group", "agent", "global", "agent_mean", "agent_std"]),
    st.sampled_from(["biased", "unbiased", "none"]),
    st.sampled_from(["zero", "raw"]),
)
def test_every_implementation_equals_the_definition(batch, normalise, std, singleton):
    options = {"normalise": normalise, "std": std, "singleton": singleton}
    advantages = advantage(*batch, **options)
    assert advantage(*batch, **options, session_of=list(range(len(advantages)))) == advantages  # bitwise
    # The samples of each group with an odd number form one session.
    options["session_of"] = [3 * group % len(advantages) if group % 2 else i for i, group in enumerate(batch[1])]
    advantages = advantage(*batch, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARSRL_KERNELS", "reference")
        expected = advantage(*batch, **options)
    # The C++ adds in the definition's order; only PyTorch's vectorised sqrt may differ in the last bit.
    assert advantages == pytest.approx(expected, rel=1e-15, abs=0)
