"""The run, its data, its steps, how weights travel, and the lessons that turn random weights into a team."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from marsrl.rollout.config import LONGEST_S, MOST_MIB, MOST_RANKS, SILENCE_S, Count, CountOr0, Settings, Share, Tokens
from marsrl.rollout.tasks.config import (
    ArithmeticSlips,
    DualSystemSlips,
    EvalFile,
    SearchSlips,
    TrainFile,
    read_eval_files,
    read_train_files,
)

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads the word off as false; `mpt.scope=off` means the word."""


MOST_SEED = 2**31 - 1  # Megatron adds to it, and NumPy's generators take 32 bits


class RunSection(Settings):
    """Name and length of the run, and the files that it keeps (docs/quickstart.md)."""

    name: str | None = Field(None, description="directory under `dir`; default: preset and UTC time, never a collision")
    dir: Annotated[str, AfterValidator(os.path.expanduser)] = Field("runs", description="where run directories go")
    steps: Count = Field(32, description="policy updates, each of trainer.updates_per_step optimizer steps")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="every generator of the run derives from it")
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda: refused where PyTorch sees no GPU; auto: only where there is one that it does not see; cpu: never
    (docs/install.md)"""
    resume: Annotated[Literal["off", "auto", "previous"], OFF] = "off"
    """auto: go on from the latest checkpoint of run.name, stop if it is damaged; previous: go back to the newest whole one
    then (docs/faults.md)"""
    evaluate: bool = Field(True, description="evaluate before and after")
    eval_every: CountOr0 = Field(0, description="steps between evaluations on the way; 0 = none")
    checkpoint_every: CountOr0 = 0
    """steps between checkpoints, beside those of checkpoint_minutes; 0: none"""
    checkpoint_minutes: float = Field(15.0, ge=0, allow_inf_nan=False)
    """minutes between checkpoints, each at the end of a step: a crash loses no more and that step; 0: none"""
    keep_checkpoints: Count = Field(2, description="how many of the last checkpoints stay")
    keep_every: CountOr0 = Field(0, description="checkpoints of steps divisible by it stay too; 0 = none")
    keep_best: bool = True
    """with eval_every: save a checkpoint at each evaluation that is the best so far (eval/system; of equals the first), and keep
    it: checkpoints/best names it (docs/evaluate.md)"""
    async_checkpoint: bool = False
    """write checkpoints beside training, from copies in CPU memory (weights and optimizer state); a crash meanwhile loses the one
    that is being written"""
    silence_s: float = Field(SILENCE_S, gt=0, le=LONGEST_S)
    """a rank or an engine whose process says nothing for so long is lost: the run ends, an engine is replaced"""
    token_log_every: CountOr0 = 10
    """steps between those of which single tokens are kept, for `marsrl view` (docs/view.md); 0 = none"""
    token_log_groups: Count = 1
    """whose tokens are kept of such a step: groups of each agent, at most 32 MiB together"""
    prometheus_port: int = Field(0, ge=0, le=65535)
    """rank 0 answers Prometheus at 127.0.0.1:PORT/metrics (docs/prometheus.md); 0 = no port"""
    wandb: str | None = Field(None, description="wandb project; default: no wandb, no network")


class DataConfig(Settings):
    """The problems, where the task reads them from files (docs/data.md)."""

    train: Annotated[str | tuple[TrainFile, ...] | None, BeforeValidator(read_train_files)] = None
    """jsonl, json, parquet or HF dataset directory, or a list of {path, count}, or of {path, weight} (docs/data.md); null: the
    task generates problems"""
    eval: Annotated[str | tuple[EvalFile, ...] | None, BeforeValidator(read_eval_files)] = None
    """problems to evaluate on: a path, or a list of paths and of {path, name, count, repeat}, whose metrics have their names
    (docs/evaluate.md); null: some of data.train's are held out"""
    question_key: str | None = None
    """default: found from the first line (question, query, problem, prompt); a text, or a list of one user's message"""
    answer_key: str | None = None
    """default: found from the first line (answer, solution, reward_model.ground_truth, ...: docs/data.md)"""
    demonstrations: str | None = None
    """marsrl sft: jsonl or json of what agents should have written (docs/teachers.md)"""
    on_bad_line: Literal["error", "skip"] = "error"
    """a line of a data file without a problem or demonstration: stop and name it, or leave it out and count it"""
    on_placeholder: Literal["skip", "keep"] = "skip"
    """a problem whose answer is a placeholder (proof, notfound, N/A), which a policy could repeat: leave it out and count it, or
    keep it (docs/data.md)"""


class SftConfig(Settings):
    """marsrl sft: supervised training on data.demonstrations (docs/teachers.md)."""

    epochs: Count = Field(1, description="how often each demonstration is trained")
    batch: Count = Field(32, description="demonstrations an optimizer step")
    lr: float = Field(1e-5, ge=0)
    """learning rate at its peak; what else there is of policies.<name>.optimizer holds"""
    warmup_steps: CountOr0 = Field(0, description="steps in which the learning rate rises to lr")
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """how it falls after that, to optimizer.final_lr_ratio"""
    held_out: Share = 0.02
    """share of the demonstrations that is not trained, and whose loss is measured after each epoch"""


class TrainerConfig(Settings):
    """Computation of a step's batch, and when the run gives up (docs/troubleshooting.md)."""

    max_tokens_per_micro_batch: Tokens = 16384
    """tokens that a rank computes at once, or the ranks of layout.context together, prompts included: at least the longest prompt
    with its completion; more is faster and takes more memory, and changes no gradient"""
    updates_per_step: Count = Field(1, description="optimizer steps a step, each on its part of the step's groups")
    router_replay: Literal["none", "recompute", "rollout"] = "none"
    """experts forced in training: those of a forward pass under the step's starting weights (recompute, R2), or those of
    decoding (rollout, R3; recorded by rollout.engine=local, and by vllm on GPUs; docs/numerics.md)"""
    max_bad_steps: Count = 3
    """consecutive steps with a non-finite loss or gradient before the run stops"""
    max_empty_steps: Count = 20
    """consecutive steps with samples of which none has a gradient before the run stops"""
    agent_grad_norm_every: CountOr0 = 0
    """steps between measurements of the gradient norm of each agent's share, a forward and backward pass an agent; 0 =
    none"""
    threads: int | None = Field(None, gt=0, le=MOST_RANKS, description="CPU threads of the trainer; default: torch's")


SyncBackend = Literal["auto", "shm", "nccl", "ipc"]


class SyncConfig(Settings):
    """Transport of new weights to the engines (docs/weight_sync.md)."""

    backend: SyncBackend = "auto"
    """shm: files that every engine reads; nccl: each rank's shards straight to the engines' GPUs; ipc: the same between
    processes on one GPU; auto: ipc for rollout.placement=colocated, nccl for engines on GPUs of their own, shm without GPUs,
    in one process (placement=local), for rollout.vllm.quantization, and where sync.directory is set"""
    cpu_twin: bool = False
    """without CUDA: nccl over gloo, ipc over a file in /dev/shm (to try the path, not to be fast)"""
    bucket_mib: int = Field(256, gt=0, le=MOST_MIB)
    """nccl, ipc: what travels at once, MiB; each side holds one such buffer"""
    delta: bool = False
    """nccl: send what has changed since the version before, where that is less; each rank keeps a second copy of its weights
    for it (docs/weight_sync.md)"""
    host: str | None = None
    """address of trainer rank 0 as the hosts of engines reach it, for nccl, ipc and rollout.ray_address=here; default: found
    by the way to the Ray cluster, MASTER_ADDR or the default route"""
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_S)
    """nccl, ipc: an engine that takes nothing for so long while it is sent weights is lost"""
    directory: str | None = None
    """shm: where the weights of a version are written for the engines, a folder that all their hosts see; default: /dev/shm
    of rank 0's host"""
    verify_every: Count = Field(1, description="versions between probe comparisons; checksums are compared every time")


_ACCURACY = (
    "accuracy of {} before RL, from and to, outside of which the run warns: good enough to learn from, with room above"
)


class SearchTeamLessons(SearchSlips):
    """Lessons of the search team about linked facts."""

    drills: CountOr0 = Field(4, description="documents and questions about them, a step in phase 2")
    accuracy: tuple[float, float] = Field((0.35, 0.65), description=_ACCURACY.format("the whole team"))


class DualSystemLessons(DualSystemSlips):
    """Lessons of System 2 and System 1 about linked facts and calculations."""

    drills: CountOr0 = Field(4, description="documents and questions about them, a step in phase 2")
    accuracy: tuple[float, float] = Field((0.35, 0.65), description=_ACCURACY.format("the whole team"))


class WarmStartConfig(ArithmeticSlips):
    """Supervised traces that turn random weights into a mediocre team (docs/cpu_default.md).

    The keys of phase 1 are called after the Solver, and those of phase 2 after the Verifier, whichever roles a team's are.
    """

    ready: bool = Field(True, description="take the ready-made start, if it is of these settings; false: always teach")
    lr: float = Field(3e-3, gt=0, description="learning rate after its warm-up")
    betas: tuple[float, float] = Field((0.9, 0.98), description="AdamW's")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's")
    router_aux_loss: float = Field(0.01, ge=0)
    """coefficient of the MoE load-balancing loss, without which random routers settle on a few experts"""
    warmup_steps: CountOr0 = Field(50, description="first steps of phase 1, in which the learning rate rises to lr")
    solver_batch: Count = Field(32, description="problems (search team: drills) a step in phase 1 (one role alone)")
    solver_loss: float = Field(0.10, gt=0, description="phase 1 ends when the averaged loss is below it")
    max_solver_steps: Count = Field(900, description="phase 1 ends after so many steps, whatever the loss")
    team_batch: Count = Field(16, description="problems a step in phase 2 (all roles)")
    verifier_loss: float = Field(0.17, gt=0)
    """the learning rate falls from when the averaged loss is below it"""
    max_team_steps: Count = Field(400, description="of phase 2 at the full learning rate")
    decay_steps: CountOr0 = Field(170, description="then, the learning rate falling to a tenth")
    verdict_weight: float = Field(6.0, gt=0, description="loss weight of verdict tokens")
    equality_drills: CountOr0 = Field(64, description="`are these digits equal` drills a step")
    table_drills: CountOr0 = Field(256, description="single operations a step in phase 1")
    short_steps: CountOr0 = Field(120, description="first steps of phase 1, on short problems")
    slip_solver_phase1: Share = Field(0.03, description="wrong lines of the Solver's tutor in phase 1, as a share")
    accuracy_solver: tuple[float, float] = Field((0.40, 0.65), description=_ACCURACY.format("the Solver"))
    accuracy_verifier: tuple[float, float] = Field((0.57, 0.70), description=_ACCURACY.format("the Verifier"))
    search_team: SearchTeamLessons = SearchTeamLessons()
    dual_system: DualSystemLessons = DualSystemLessons()
