"""The arithmetic of one step, printed before a run: prompts x group x agents -> samples -> tokens -> micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from marsrl.trainer.config import RunConfig


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Upper bounds of one step in the steady state of the pipeline (picks can be fewer, completions shorter)."""

    problems: int
    samples_of_first: int
    samples_of_later: int  # of each later agent
    num_agents: int
    max_samples: int
    max_completion_tokens: int
    tokens_per_stage: int
    ranks: int
    data_parallel: int
    micro_batch_tokens: int
    max_micro_batches: int  # of each rank, were every completion of maximal length and every prompt empty
    updates: int  # optimizer steps a step

    def lines(self) -> list[str]:
        """For people."""
        cut = [] if self.updates == 1 else [f"{self.updates} optimizer updates a step, each on its part of the groups"]
        later = (
            f"{self.num_agents - 1} later agents x at most {self.samples_of_later} samples each "
            f"-> at most {self.max_samples} samples a step"
        )
        return [
            f"{self.problems} problems a step x {self.samples_of_first // self.problems} samples = "
            f"{self.samples_of_first} samples of the first agent",
            later if self.num_agents > 1 else f"one agent: {self.max_samples} samples a step",
            f"at most {self.max_completion_tokens:,} completion tokens a step ({self.tokens_per_stage} a sample and stage)",
            f"{self.ranks} rank(s), {self.data_parallel} data-parallel; micro-batches of at most "
            f"{self.micro_batch_tokens:,} tokens -> at most {self.max_micro_batches} a rank, prompts not counted",
            *cut,
        ]


def batch_plan(config: RunConfig, agents: tuple[str, ...], world_size: int) -> BatchPlan:
    """The plan of one step.

    Raises:
        ValueError: the layout does not divide the number of ranks.
    """
    rollout = config.rollout
    layout = next(iter(config.trained_policies.values())).layout
    cut = layout.tensor * layout.pipeline * layout.context
    if world_size % cut:
        raise ValueError(
            f"layout: tensor x pipeline x context = {layout.tensor} x {layout.pipeline} x {layout.context} = {cut} does not "
            f"divide the {world_size} rank(s) that torchrun started"
        )
    first = rollout.prompts_per_step * rollout.group_size
    later = rollout.prompts_per_step * rollout.picks * rollout.group_size
    samples = first + later * (len(agents) - 1)
    tokens = samples * rollout.max_response_tokens
    data_parallel = world_size // cut
    per_rank = -(-tokens // data_parallel)
    return BatchPlan(
        problems=rollout.prompts_per_step,
        samples_of_first=first,
        samples_of_later=later,
        num_agents=len(agents),
        max_samples=samples,
        max_completion_tokens=tokens,
        tokens_per_stage=rollout.tokens_per_stage,
        ranks=world_size,
        data_parallel=data_parallel,
        micro_batch_tokens=config.trainer.max_tokens_per_micro_batch,
        max_micro_batches=-(-per_rank // config.trainer.max_tokens_per_micro_batch),
        updates=config.trainer.updates_per_step,
    )


def longest_sequence(config: RunConfig, policy: str) -> int:
    """Tokens of the longest prompt and completion that an agent of the policy can reach."""
    longest_input = max(agent.max_input_tokens for agent in config.agents.values() if agent.policy == policy)
    return longest_input + config.rollout.max_response_tokens
