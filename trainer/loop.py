"""Training loop of every mode: problems -> groups -> advantages -> batch -> step -> publish. Read this first.

Each step trains on the groups that finished in one stage of the rollout, and makes one new version of each policy. Rank 0 plays
the problems and holds the groups; the update runs on all ranks.
"""

from __future__ import annotations

from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import mini_batches
from marsrl.trainer.data.scatter import MiniBatch, joined, scatter
from marsrl.trainer.run import Run


def train(run: Run) -> None:
    """Train until run.config.run.steps, evaluate, write the summary. Collective over all ranks."""
    config = run.config
    run.begin()  # Sends the weights to the engines, and evaluates the team.
    for step in run.steps_left():
        with run.timed("rollout"):
            batch = run.play()  # Groups of all agents that finished in this stage, on rank 0; None elsewhere.
        credited = None
        if batch is not None:
            teacher_logprobs = run.ask_teachers(batch)  # {uid: log-probs}; empty without teachers
            with run.timed("credit"):
                credited = credit(
                    batch.groups,
                    config.credit,
                    run.agents,
                    success=config.mpt.success,
                    keep_zero=config.loss.keeps_zero,
                    masks_truncated=config.loss.truncated == "mask",
                    group_size=config.rollout.group_size,
                    seed=config.run.seed,
                    teacher_logprobs=teacher_logprobs,
                )
                run.note_credit(credited)
        kept = run.choose_kept(credited)  # Samples whose tokens are logged; none in most steps.
        for group in run.groups:  # A group is a policy, or the adapters of one base.
            with run.timed("pack"):
                batches: dict[str, tuple[MiniBatch, ...]] | None = None
                if credited is not None:
                    num, seed = config.trainer.updates_per_step, config.run.seed
                    batches = {
                        policy: mini_batches(credited.of(run.agents_of(policy)), num, run.average, seed=seed, step=step)
                        for policy in group.learners
                    }
                together = joined(list(batches.values())) if batches is not None else None
                shard = group.shard(config.trainer.max_tokens_per_micro_batch, config.trainer.shared_prefixes)
                updates = scatter(together, shard)
            with run.engines_asleep(group), run.timed("step"):
                stats = group.train_step(updates, by_agent=run.measures_agents, keep=kept)
                for policy in group.learners:
                    run.note_step(policy, stats[policy], batches[policy] if batches is not None else None)
            is_new = {policy: stats[policy].is_updated for policy in group.learners}
            if not run.engines_drop_weights:
                is_new = {policy: True for policy, is_updated in is_new.items() if is_updated}
            if is_new:
                with run.timed("publish"):  # Sends the new version, and verifies it on every engine.
                    run.publish(group, is_new)
        run.evaluate_if_due(step)
        run.record(step, batch)
        run.stop_if_diverged()
        run.stop_if_unusable(batch)
        run.checkpoint_if_due(step)
    run.finish()  # Evaluates the team, and writes the summary.
