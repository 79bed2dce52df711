"""Checkpoints with real weights load completely, or an error names the damaged file.

If the disk is full, the last checkpoint stays intact. tests/trainer/test_checkpoint.py tests which checkpoint is resumed, kept
or removed.
"""

from __future__ import annotations

import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import files_up_to
from megatron_models import learner, micro_batches, save_model, sequences, step, weights
from safetensors.torch import load_file

from marsrl.commands.models.export import export
from marsrl.rollout.player.stages import RolloutState
from marsrl.trainer.checkpoint import CheckpointWriter, Restored, load_checkpoint
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.manifest import damage


def stepped(policy: Learner) -> float:
    return step(policy, micro_batches(sequences(4), 1)).loss


def state_after(step: int) -> RolloutState:
    return RolloutState({}, num_instances=step)


def writer(run: RunDirectory, *, keep_last: int = 9, is_async: bool = False) -> CheckpointWriter:
    return CheckpointWriter(run, keep_last=keep_last, keep_every=0, keep_best=False, is_async=is_async)


def save(saves: CheckpointWriter, number: int, policy: Learner) -> None:
    saves.save(number, {"main": number}, {"main": policy}, state_after(number))


def new_run(folder: Path) -> RunDirectory:
    run = RunDirectory.create(folder, "run", "preset")
    run.write_config({})
    return run


def load(run: RunDirectory, policy: Learner) -> Restored | None:
    return load_checkpoint(run, {"main": policy}, "auto", lambda message: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("model") / "m", num_hidden_layers=1)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, list[float]]:
    """A run with checkpoints of steps 1 and 2, and the losses of steps 1 to 4."""
    run, policy = new_run(tmp_path_factory.mktemp("made")), learner(model)
    losses = []
    for number in range(1, 5):
        losses.append(stepped(policy))
        if number <= 2:
            save(writer(run), number, policy)
    return run, losses


Trained = tuple[RunDirectory, Learner, list[float]]


@pytest.fixture
def trained(model: Path, made: tuple[RunDirectory, list[float]], tmp_path: Path) -> Trained:
    """A copy of the run of `made`; a new learner after step 3, whose weights differ from both saves; the losses of `made`."""
    (run, losses), policy = made, learner(model)
    for _ in range(3):
        stepped(policy)
    return RunDirectory(shutil.copytree(run.path, tmp_path / run.path.name)), policy, losses


def test_damaged_files_are_named_and_the_previous_save_offered(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, policy, losses = trained
    folder = run.checkpoint(2)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {"__0_0.distcp", "index.json", "common.json", "manifest.json", "rollout.msgpack"} <= {p.name for p in files}
    for path in files:
        content = path.read_bytes()
        middle = len(content) // 2
        for damaged in (content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], content[:-1]):
            path.write_bytes(damaged)
            with pytest.raises(RuntimeError, match="run.resume=previous, which repeats 1 step") as error:
                load(run, policy)
            assert path.name in str(error.value) and "step_1" in str(error.value)
        path.write_bytes(content)
    stranger = folder / "policies" / "main" / "__1_0.distcp"
    stranger.write_bytes(b"x")
    with pytest.raises(RuntimeError, match="__1_0.distcp is not in manifest.json"):
        load(run, policy)
    with pytest.raises(ValueError, match="__1_0.distcp is not in manifest.json"):
        export(run.path, run.path / "hf")
    stranger.unlink()
    torch_load = torch.load

    def careful(*args: Any, **options: Any) -> Any:
        assert options["weights_only"] is True
        return torch_load(*args, **options)

    monkeypatch.setattr(torch, "load", careful)  # nothing is unpickled from disk
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("a pickle is read"))
    assert load(run, policy) == Restored(2, {"main": 2}, state_after(2))
    assert [stepped(policy), stepped(policy)] == losses[2:]  # bitwise


def test_an_asynchronous_save_holds_the_weights_of_its_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, policy = new_run(tmp_path), learner(model)
    from marsrl.trainer.learner.megatron import checkpoint_store  # imported after the shim, which a learner installs

    may_write = threading.Event()
    write_tensors = checkpoint_store._write_tensors
    monkeypatch.setattr(
        checkpoint_store, "_write_tensors", lambda *words: (may_write.wait(60), write_tensors(*words))[1]
    )
    saves = writer(run, is_async=True)
    stepped(policy)
    save(saves, 1, policy)
    then = weights(policy)
    expected = [stepped(policy), stepped(policy)]  # trains on while the first save still writes
    saves.finish_if_written()
    assert run.latest_checkpoint() is None and not run.checkpoint(1).exists()
    may_write.set()
    save(saves, 3, policy)  # waits for the first save
    found = run.latest_checkpoint()
    assert found is not None and found.step == 1 and damage(found.path) == []
    export(found.path, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in then.items())
    assert load(run, policy) is not None
    assert [stepped(policy), stepped(policy)] == expected
    saves.finish()
    assert run.steps_on_disk() == [1, 3] and damage(run.checkpoint(3)) == []


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_writes_are_reported_and_keep_the_last_checkpoint(trained: Trained, is_async: bool) -> None:
    run, policy, _ = trained
    saves = writer(run, keep_last=1, is_async=is_async)

    def attempt() -> None:
        save(saves, 3, policy)
        saves.finish()  # an asynchronous save fails here

    # The disk becomes full at rank 0's own files, at the policy's small files, or in the middle of the tensors.
    for limit in (10, 2000, 100_000):
        with files_up_to(limit), pytest.raises(RuntimeError, match="the checkpoint of step 3 was not written") as error:
            attempt()
        assert "rank 0: OSError: [Errno 27]" in str(error.value) and "free disk space, or fix what" in str(error.value)
        found = run.latest_checkpoint()
        assert found is not None and found.step == 2 and damage(found.path) == []
        assert run.steps_on_disk() == [1, 2] and not list(run.checkpoints.glob("*.part"))
    run.checkpoints.rename(run.path / "elsewhere")
    run.checkpoints.write_text("in the way")
    with pytest.raises(RuntimeError, match="rank 0: NotADirectoryError"):
        attempt()
    run.checkpoints.unlink()
    (run.path / "elsewhere").rename(run.checkpoints)
    attempt()
    assert run.steps_on_disk() == [3]
