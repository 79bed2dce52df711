"""Messages about steps that cannot be trained on."""

from __future__ import annotations

from marsrl.rollout.player.stages import StepBatch
from marsrl.rollout.types import Finish
from marsrl.trainer.config import RunConfig


def too_many_errors(batch: StepBatch, most: float) -> str:
    """A message if more than this share of the batch's samples and episodes ended in an error; otherwise ""."""
    samples = [sample for group in batch.groups for sample in group.samples]
    failed = [sample for sample in samples if sample.finish is Finish.ERROR]
    num_episodes = int(batch.metrics.get("rollout/failed_episodes", 0))
    num_errors, num_all = len(failed) + num_episodes, len(samples) + num_episodes
    if num_errors <= most * num_all:
        return ""
    first = f"; the first sample: {failed[0].uid}: {failed[0].reward.note[:200]}" if failed else ""
    return (
        f"{len(failed)} of {len(samples)} samples and {num_episodes} episodes ended in an error, more than "
        f"rollout.max_error_share = {most:g}{first}; warnings above and in the log say why"
    )


def why_nothing_trains(batch: StepBatch, config: RunConfig, num_steps: int) -> str:
    """A message with the settings to change.

    num_steps: consecutive steps without a gradient; `batch` is the last one's.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    if not samples:
        num_long = int(batch.metrics.get("rollout/prompts_too_long", 0))
        first = next(iter(config.agents))
        why = (
            f"{num_long} prompts were longer than agents.<name>.max_input_tokens (agents.{first}: "
            f"{config.agents[first].max_input_tokens}); raise it, or leave long problems out of data.train"
            if num_long
            else "nothing was asked"
        )
        return f"no completion came and none is under way: {why}"
    parts = {
        "are of agents that are not trained (credit.train_agents)": [
            sample for sample in samples if not config.credit.trains(sample.agent)
        ],
        "have no reward": [
            sample for sample in samples if config.credit.trains(sample.agent) and sample.reward.is_missing
        ],
    }
    rest = len(samples) - sum(map(len, parts.values()))
    told = [f"{len(found)} {what}" for what, found in parts.items() if found]
    if rest:
        told.append(f"{rest} have the rewards of all others that they are compared with")
    notes = [sample.reward.note for sample in parts["have no reward"] if sample.reward.note]
    return (
        f"no sample had a gradient in {num_steps} steps in a row (trainer.max_empty_steps); of the last step's {len(samples)} "
        f"samples {', '.join(told)}{f' (the first: {notes[0][:200]})' if notes else ''}: see samples/ for what was asked and "
        "answered"
    )
