"""A checkpoint is whole or refused by the name of the damaged file; what cannot be written leaves the last one alone."""

from __future__ import annotations

import pickle
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from megatron_models import micro_batches, save_model, sequences
from safetensors.torch import load_file

from marsrl.kernels import PolicyObjective
from marsrl.rollout.player.stages import RolloutState, StagesState
from marsrl.rollout.tasks.protocol import CursorState
from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.models.export import export
from marsrl.trainer.runs.checkpoint import CheckpointWriter, Restored, load_checkpoint
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.manifest import damage


def new_learner(folder: Path) -> Learner:
    policy = PolicyConfig(dtype="float32", optimizer=OptimizerConfig(lr=1e-2))
    objective, mpt = PolicyObjective(), MptConfig(scope="off")
    return Learner(policy, folder, objective=objective, mpt=mpt, num_agents=2, total_steps=9, seed=0)


def step(learner: Learner) -> float:
    return learner.step(micro_batches(sequences(4), 1), normaliser=30.0).loss


def state_after(step: int) -> RolloutState:
    return RolloutState(StagesState(num_instances=step), CursorState(0, step))


def writer(run: RunDirectory, *, keep_last: int = 9, keep_every: int = 0, is_async: bool = False) -> CheckpointWriter:
    return CheckpointWriter(run, keep_last=keep_last, keep_every=keep_every, is_async=is_async)


def new_run(folder: Path) -> RunDirectory:
    run = RunDirectory.create(folder, "run", "preset")
    run.write_config({})
    return run


def load(run: RunDirectory, learner: Learner, resume: str = "auto", said: list[str] | None = None) -> Restored | None:
    warnings: list[str] = [] if said is None else said
    return load_checkpoint(run, {"main": learner}, resume, warnings.append)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("model") / "m", num_hidden_layers=1)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, list[float]]:
    """A run with checkpoints of steps 1 and 2, and the losses of steps 1 to 4."""
    run, learner = new_run(tmp_path_factory.mktemp("made")), new_learner(model)
    losses = []
    for number in range(1, 5):
        losses.append(step(learner))
        if number <= 2:
            writer(run).save(number, {"main": number}, {"main": learner}, state_after(number))
    return run, losses


@pytest.fixture
def trained(
    model: Path, made: tuple[RunDirectory, list[float]], tmp_path: Path
) -> tuple[RunDirectory, Learner, list[float]]:
    """A copy of that run; a learner that is elsewhere, after step 3; the losses of steps 1 to 4."""
    (run, losses), learner = made, new_learner(model)
    for _ in range(3):
        step(learner)
    return RunDirectory(shutil.copytree(run.path, tmp_path / run.path.name)), learner, losses


Trained = tuple[RunDirectory, Learner, list[float]]


def test_a_damaged_file_is_refused_by_name_and_the_previous_checkpoint_is_offered(trained: Trained) -> None:
    run, learner, losses = trained
    folder = run.checkpoint(2)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {"__0_0.distcp", "index.json", "common.json", "manifest.json", "rollout.msgpack"} <= {p.name for p in files}
    for path in files:
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:-1], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.raises(RuntimeError, match="run.resume=previous, which plays 1 step") as error:
                load(run, learner)
            assert path.name in str(error.value) and "step_1" in str(error.value)
        path.write_bytes(content)
    stranger = folder / "policies" / "main" / "__1_0.distcp"
    stranger.write_bytes(b"x")
    with pytest.raises(RuntimeError, match="__1_0.distcp is not in manifest.json"):
        load(run, learner)
    with pytest.raises(ValueError, match="__1_0.distcp is not in manifest.json"):
        export(run.path, run.path / "hf")
    stranger.unlink()
    restored = load(run, learner)
    assert restored is not None and (restored.step, restored.versions) == (2, {"main": 2})
    assert [step(learner), step(learner)] == losses[2:]  # bit for bit


def test_going_back_is_asked_for_and_said_aloud(trained: Trained) -> None:
    run, learner, losses = trained
    path = run.checkpoint(2) / "meta.json"
    path.write_bytes(path.read_bytes() + b" ")
    said: list[str] = []
    restored = load(run, learner, "previous", said)
    assert restored is not None and restored.step == 1 and restored.rollout == state_after(1)
    assert len(said) == 1 and "GOING BACK to step_1" in said[0] and "meta.json has" in said[0]
    assert (run.checkpoints / "latest").read_text().strip() == "step_1"
    assert step(learner) == losses[1]
    writer(run).save(2, {"main": 2}, {"main": learner}, state_after(2))  # in place of the damaged one
    assert damage(run.checkpoint(2)) == []
    for number in (1, 2):
        (run.checkpoint(number) / "meta.json").unlink()
    with pytest.raises(RuntimeError, match="no earlier checkpoint is whole"):
        load(run, learner, "previous")


@pytest.mark.parametrize("pointer", [None, "step_9"], ids=["missing", "of a folder that is gone"])
def test_without_a_pointer_the_run_never_begins_anew_but_goes_back_if_asked(
    trained: Trained, pointer: str | None
) -> None:
    run, learner, losses = trained
    latest = run.checkpoints / "latest"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    with pytest.raises(RuntimeError, match="the newest whole one is step_2: .* with run.resume=previous"):
        load(run, learner)
    (run.checkpoint(2) / "meta.json").unlink()
    restored = load(run, learner, "previous")
    assert restored is not None and restored.step == 1
    assert latest.read_text().strip() == "step_1"  # from now on: no folder that it names is ever replaced
    assert step(learner) == losses[1]


def test_a_pointer_to_an_older_checkpoint_is_followed_and_said(trained: Trained) -> None:
    run, learner, _ = trained
    run.mark_latest(1)
    said: list[str] = []
    restored = load(run, learner, said=said)
    assert restored is not None and restored.step == 1
    assert len(said) == 1 and "[2], which are not used" in said[0]
    shutil.move(run.checkpoint(1), run.checkpoint(7))
    run.mark_latest(7)
    with pytest.raises(RuntimeError, match="step_7 holds the checkpoint of step 1"):
        load(run, learner)


def test_nothing_is_unpickled_from_disk(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    run, learner, _ = trained
    torch_load = torch.load

    def careful(*args: object, **options: object) -> object:
        assert options["weights_only"] is True
        return torch_load(*args, **options)  # type: ignore[arg-type]

    def refused(*args: object, **options: object) -> object:
        raise AssertionError("a pickle is read")

    monkeypatch.setattr(torch, "load", careful)
    monkeypatch.setattr(pickle, "load", refused)
    assert load(run, learner) is not None


def test_an_asynchronous_save_holds_the_weights_of_its_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, learner = new_run(tmp_path), new_learner(model)
    from marsrl.trainer.learner.megatron import checkpoint_store  # after the shim, which a learner installs

    may_write = threading.Event()
    write_tensors = checkpoint_store._write_tensors
    monkeypatch.setattr(
        checkpoint_store, "_write_tensors", lambda *words: (may_write.wait(60), write_tensors(*words))[1]
    )
    saves = writer(run, is_async=True)
    step(learner)
    saves.save(1, {"main": 1}, {"main": learner}, state_after(1))
    weights = {name: tensor.clone() for name, tensor in learner.export()}
    expected = [step(learner), step(learner)]  # while the first is not written
    saves.finish_if_written()
    assert run.latest_checkpoint() is None and not run.checkpoint(1).exists()
    may_write.set()
    saves.save(3, {"main": 3}, {"main": learner}, state_after(3))  # waits for the first
    found = run.latest_checkpoint()
    assert found is not None and found.step == 1 and damage(found.path) == []
    export(found.path, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())
    assert load(run, learner) is not None
    assert [step(learner), step(learner)] == expected
    saves.finish()
    assert run.steps_on_disk() == [1, 3] and damage(run.checkpoint(3)) == []


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow further, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_async", [False, True])
def test_what_cannot_be_written_is_said_and_the_last_checkpoint_stays(trained: Trained, is_async: bool) -> None:
    run, learner, _ = trained
    saves = writer(run, keep_last=1, is_async=is_async)

    def fails(attempt: Callable[[], None]) -> str:
        with pytest.raises(RuntimeError, match="the checkpoint of step 3 was not written") as error:
            attempt()
        found = run.latest_checkpoint()
        assert found is not None and found.step == 2 and damage(found.path) == []
        assert run.steps_on_disk() == [1, 2] and not list(run.checkpoints.glob("*.part"))
        return str(error.value)

    def save() -> None:
        saves.save(3, {"main": 3}, {"main": learner}, state_after(3))
        saves.finish()  # where an asynchronous save fails

    for limit in (10, 2000, 100_000):  # rank 0's own files; the policy's small ones; in the middle of the tensors
        with files_up_to(limit):
            text = fails(save)
        assert "rank 0: OSError: [Errno 27]" in text and "MiB are free there; mend" in text
    run.checkpoints.rename(run.path / "elsewhere")
    run.checkpoints.write_text("in the way")
    with pytest.raises(RuntimeError, match="rank 0: NotADirectoryError"):
        save()
    run.checkpoints.unlink()
    (run.path / "elsewhere").rename(run.checkpoints)
    save()
    assert run.steps_on_disk() == [3]


def test_the_last_ones_and_every_nth_stay(model: Path, tmp_path: Path) -> None:
    run, learner = new_run(tmp_path), new_learner(model)
    (run.checkpoints / "step_1.part").mkdir(parents=True)  # a run died while saving
    saves = writer(run, keep_last=2, keep_every=4)
    for number in range(2, 11, 2):
        saves.save(number, {"main": number}, {"main": learner}, state_after(number))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step_10", "step_4", "step_8"]
