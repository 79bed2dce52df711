"""Record of a step on rank 0: its metrics, its samples, and the tokens of some samples.

log.note({"actor/loss": 0.1})               # during the step; a repeated name replaces the earlier value
log.write(step, batch, seconds, ...)        # metrics.jsonl, Prometheus, samples/, one line on the console
log.write_tokens(step, batch); log.forget() # tokens/; clears the record for the next step
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import fmean

from marsrl.rollout.player.stages import StepBatch
from marsrl.rollout.team import Team
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.credit import Credited, drmas_metrics, masked_metrics
from marsrl.trainer.data.turns import turn_metrics
from marsrl.trainer.learner.trained_tokens import TrainedSample, TrainedTokens
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.cost import EpisodeClock, cost_metrics, failing_tools, judge_metrics, tool_shares
from marsrl.trainer.report.fates import Resting, fates
from marsrl.trainer.report.group_metrics import endings, one_sided_verdicts, poor_merges, summarise, team_metrics
from marsrl.trainer.report.metrics import MetricsLog, read_metrics
from marsrl.trainer.report.prometheus import MetricsPort
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.report.step_metrics import GradSpikes
from marsrl.trainer.report.token_log import choose_samples, token_record, write_tokens
from marsrl.trainer.report.unread import unread
from marsrl.trainer.runs.directory import RunDirectory


class StepLog:
    """Record of the current step, on rank 0 only.

    port: metrics port that shows every row; None: no port.
    episode_clock: clock that the rollout must notify of episodes.
    kept: uids of the samples whose tokens are written.
    tokens: log-probs, entropies and marks of these samples' tokens, from the step's updates.
    samples: number of trained tokens and log-prob gap of every trained sample; one entry per update and context-parallel rank.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, console: RunConsole, team: Team) -> None:
        self.port: MetricsPort | None = None
        self.episode_clock = EpisodeClock()
        self._config, self._directory, self._console, self._team = config, directory, console, team
        self._policies = {name: agent.policy for name, agent in config.agents.items()}
        self._metrics: MetricsLog | None = None
        self._spikes = GradSpikes()
        self._resting = Resting(config.trainer.max_empty_steps)
        self.forget()

    def forget(self) -> None:
        """Clear the record for the next step."""
        self.kept: Collection[str] = frozenset()
        self.tokens: list[TrainedTokens] = []
        self.samples: list[TrainedSample] = []
        self._credited = Credited()
        self._row: dict[str, float] = {}

    def open(self, resume_step: int | None) -> None:
        """Open metrics.jsonl and its copies.

        resume_step: step of the checkpoint that the run resumes from; later rows are cut off. None: a new run.
        """
        self._metrics = MetricsLog(self._directory, wandb_project=self._config.run.wandb, resume_step=resume_step)
        self._spikes = GradSpikes(row.values for row in read_metrics(self._directory.metrics))

    def close(self) -> None:
        assert self._metrics is not None
        self._metrics.close()

    def note(self, values: Mapping[str, float]) -> None:
        """Add metrics of this step."""
        self._row.update(values)

    def note_credit(self, credited: Credited) -> None:
        """Add the advantages, for the samples log, and metrics of turns and of a common baseline (drmas_metrics)."""
        self._credited = credited
        if self._config.loss.truncated == "mask":
            self.note(masked_metrics(credited))
        samples = (sample for group in credited.groups for sample in group.samples)
        self.note(turn_metrics((each, credited.turns[each.uid]) for each in samples if each.uid in credited.turns))
        if self._config.has_whole_instances:  # Otherwise a step has incomplete instances, mostly of one agent.
            self.note(drmas_metrics(credited.groups))

    def choose_kept(self, credited: Credited, step: int) -> list[str]:
        """Choose the samples whose tokens are logged in this step; return their uids."""
        run = self._config.run
        trained = {sequence.uid for sequence in credited.sequences}
        chosen = choose_samples(credited.groups, trained, num_groups=run.token_log_groups, seed=run.seed, step=step)
        self.kept = frozenset(chosen)
        return chosen

    def write(
        self,
        step: int,
        batch: StepBatch,
        seconds: Mapping[str, float],
        *,
        version: int,
        num_unfinished: int,
        untrained: str = "",
    ) -> None:
        """Write everything but the tokens.

        seconds: duration of each part of the step. version: version of the policy that trained on the batch. num_unfinished:
        samples carried over. untrained: reason why the step trained nothing; "" if it trained.
        """
        config, team = self._config, self._team
        summary = summarise(
            batch.groups,
            version=version,
            num_unfinished=num_unfinished,
            advantages=self._credited.advantages,
            verifiers=team.orchestration.verifiers,
            frozen=[name for name, agent in config.agents.items() if agent.policy not in config.trained_policies],
        )
        ended = endings(batch.groups, team.is_read)
        forms = {agent: team.orchestration.form(agent) for agent in ended}
        answering = [agent for agent in ended if forms[agent] and agent not in team.orchestration.verifiers]
        self.note(
            {f"answers/{name}/missing": fmean([not ending.is_read for ending in ended[name]]) for name in answering}
        )
        self.note(self._spikes.found(self._row))
        self.note({f"rollout/engines/{name}": pool.num_engines for name, pool in team.pools.items()})
        row = {**batch.metrics, **summary, **self._costs(batch), **self._row, **self._times(batch, seconds)}
        assert self._metrics is not None
        self._metrics.log(step, row)
        if self.port is not None:
            self.port.show(step, row)
        trains = {
            name
            for name, agent in config.agents.items()
            if config.credit.trains(name) and agent.policy in config.trained_policies
        }
        became = fates(batch.groups, trains, self._credited, self.samples)
        write_samples(self._directory, step, batch.groups, self._credited.advantages, became, self._policies)
        failing = failing_tools(batch.metrics, team.tools.last_errors()) if team.tools is not None else []
        zeros = [unread(agent, forms[agent], endings_of) for agent, endings_of in ended.items()]
        rests = self._resting.found(batch.groups, became)
        merges = poor_merges(batch.groups)
        for warning in [*one_sided_verdicts(batch.groups), *merges, *failing, *filter(None, zeros), *rests]:
            self._console.warning(warning)
        means = {agent: summary.get(f"reward/{agent}/mean") for agent in config.agents}
        rewards = " ".join(f"{agent} {mean:.2f}" for agent, mean in means.items() if mean is not None)
        parts = [f"reward: {rewards}"] if rewards else []
        parts += [f"nothing trained: {untrained}"] if untrained else []
        self._console.message("  ".join([f"step {step}/{config.run.steps}", *parts, f"{sum(seconds.values()):.1f} s"]))

    def _costs(self, batch: StepBatch) -> dict[str, float]:
        """Return the cost of the step's samples: tokens, tools, latencies, the judge."""
        config = self._config
        costs = cost_metrics(batch.metrics, config.agents) | tool_shares(batch.metrics)
        costs |= self.episode_clock.metrics() | team_metrics(batch.metrics)
        if config.judge is not None:
            costs |= judge_metrics(batch.metrics)
        return costs

    def _times(self, batch: StepBatch, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of the step's parts, and tokens per second."""
        total, decoded = sum(seconds.values()), batch.metrics.get("rollout/tokens", 0)
        # With overlap, the time spent waiting for a batch is not the decoding time.
        overlaps = self._config.rollout.overlap > 0
        return {
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            "timing_s/total": total,
            "rollout/tokens_per_s": decoded / (total if overlaps else seconds["rollout"]),
            "perf/tokens_per_s": decoded / total,
        }

    def write_tokens(self, step: int, batch: StepBatch) -> None:
        """Write the tokens of the samples in `kept`, with the updates' results."""
        trained = {tokens.uid: tokens for tokens in self.tokens}
        samples = (sample for group in batch.groups for sample in group.samples)
        records = [
            token_record(
                sample,
                step,
                line,
                policy := self._policies[sample.agent],
                self._team.renderers[policy],
                trained.get(sample.uid),
            )
            for line, sample in enumerate(samples, start=1)  # Lines are counted as in the samples file.
            if sample.uid in self.kept
        ]
        write_tokens(self._directory, step, records)
