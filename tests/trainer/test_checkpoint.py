"""Checkpoints of a learner whose weights are a file with a word: they are complete or absent, a manifest lists their files, and
old ones are removed. The message of a failed run says how to resume.

tests/megatron/test_checkpoint.py tests real weights, damage, pointers and full disks.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.weights.files import parent_of
from marsrl.trainer import checkpoint
from marsrl.trainer.checkpoint import CheckpointWriter, Restored, is_due, load_checkpoint
from marsrl.trainer.config.sections import RunSection
from marsrl.trainer.runs.directory import CheckpointError, RunDirectory, write_json
from marsrl.trainer.runs.failure import failure_message, where_to_go_on
from marsrl.trainer.runs.manifest import FileSum, damage, file_sum, missing_or_cut, write_manifest


class WordSave:
    """A PendingSave of a learner whose weights are a word."""

    def __init__(self, folder: Path, word: str) -> None:
        self.folder, self.word = folder, word

    def write(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "word").write_text(self.word)

    def finish(self, failure: str) -> dict[str, FileSum]:
        return {"word": file_sum(self.folder / "word")}


class WordLearner:
    def __init__(self, word: str = "", adapter: object = None) -> None:
        self.word, self.adapter = word, adapter

    def begin_save(self, folder: Path, *, copy: bool) -> WordSave:
        return WordSave(folder, self.word)

    def load(self, folder: Path) -> None:
        self.word = (folder / "word").read_text()


class UnfitLearner(WordLearner):
    def load(self, folder: Path) -> None:
        # CheckpointException is no subclass of Exception.
        raise CheckpointException("plan", {0: (KeyError(f"optimizer of {folder}"), StackSummary())})


def state_after(step: int) -> RolloutState:
    return RolloutState({}, num_instances=step)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run", "preset")


def writer(run: RunDirectory, *, keep_last: int = 99, keep_every: int = 0, keep_best: bool = False) -> CheckpointWriter:
    return CheckpointWriter(run, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, is_async=False)


def save(saves: CheckpointWriter, *steps: int, word: str = "") -> None:
    for step in steps:
        saves.save(step, {"main": step}, {"main": WordLearner(word or f"w{step}")}, state_after(step))  # type: ignore[dict-item]


def load(run: RunDirectory, resume: Any = "auto") -> tuple[int, str, list[str]]:
    """Load a checkpoint into a new learner; return (step, its weights, messages)."""
    learner, said = WordLearner(), list[str]()
    restored = load_checkpoint(run, {"main": learner}, resume, said.append)  # type: ignore[dict-item]
    step = restored.step if restored else 0
    assert restored is None or restored == Restored(step, {"main": step}, state_after(step))
    return step, learner.word, said


def killed_at(moment: str, save: Callable[[], object]) -> None:
    """Call `save` in a process that is killed at the first audit event of Python with the name `moment`."""

    def struck() -> None:
        sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == moment else None)
        save()

    process = multiprocessing.get_context("fork").Process(target=struck)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_checkpoint_holds_policies_rollout_and_step(run: RunDirectory) -> None:
    assert load(run) == (0, "", [])
    learners: Any = {"main": WordLearner("a"), "other": WordLearner("b")}
    writer(run).save(12, {"main": 12, "other": 3}, learners, state_after(12))
    folder = run.checkpoint(12)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = ["manifest.json", "meta.json", "policies/main/word", "policies/other/word", "rollout.msgpack"]
    assert files == names and damage(folder) == []
    assert json.loads((folder / "meta.json").read_text()) == {"step": 12, "versions": {"main": 12, "other": 3}}
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_12"]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(run, {"third": WordLearner()}, "auto", pytest.fail)  # type: ignore[dict-item]
    assert str(caught.value).startswith(f"policy third of {folder} is intact but could not be loaded (File")
    assert "its model, dtype or optimizer differs from these settings" in str(caught.value)
    with pytest.raises(
        CheckpointError, match="could not be loaded .CheckpointException: .* or optimizer differs from these settings"
    ):
        load_checkpoint(run, {"main": UnfitLearner()}, "auto", pytest.fail)  # type: ignore[dict-item]
    fresh: Any = {"main": WordLearner(), "other": WordLearner()}
    restored = load_checkpoint(run, fresh, "auto", pytest.fail)
    assert restored == Restored(12, {"main": 12, "other": 3}, state_after(12))
    assert [learner.word for learner in fresh.values()] == ["a", "b"]


def test_a_checkpoint_of_other_adapters_is_loaded(run: RunDirectory) -> None:
    saved: Any = {"main": WordLearner("a"), "other": WordLearner("b")}
    state = RolloutState({}, pending=["an ask"], num_instances=7, num_stages=4, num_batches=3, num_taken=2)  # type: ignore[list-item]
    writer(run).save(12, {"main": 12, "other": 3, "frozen": 0}, saved, replace(state, pending=[]))
    messages, learners = list[str](), {"main": WordLearner(adapter=1), "third": WordLearner("fresh", adapter=1)}
    restored = load_checkpoint(run, learners, "auto", messages.append)  # type: ignore[arg-type]
    assert [learner.word for learner in learners.values()] == ["a", "fresh"]
    between = RolloutState({}, num_instances=7, num_stages=3, num_batches=3, num_taken=3)
    assert restored == Restored(12, {"main": 12, "frozen": 0}, between) and state.without_work() == between
    assert [
        "adapter third is not in" in messages[0],
        "other of checkpoint" in messages[1],
        "unfinished problems" in messages[2],
    ] == [True] * 3


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[tuple[str, bool]]()
    monkeypatch.setattr(
        checkpoint, "sync_tree", lambda folder: synced.append((folder.name, (folder / "manifest.json").exists()))
    )
    save(writer(run), 1)
    assert synced == [("step_1.part", True)]


def test_a_run_resumes_from_a_first_checkpoint_without_latest(run: RunDirectory) -> None:
    """If there is one checkpoint, the process was killed before it wrote `latest`; if there are several, a user removed it."""

    def killed() -> None:
        RunDirectory.mark_latest = lambda *_: sys.audit("latest")  # type: ignore[method-assign]
        save(writer(run), 4)

    killed_at("latest", killed)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_4"]
    assert load(run) == (4, "w4", [])
    assert (run.checkpoints / "latest").read_text() == "step_4\n"  # so a kill during the next save loses nothing
    save(writer(run), 8)
    (run.checkpoints / "latest").unlink()
    with pytest.raises(
        RuntimeError, match="is missing, but the folder has step_4, step_8; the newest intact one is step_8"
    ):
        load(run)


def test_a_kill_during_removal_leaves_no_partial_checkpoint(run: RunDirectory) -> None:
    save(writer(run), 1)
    killed_at("os.rmdir", lambda: save(writer(run, keep_last=1), 2))
    assert run.steps_on_disk() == [2] and damage(run.checkpoint(2)) == []
    save(writer(run, keep_last=1), 3)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_3"]


def test_a_save_replaces_the_same_step_and_partial_leftovers(run: RunDirectory) -> None:
    save(writer(run), 1, 2)
    for left in ("step_7.part", "step_2.part"):
        (run.checkpoints / left / "policies").mkdir(parents=True)
    (run.checkpoint(2) / "stranger").touch()
    save(writer(run), 2, word="again")
    assert load(run) == (2, "again", [])
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_1", "step_2"]


def test_removal_spares_later_checkpoints_and_strange_folders(run: RunDirectory) -> None:
    save(writer(run), 20)  # written before the run went back to an earlier step
    save(writer(run, keep_last=2, keep_every=4), *range(2, 13, 2))
    assert run.steps_on_disk() == [4, 8, 10, 12, 20]
    for other in ("step_x", "step_3.part", "xxxxx99"):
        (run.checkpoints / other).mkdir()
    assert run.steps_on_disk() == [4, 8, 10, 12, 20]


def evaluate(run: RunDirectory, **accuracies: float | None) -> None:
    """Write an evaluation for each step; accuracies: by step, as _2=0.5 for step 2."""
    for step, mean in accuracies.items():
        write_json(run.evaluation(int(step[1:])) / "evaluation.json", {"system": {"mean": mean}})


def test_the_best_evaluated_checkpoint_stays(run: RunDirectory) -> None:
    """If evaluations tie, the first checkpoint stays. A resumed run reads the best evaluation from the files. Checkpoints
    without an evaluation, or with one without answers, do not count.
    """
    pointer = run.checkpoints / "best"
    save(writer(run, keep_last=2, keep_best=True), 1)
    assert not pointer.exists()
    evaluate(run, _2=0.25, _3=None, _4=0.5, _5=0.9, _6=0.5)
    save(writer(run, keep_last=2, keep_best=True), 2, 3, 4)
    assert run.steps_on_disk() == [3, 4] and pointer.read_text() == "step_4\n"
    save(writer(run, keep_last=2, keep_best=True), 6, 7, 8)  # step 5 has no checkpoint
    assert run.steps_on_disk() == [4, 7, 8] and pointer.read_text() == "step_4\n"
    evaluate(run, _9=0.75)
    save(writer(run, keep_last=2, keep_best=True), 9, 10, 11)
    assert run.steps_on_disk() == [9, 10, 11] and pointer.read_text() == "step_9\n"
    save(writer(run, keep_last=2), 12)
    assert run.steps_on_disk() == [11, 12]


def test_a_run_that_went_back_forgets_the_best_of_later_steps(run: RunDirectory) -> None:
    evaluate(run, _2=0.5, _4=0.75)
    save(writer(run, keep_best=True), 2, 3, 4)
    run.forget_after(3)
    save(writer(run, keep_last=1, keep_best=True), 4)
    assert (run.checkpoints / "best").read_text() == "step_2\n" and run.steps_on_disk() == [2, 4]
    run.forget_after(1)
    save(writer(run, keep_best=True), 5)
    assert not (run.checkpoints / "best").exists()


def test_a_checkpoint_is_due_at_the_best_evaluation() -> None:
    never = RunSection(checkpoint_minutes=0)
    due = [is_due(never, 3, last=9, saved_s=0.0, is_asked=False, is_best=is_best) for is_best in (False, True)]
    assert due == [(False, False), (True, False)]


def test_an_unknown_number_of_lost_steps_is_not_reported(run: RunDirectory) -> None:
    save(writer(run), 1, 2, 10)
    (run.checkpoints / "latest").write_text("the last one")
    with pytest.raises(RuntimeError) as caught:
        load(run)
    assert "holds 'the last one', " in str(caught.value)
    offer = "; the newest intact one is step_10: restore the files, or resume from step_10 with run.resume=previous"
    assert str(caught.value).endswith(offer)
    step, word, said = load(run, "previous")
    assert (step, word) == (10, "w10") and said[-1].endswith("; GOING BACK to step_10 (run.resume=previous)")
    (run.checkpoints / "latest").write_text("the last one")
    for step in run.steps_on_disk():
        (run.checkpoint(step) / "manifest.json").unlink()
    with pytest.raises(RuntimeError, match="; no other checkpoint is intact: restore the files, or start another run"):
        load(run, "previous")


def test_the_newest_intact_checkpoint_is_offered_or_used(run: RunDirectory) -> None:
    save(writer(run), 1, 2, 4, 9, 11)
    run.mark_latest(9)
    for step in (9, 4):
        (run.checkpoint(step) / "meta.json").unlink()
    with pytest.raises(RuntimeError, match="the newest intact one is step_2: .* which repeats 7 step"):
        load(run)
    step, word, said = load(run, "previous")
    assert (step, word) == (2, "w2") and len(said) == 2
    assert said[1].endswith("GOING BACK to step_2 (run.resume=previous), which repeats 7 step(s)")


def test_a_failed_run_says_where_to_go_on(run: RunDirectory) -> None:
    error = RuntimeError("Ray is gone")

    def message(error: Exception = error) -> str:
        return failure_message(error, run, parent_of())

    assert message().startswith("marsrl: the run failed: RuntimeError: Ray is gone; it has no checkpoint yet (")
    assert message().endswith(": its name can be reused")
    run.metrics.write_text('{"step": 1}\n')
    assert message().endswith(": run.name=run run.resume=auto begins again at step 1")
    save(writer(run), 12)
    resumed = "resume by adding run.name=run run.resume=auto to the same command"
    assert message().endswith(f"(step 12) is intact: {resumed}")
    assert message(ValueError("other data")).endswith(f"is intact: after fixing this, {resumed}")
    (run.checkpoints / "latest").write_text("nonsense")
    assert "its last checkpoint is unknown" in message()
    assert message().endswith("run.resume=previous resumes from the newest intact one")


def test_a_damaged_checkpoint_is_not_called_intact(run: RunDirectory) -> None:
    save(writer(run), 4, 8, word="1234")
    file = run.checkpoint(8) / "policies/main/word"
    file.write_bytes(b"123")
    message = where_to_go_on(run)
    assert f"checkpoint {run.checkpoint(8)} is damaged ({file} has 3 bytes, expected 4): run.name=run" in message
    assert message.endswith("run.resume=previous goes back to step_4")
    (run.checkpoint(4) / "manifest.json").unlink()
    assert where_to_go_on(run).endswith(": no earlier one is intact")
    error = CheckpointError("step_8 is damaged; go on from step_4 with run.resume=previous")
    message = failure_message(error, run, parent_of())
    # The message does not advise to resume with run.resume=auto.
    assert message == f"marsrl: the run failed: CheckpointError: {error}"


def test_a_full_disk_is_named_wherever_it_was_met(run: RunDirectory) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(run.metrics))
    wrapped = RuntimeError("the rollout's thread has failed")
    wrapped.__cause__ = full
    for error in (full, wrapped):
        words = failure_message(error, run, parent_of())
        assert f"no space left on the disk of {run.metrics} (" in words and f"MiB are free at {run.path}" in words
        for said in (words, failure_message(error, run)):
            assert "free some (run.keep_checkpoints, another run.dir)" in said
    of_sft = failure_message(OSError(errno.ENOSPC, "full", "/elsewhere/file"), run)
    assert "no space left on the disk of /elsewhere/file" in of_sft and "sync.directory" not in of_sft
    assert "no space" not in failure_message(PermissionError(errno.EACCES, "no"), run, parent_of())


def test_damaged_missing_and_cut_files_are_named(tmp_path: Path) -> None:
    # These files are larger than one block of a read.
    folder, whole, flipped = (tmp_path, b"abc" * (1 << 22), b"abd" * (1 << 22))
    for name, content in {"a": whole, "policies/main/b": b"", "c": b"xyz"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for _ in range(2):
        write_manifest(folder, {})  # the manifest does not list itself
    assert missing_or_cut(folder) is None and damage(folder) == []
    (folder / "a").write_bytes(flipped)
    for i in range(9):
        (folder / f"mine{i}").touch()
    (folder / "d").mkdir()  # a folder is not a file
    assert missing_or_cut(folder) is None
    (folder / "policies/main/b").unlink()
    assert missing_or_cut(folder) == f"{folder / 'policies/main/b'} is missing; expected 0 bytes"
    (folder / "c").write_bytes(b"xy")
    expected = [
        f"{folder / 'a'} has checksum {zlib.crc32(flipped):08x}, expected {zlib.crc32(whole):08x}",
        f"{folder / 'c'} has 2 bytes, expected 3",
        f"{folder / 'policies/main/b'} is missing; expected 0 bytes",
        *(f"{folder / f'mine{i}'} is not in manifest.json; remove it if it is yours" for i in range(9)),
    ]
    assert damage(folder) == expected and missing_or_cut(folder) == expected[1]
    # Two ranks check half of the files each; the first also looks for unknown files.
    assert damage(folder, 0, 2) == [expected[0], *expected[2:]] and damage(folder, 1, 2) == [expected[1]]
    (folder / "a").unlink()
    (folder / "a").mkdir()
    assert damage(folder, 0, 3)[0] == f"{folder / 'a'} is missing; expected {len(whole)} bytes"
    (folder / "manifest.json").unlink()
    said = f"{folder / 'manifest.json'} is missing: the checkpoint is incomplete"
    assert missing_or_cut(folder) == said and damage(folder) == [said]
