"""Which trajectories the report shows, as trees: a sample, the groups asked about it, their samples, and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marsrl.trainer.report.samples_log import SampleRecord, read_samples

WINDOW = 6  # steps looked at: in the agentic pipeline a trajectory of five agents spans five
NUM_PROBLEMS = 3
MAX_CHARS = 6000  # of a text; 2 x 3 problems x 72 samples then stay near 3 MB


@dataclass(frozen=True, slots=True)
class AnsweredGroup:
    """Samples of one agent on one input, and the prompt they share."""

    agent: str
    prompt: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A sample, the step it was trained in, and what the other agents made of it."""

    sample: SampleRecord
    step: int
    groups: tuple[AnsweredGroup, ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All shown samples of one rollout instance. At the top: Solver groups, and those whose parent is not shown."""

    rollout_id: str
    problem_id: str
    groups: tuple[AnsweredGroup, ...]


class WholeSamples:
    """Reads samples files as far as they are whole. damages: of each file that is not, the file and the line."""

    def __init__(self) -> None:
        self.damages: dict[Path, str] = {}

    def __call__(self, path: Path) -> Iterator[SampleRecord]:
        try:
            yield from read_samples(path)
        except ValueError as error:
            self.damages[path] = str(error)


def trajectories_around(
    files: dict[int, Path], *, last: bool, read: Callable[[Path], Iterator[SampleRecord]] = read_samples
) -> list[Trajectory]:
    """The deepest few rollout instances that start in the first step, or that end in the last one.

    Reads the window's files twice, first names and then texts of the chosen: a step of long texts is never all in
    memory. Texts are cut in the middle at MAX_CHARS.
    """
    steps = sorted(files)
    window, anchor = (steps[-WINDOW:], steps[-1]) if last else (steps[:WINDOW], steps[0])
    agents: dict[str, set[str]] = {}
    anchored: dict[str, None] = {}  # in file order
    for step in window:
        for sample in read(files[step]):
            agents.setdefault(sample.rollout_id, set()).add(sample.agent)
            if step == anchor:
                anchored[sample.rollout_id] = None
    chosen = sorted(anchored, key=lambda rollout_id: -len(agents[rollout_id]))[:NUM_PROBLEMS]
    found: dict[str, list[tuple[int, SampleRecord]]] = {rollout_id: [] for rollout_id in chosen}
    for step in window:
        for sample in read(files[step]):
            if sample.rollout_id in found:
                found[sample.rollout_id].append((step, sample))
    return [_tree(rollout_id, samples) for rollout_id, samples in found.items()]


def shorten(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half:,} characters left out ...]\n\n{text[-half:]}"


def _tree(rollout_id: str, samples: Sequence[tuple[int, SampleRecord]]) -> Trajectory:
    known = {sample.uid for _, sample in samples}
    children: dict[str | None, list[tuple[int, SampleRecord]]] = {}
    for step, sample in samples:
        children.setdefault(sample.parent_uid if sample.parent_uid in known else None, []).append((step, sample))
    groups = _groups(children.pop(None, []), children)
    return Trajectory(rollout_id, samples[0][1].problem_id if samples else "", groups)


def _groups(
    samples: Iterable[tuple[int, SampleRecord]], children: dict[str | None, list[tuple[int, SampleRecord]]]
) -> tuple[AnsweredGroup, ...]:
    by_group: dict[str, list[tuple[int, SampleRecord]]] = {}
    for step, sample in samples:
        by_group.setdefault(sample.group_id, []).append((step, sample))
    return tuple(
        AnsweredGroup(
            members[0][1].agent,
            members[0][1].prompt,
            # pop: each sample has one place, and a damaged file with a ring of parents cannot make us go round
            tuple(Node(sample, step, _groups(children.pop(sample.uid, []), children)) for step, sample in members),
        )
        for members in by_group.values()
    )
