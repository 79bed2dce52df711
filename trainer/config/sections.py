"""Settings of the run, its data, trainer, weight sync, supervised training and warm start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from marsrl.rollout.config import (
    LONGEST_S,
    MOST_MIB,
    MOST_RANKS,
    SILENCE_S,
    Count,
    CountOr0,
    RolloutConfig,
    Settings,
    Share,
    Tokens,
)
from marsrl.rollout.tasks.config import EvalFile, TrainFile, TutorConfig, read_eval_files, read_train_files

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""Undo YAML's reading of the word off as false, for `mpt.scope=off`."""
ON_OFF = BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value)
"""As OFF, for a setting that can also be `on`, which YAML reads as true."""


MOST_SEED = 2**31 - 1  # NumPy seeds have 32 bits, and Megatron adds offsets to the seed.


class RunSection(Settings):
    """Name and length of the run, and the files that it keeps (docs/quickstart.md)."""

    name: str | None = Field(None, description="directory under `dir`; default: preset and UTC time, made unique")
    dir: Annotated[str, AfterValidator(os.path.expanduser)] = Field("runs", description="parent of run directories")
    steps: Count = Field(32, description="training steps, each of trainer.updates_per_step optimizer steps")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="seed of all random number generators of the run")
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: the GPU, or the CPU on a machine without one; a GPU that PyTorch cannot see is an error; cuda: a missing GPU is an
    error; cpu: ignore a GPU that PyTorch cannot see (to hide a GPU that PyTorch can see, set CUDA_VISIBLE_DEVICES=-1;
    docs/install.md)"""
    resume: Annotated[Literal["off", "auto", "previous"], OFF] = "off"
    """auto: continue from the latest checkpoint of run.name, or stop if it is damaged; previous: fall back to the newest intact
    one (docs/faults.md)"""
    evaluate: bool = Field(True, description="evaluate before and after training")
    eval_every: CountOr0 = Field(0, description="steps between evaluations during training; 0: none")
    checkpoint_every: CountOr0 = 0
    """steps between checkpoints, in addition to checkpoint_minutes; 0: none"""
    checkpoint_minutes: float = Field(15.0, ge=0, allow_inf_nan=False)
    """minutes between checkpoints, each at the end of a step; a crash loses at most this time plus one step; 0: none"""
    keep_checkpoints: Count = Field(2, description="number of latest checkpoints to keep")
    keep_every: CountOr0 = Field(0, description="also keep checkpoints of steps divisible by this; 0: none")
    keep_best: bool = True
    """with eval_every: save a checkpoint at each evaluation that is the best so far (highest eval/system, the earliest if equal),
    and keep it as checkpoints/best (docs/evaluate.md)"""
    async_checkpoint: bool = False
    """write checkpoints in the background from copies in CPU memory (weights and optimizer state); a crash loses the one being
    written"""
    silence_s: float = Field(SILENCE_S, gt=0, le=LONGEST_S)
    """seconds without a heartbeat after which a rank or engine is lost: a lost rank ends the run, a lost engine is replaced"""
    token_log_every: CountOr0 = 10
    """steps between logs of single tokens for `marsrl view` (docs/view.md); 0: none"""
    token_log_groups: Count = 1
    """number of groups of each agent whose tokens are logged in a step of token_log_every; all together at most 32 MiB"""
    prometheus_port: int = Field(0, ge=0, le=65535)
    """port on which rank 0 serves Prometheus metrics, at 127.0.0.1:PORT/metrics (docs/prometheus.md); 0: none"""
    wandb: str | None = Field(None, description="name of a wandb project, which uses the network; default: no wandb")


class DataConfig(Settings):
    """Problems, if the task reads them from files (docs/data.md)."""

    train: Annotated[str | tuple[TrainFile, ...] | None, BeforeValidator(read_train_files)] = None
    """jsonl, json, parquet or HF dataset directory, or a list of {path, count}, or of {path, weight} (docs/data.md); null: the
    task generates problems"""
    eval: Annotated[str | tuple[EvalFile, ...] | None, BeforeValidator(read_eval_files)] = None
    """problems to evaluate on: a path, or a list of paths and of {path, name, count, repeat}, each with metrics under its name
    (docs/evaluate.md); null: hold out part of data.train"""
    question_key: str | None = None
    """field with the question, text or a list of one user message; default: detected in the first line (question, query, problem,
    prompt)"""
    answer_key: str | None = None
    """field with the answer; default: detected in the first line (answer, solution, reward_model.ground_truth, ...; see
    docs/data.md)"""
    rest: CountOr0 = 0
    """largest number of epochs for which a problem rests: while its groups have no spread (docs/credit.md), it is left out for 1
    epoch, then 2, 4, ... up to this; 0: off"""
    demonstrations: str | None = None
    """jsonl or json file of outputs to imitate, for marsrl sft (docs/teachers.md)"""
    on_bad_line: Literal["error", "skip"] = "error"
    """error: stop at a line of a data file without a problem or demonstration; skip: skip such lines and count them"""
    on_placeholder: Literal["skip", "keep"] = "skip"
    """skip: skip and count problems whose answer is a placeholder (proof, notfound, N/A), which a policy could learn to repeat;
    keep: train on them (docs/data.md)"""

    def why_not(self, task: str) -> Iterator[str]:
        """Yield why problem files cannot be used, if the task generates its problems."""
        keys = [key for key in ("train", "eval") if getattr(self, key)]
        if keys and task in ("arithmetic", "reasoning_gym"):
            named = "arithmetic (the default)" if task == "arithmetic" else task
            yield (
                f"data.{keys[0]} is set, but task={named} generates its problems; did you mean task=math? For other "
                f"problems set task=qa or your own task (docs/own_task.md); for {task} remove data.{keys[0]}"
            )


class SftConfig(Settings):
    """Supervised training on data.demonstrations with marsrl sft (docs/teachers.md)."""

    epochs: Count = Field(1, description="passes over the demonstrations")
    batch: Count = Field(32, description="demonstrations per optimizer step")
    lr: float = Field(1e-5, ge=0)
    """peak learning rate; the other settings of policies.<name>.optimizer apply"""
    warmup_steps: CountOr0 = Field(0, description="steps of linear warm-up to lr")
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """schedule after the warm-up, down to lr x optimizer.final_lr_ratio"""
    held_out: Share = 0.02
    """share of demonstrations that is not trained on; its loss and accuracy are measured after each epoch"""
    stop_loss: float | None = Field(None, gt=0)
    """end after the first epoch with a held-out loss below this (nats per token); with stop_accuracy: both are needed"""
    stop_accuracy: float | None = Field(None, gt=0, le=1)
    """end after the first epoch in which the model gives at least this share of held-out tokens a probability above 0.5"""

    @model_validator(mode="after")
    def _can_stop(self) -> SftConfig:
        if not self.held_out and (self.stop_loss, self.stop_accuracy) != (None, None):
            raise ValueError(
                "sft.held_out is 0, but sft.stop_loss and sft.stop_accuracy need held-out demonstrations; raise it, or set both "
                "to null"
            )
        return self


SharedPrefixes = Literal["off", "auto", "on"]


class TrainerConfig(Settings):
    """Computation of a step's batch, and when the run stops early (docs/troubleshooting.md)."""

    max_tokens_per_micro_batch: Tokens = 16384
    """tokens in a micro-batch of a rank (of all ranks of layout.context together), prompts included; at least the longest prompt
    plus its completion; more is faster and takes more memory, and does not change gradients"""
    shared_prefixes: Annotated[SharedPrefixes, ON_OFF] = "off"
    """on: a prefix that samples of a micro-batch share, such as a prompt or the turns before a branch, is computed and (in
    max_tokens_per_micro_batch) counted once; gradients stay the same; auto: as on, but only in updates whose samples have over
    1.15 times as many tokens as `on` computes (docs/external.md)"""
    updates_per_step: Count = Field(1, description="optimizer steps per step, each on a part of the step's groups")
    router_replay: Literal["none", "recompute", "rollout"] = "none"
    """expert choices that training repeats. recompute: choices of a forward pass with the step's starting weights (R2); rollout:
    choices made in decoding (R3), which rollout.engine=local records, and vllm on GPUs (docs/numerics.md)"""
    max_bad_steps: Count = 3
    """consecutive steps with a non-finite loss or gradient after which the run stops"""
    max_empty_steps: Count = 20
    """consecutive steps in which no sample has a gradient after which the run stops"""
    agent_grad_norm_every: CountOr0 = 0
    """steps between measurements of each agent's gradient norm, which cost a forward and backward pass per agent; 0: none"""
    sleep: bool = False
    """with rollout.placement=colocated: move weights, optimizer state and references to pinned CPU memory and free the gradients
    while engines decode, so that rollout.vllm.gpu_memory_utilization can be higher (docs/parallelism.md)"""
    threads: int | None = Field(None, gt=0, le=MOST_RANKS, description="CPU threads of the trainer; default: torch's")

    def why_not(self, rollout: RolloutConfig) -> Iterator[str]:
        """Yield why the trainer's memory cannot sleep with this placement."""
        if self.sleep and rollout.placement != "colocated":
            yield (
                "trainer.sleep frees GPU memory for engines on the trainer's GPUs, but rollout.placement is "
                f"{rollout.placement}; set rollout.placement=colocated, or trainer.sleep=false"
            )


SyncBackend = Literal["auto", "shm", "nccl", "ipc"]


class SyncConfig(Settings):
    """Transport of new weights to the engines (docs/weight_sync.md)."""

    backend: SyncBackend = "auto"
    """shm: through files that engines read; nccl: each rank's shards directly to the engines' GPUs; ipc: as nccl, between
    processes on one GPU; auto: ipc for rollout.placement=colocated, nccl for engines on their own GPUs, and shm without GPUs,
    with placement=local, or if sync.directory is set"""
    cpu_twin: bool = False
    """test nccl and ipc without CUDA: nccl over gloo, ipc over a file in /dev/shm (slow)"""
    bucket_mib: int = Field(256, gt=0, le=MOST_MIB)
    """nccl, ipc: MiB per transfer; each side allocates one such buffer"""
    delta: bool = False
    """nccl: send only the changes since the previous version, if that takes fewer bytes; each rank keeps a second copy of its
    weights (docs/weight_sync.md)"""
    host: str | None = None
    """address of trainer rank 0 as seen from the engines' hosts, for nccl, ipc and rollout.ray_address=here; default: detected
    from the route to the Ray cluster, MASTER_ADDR or the default route"""
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_S)
    """nccl, ipc: seconds without progress of a transfer after which an engine counts as lost"""
    directory: str | None = None
    """shm: folder for the weights of a version, visible to all hosts of engines; default: /dev/shm of rank 0's host"""
    verify_every: Count | None = Field(
        None,
        description="versions between probe comparisons of a policy; default: 1, but a publish of several adapters of one base "
        "compares only the four that were compared longest ago. Checksums are compared at every publish",
    )

    def why_not(self, rollout: RolloutConfig) -> Iterator[str]:
        """Yield why the backend cannot reach engines with this placement."""
        if self.backend in ("auto", "shm"):
            return
        key = f"sync.backend={self.backend}"
        if self.directory is not None:
            yield f"sync.directory is set, but {key} writes no files; remove one of them"
        if self.backend == "nccl" and rollout.placement == "colocated":
            yield (
                f"{key}: NCCL does not support two processes on one GPU (rollout.placement=colocated); set sync.backend=ipc"
            )
        if rollout.placement == "local":
            yield (
                f"{key} works between processes, but rollout.placement=local has one; set another placement, "
                "or remove sync.backend"
            )
        if self.backend == "ipc" and rollout.placement == "disaggregated" and not self.cpu_twin:
            yield f"{key} works between processes on one GPU; set sync.backend=nccl, or rollout.placement=colocated"


class LeagueConfig(Settings):
    """Past versions of a policy's adapter, against which evaluations play the policy (docs/evaluate.md)."""

    policy: str = Field("main", description="policy of the two agents that play each other; it must have an adapter")
    every: Count = Field(20, description="number of versions from one kept version to the next; version 0 is kept too")
    size: Count = 8
    """largest number of opponents of an evaluation, each in a slot of the engines; if more versions would be kept, the
    distance between kept versions doubles"""
    games: Count = 32
    """games against each opponent in each of the two roles; the held-out problems are used in order, repeatedly if needed"""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the engines' adapters that hold opponents."""
        return tuple(f"{self.policy}@slot{number}" for number in range(self.size))

    def opponents(self, version: int) -> range:
        """Return the past versions that this version plays: evenly spaced from 0 on, at most `size`."""
        spacing = self.every
        while len(range(0, version, spacing)) > self.size:
            spacing *= 2
        return range(0, version, spacing)


class WarmStartConfig(TutorConfig):
    """Supervised warm start that turns random weights into a mediocre team (docs/cpu_default.md).

    Keys of phase 1 are named after the Solver and those of phase 2 after the Verifier, for any team.
    """

    ready: bool = Field(
        True, description="use the ready-made warm start if it matches these settings; false: always train one"
    )
    lr: float = Field(3e-3, gt=0, description="learning rate after the warm-up")
    warmup_steps: CountOr0 = Field(50, description="first steps of phase 1, in which the learning rate rises to lr")
    solver_loss: float = Field(0.10, gt=0, description="averaged loss, nats per token, below which phase 1 ends")
    max_solver_steps: Count = Field(900, description="largest number of steps of phase 1")
    verifier_loss: float = Field(0.17, gt=0)
    """averaged loss, nats per token, below which the learning rate decays"""
    max_team_steps: Count = Field(400, description="largest number of steps of phase 2 at the full learning rate")
    decay_steps: CountOr0 = Field(170, description="last steps of phase 2, in which the learning rate falls to a tenth")
