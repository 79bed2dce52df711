"""The loop, for every mode: problems -> groups -> advantages -> batch -> step -> publish. Read this first.

One step is one pass through the training queue and makes one new policy version. Rank 0 plays the problems and knows
the groups; all ranks share the update. What a line hides lives in the file named after it.
"""

from __future__ import annotations

from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import mini_batches
from marsrl.trainer.data.scatter import scatter
from marsrl.trainer.run import Run


def train(run: Run) -> None:
    """Train until run.config.run.steps, evaluate, write the report. Collective over all ranks."""
    config = run.config
    run.begin()  # weights to the engines, evaluation before
    for step in run.steps_left():
        with run.timed("rollout"):
            batch = run.play()  # rank 0: finished groups of this stage, every agent; None elsewhere
        credited = None
        if batch is not None:
            teacher_logprobs = run.ask_teachers(batch)  # of agents that have one
            with run.timed("credit"):
                credited = credit(
                    batch.groups,
                    config.credit,
                    run.agents,
                    success=config.mpt.success,
                    keep_zero=run.keeps_zero,
                    group_size=config.rollout.group_size,
                    seed=config.run.seed,
                    teacher_logprobs=teacher_logprobs,
                )
                run.note_credit(credited)
        kept = run.choose_kept(credited)  # samples whose tokens are logged; none in most steps
        for policy, learner in run.learners.items():
            with run.timed("pack"):
                batches = None
                if credited is not None:
                    mine = credited.of(run.agents_of(policy))
                    batches = mini_batches(
                        mine, config.trainer.updates_per_step, run.average, seed=config.run.seed, step=step
                    )
                updates = scatter(batches, learner.shard(config.trainer.max_tokens_per_micro_batch))
            with run.engines_asleep(policy), run.timed("step"):
                stats = learner.train_step(updates, by_agent=run.measures_agents, keep=kept)
                run.note_step(policy, stats, batches)
            if stats.is_updated or run.engines_drop_weights:
                with run.timed("publish"):
                    run.publish(policy, is_new=stats.is_updated)  # version + 1, engines hold it and have proven it
        run.evaluate_if_due(step)
        run.record(step, batch)
        run.stop_if_diverged()
        run.stop_if_unusable(batch)
        run.checkpoint_if_due(step)
    run.finish()  # evaluation after, summary, report
