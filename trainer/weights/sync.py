"""Weight sync from the trainer to every engine, and its verification: one WeightSync per policy, on every rank.

    Run.publish -> publish(learners, syncs, versions)         every rank, after an update; rank 0 has the engines
        trainer_scores                  the trainer's log-probs of fixed tokens, if a comparison is due     (comparison.py)
        learner.sleep                   with trainer.sleep: everything below reads the weights on the CPU
        _prepare                        files are written while the engines still decode
        _deliver                        the engines load the weights, idle or without requests of the adapter
        CheckedEngines.check            checksums of every tensor agree                                     (comparison.py)
        CheckedEngines.compare          log-probs agree

The path of one tensor (the steps between trainer and engine are in rollout/weights):

    sync.backend=shm    Converter.export, whole on rank 0 -> write_version: checksum, file -> EnginePool.update_weights
                        -> the engine: WeightFiles -> its place in a fused tensor -> checksum                  (files.py)
    adapters, always    Converter.export, whole on rank 0 -> a PEFT directory -> EnginePool.update_adapter
                        -> the engine: its part of A and of B alpha / rank -> checksum                   (AdapterSync)
    nccl, ipc           Converter.stack, a shard on each rank -> DirectSender: its part of a checksum, a bucket
                        -> GroupConnection or SharedBuffer                                               (connections.py)
                        -> the engine: WeightReceiver -> its place in a fused tensor -> checksum              (direct.py)

Adapters of one base that change in the same step are published together.

Version v+1 exists for the rest of the program only after publish() has returned. Silent corruption in transfer can cost
weeks, so every check runs on every publish; only the comparison has an interval.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from safetensors import SafetensorError

from marsrl.rollout.adapter import AdapterConfig, held_by_shard, write_adapter
from marsrl.rollout.engines.protocol import AdapterUpdate, WeightReceipt, WeightUpdate
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Lost, Timed
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.direct import DirectSender, GroupSender, HeldWeights, Ranks, SharedSender
from marsrl.rollout.weights.files import PrivateFolder, WrittenWeights, check_room, not_written, write_version
from marsrl.trainer.learner.learner import Learner, Together
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.runs.collective import barrier, broadcast_bytes, gather_bytes, rank, world_size
from marsrl.trainer.runs.stop import Stopped
from marsrl.trainer.weights.comparison import (
    ADAPTERS_AT_ONCE,
    CheckedEngines,
    Compared,
    ComparisonReport,
    TrainerScores,
    scores_together,
    trainer_scores,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

StandingBy = Callable[[Callable[[], _T]], _T | None]
"""Runs a function on rank 0, while the other ranks wait for its requests (Standby.during)."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of a verified publish.

    seconds: duration of the publish; for adapters published together, the duration for all of them.
    is_direct: True if the weights were sent without files (nccl, ipc).
    num_bytes: bytes sent to an engine: those of the whole model, or fewer with sync.delta.
    changed_share: share of numbers that changed since the last transfer (sync.delta); None: not compared.
    comparison: result of the comparison of log-probs; None if none was due (sync.verify_every).
    num_engines: number of engines that were verified. num_shards: number of parts into which each engine divides its weights.
    digest: one digest of the checksums of what each engine holds.
    seconds_of: `seconds` by part. With files: export (gathering the trainer's tensors), checksum (of the sent tensors), write,
        load (by every engine), engine_checksum (by the slowest engine). With nccl or ipc: load (sending, receiving and
        checksums of the sent tensors, overlapped; repeated if an engine was lost), engine_checksum. If a comparison is due,
        also scores (the trainer computes log-probs) and probe (the engines compute log-probs, which are compared). With
        trainer.sleep, also sleep.
    """

    version: int
    seconds: float
    num_bytes: int
    comparison: ComparisonReport | None
    seconds_of: Mapping[str, float]
    is_direct: bool
    num_engines: int
    num_shards: int
    digest: str
    changed_share: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the sync/* metrics of metrics.jsonl."""
        metrics: dict[str, float] = {"sync/bytes": self.num_bytes, "sync/seconds": self.seconds}
        metrics["sync/direct"] = self.is_direct
        if self.changed_share is not None:
            metrics["sync/changed_share"] = self.changed_share
        if self.comparison is not None:
            metrics |= {
                "sync/probe_diff_max": self.comparison.largest,
                "sync/probe_diff_median": self.comparison.median,
                "sync/probe_diff_share": self.comparison.share,
                "sync/probe_noise": self.comparison.noise,
                "sync/probe_tokens": self.comparison.num_tokens,
            }
        return metrics


@dataclass(frozen=True, slots=True)
class Delivered:
    """Transfer to engines: what was sent, and the engines' receipts.

    expected: {fused tensor: checksum} for each shard of an engine.
    receipts: {engine number: receipt}.
    num_bytes, changed_share: as in SyncReport.
    """

    expected: Sequence[Mapping[str, int]]
    receipts: Mapping[int, WeightReceipt]
    num_bytes: int
    changed_share: float | None = None


class WeightSync(ABC):
    """Publisher of one policy's weights to its engines; verifies every publish. Constructed and used on all ranks together.

    sync = FileSync(CheckedEngines(pool, vocab_size=64) if rank() == 0 else None, torch.bfloat16)
    report = sync.publish(learner, version=1)
    """

    is_direct: ClassVar[bool]

    def __init__(
        self,
        engines: CheckedEngines | None,
        dtype: torch.dtype,
        *,
        verify_every: int | None = None,
        turn: int = 0,
        precision: Precision | None = None,
    ) -> None:
        """Prepare to publish; `engines` is None on ranks other than 0.

        dtype: compute dtype of the engines.
        verify_every: number of versions from one comparison to the next; None: 1, but see `due_now`.
        turn: remainder, modulo verify_every, of the versions to compare. Version 0 is always compared.
        precision: dtypes in which the engines round; None: `dtype` for everything.
        """
        self._engines, self._dtype, self._every, self._turn = engines, dtype, verify_every, turn
        self._last_compared = 0  # Number of the last comparison, by which `due_now` orders adapters; 0: none yet.
        self._is_bare = False  # True if an adapter's B is 0, so the trainer's scores equal those of the bare model.
        self._precision = precision or Precision(dtype)

    def publish(
        self,
        learner: Learner,
        version: int,
        engines_at_rest: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (it has no state)
        standing_by: StandingBy[dict[str, SyncReport]] | None = None,
    ) -> SyncReport | None:
        """Publish only this policy, as `publish` below. Collective; returns None except on rank 0."""
        reports = publish({"": learner}, {"": self}, {"": version}, engines_at_rest, standing_by)
        return None if reports is None else reports[""]

    def send_again(self, learner: Learner, version: int, engine: int | None) -> Timed | Lost | None:
        """Send the current weights to one engine again. Collective; never called when weights come from a file.

        engine: number of the engine, on rank 0; None on other ranks, which also return None.
        """
        raise NotImplementedError

    def _prepare(self, learner: Learner, version: int, seconds_of: dict[str, float]) -> None:  # noqa: B027
        """Prepare the transfer on every rank, while the engines still decode."""

    @abstractmethod
    def _deliver(self, learner: Learner, version: int) -> Delivered | None:
        """Transfer the weights on every rank, while the engines are idle; return, on rank 0, what each engine now holds."""

    def _settle(self) -> None:  # noqa: B027
        """Clean up on every rank, once the version is verified."""

    @abstractmethod
    def close(self) -> None:
        """Remove files and close connections; may be called twice."""


class FileSync(WeightSync):
    """Weight sync through safetensors shards in a folder visible to the engines' hosts: /dev/shm or a shared one (files.py)."""

    is_direct = False

    def __init__(
        self, engines: CheckedEngines | None, dtype: torch.dtype, *, directory: str | Path | None = None, **common: Any
    ) -> None:
        """Use rank 0's PrivateFolder in `directory`; `common` are the arguments of WeightSync."""
        super().__init__(engines, dtype, **common)
        self._files = PrivateFolder(directory) if engines is not None else None
        self._written: WrittenWeights | None = None

    def _prepare(self, learner: Learner, version: int, seconds_of: dict[str, float]) -> None:
        """Gather the tensors from all ranks; rank 0 writes them."""
        with timed_part(seconds_of, "export"):
            converter = learner.held()
        if self._files is None or self._engines is None:
            for _ in converter.export():
                raise AssertionError("only rank 0 exports")
            return
        shards = self._engines.shards_of_each
        self._written = write_version(
            self._files.path, self._dtype, converter.shapes, converter.export(), version, shards, seconds_of
        )

    def _deliver(self, learner: Learner, version: int) -> Delivered | None:
        if self._engines is None or self._written is None:
            return None
        pool, written = self._engines.pool, self._written
        receipts = pool.update_weights(WeightUpdate(str(written.folder), version))
        return Delivered(written.expected, dict(zip(pool.engines, receipts, strict=True)), written.num_bytes)

    def _settle(self) -> None:
        """Remove the previous version, which is kept until the new one is verified."""
        if self._files is not None and self._written is not None:
            self._files.keep_only(self._written.folder)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


class AdapterSync(FileSync):
    """Publisher of one adapter; the shared engines keep their weights and the other adapters.

    Adapters are small (53 MB for attention of Qwen3-30B-A3B at rank 32), so they are always sent as files: one PEFT directory
    per publish. Engines key cached prefixes by the directory's path.
    """

    def __init__(
        self, engines: CheckedEngines | None, dtype: torch.dtype, *, base: str, adapter: AdapterConfig, **common: Any
    ) -> None:
        """Publish an adapter of the model at `base`; `common` are the arguments of FileSync."""
        super().__init__(engines, dtype, **common)
        self._base, self._shape, self._adapter = base, read_shape(base), adapter
        self._numbers = itertools.count()

    def _prepare(self, learner: Learner, version: int, seconds_of: dict[str, float]) -> None:
        """Gather the tensors from all ranks; rank 0 writes them."""
        with timed_part(seconds_of, "export"):
            exported = {n: tensor.detach().to("cpu", self._dtype).contiguous() for n, tensor in learner.held().export()}
        if self._files is None or self._engines is None:
            assert not exported, "only rank 0 exports"
            return
        with timed_part(seconds_of, "checksum"):
            expected = self._checksums(exported, self._engines)
        self._is_bare = not any(tensor.any() for name, tensor in exported.items() if ".lora_B." in name)
        num_bytes = sum(tensor.nbytes for tensor in exported.values())
        folder = self._files.path / f"version_{version}.{next(self._numbers)}"
        with timed_part(seconds_of, "write"):
            try:
                check_room(self._files.path, num_bytes)
                folder.mkdir()
                write_adapter(folder, self._shape, self._adapter, exported, self._base)
            except (OSError, SafetensorError) as error:
                raise not_written(version, folder, error) from error
        self._written = WrittenWeights(folder, expected, num_bytes)

    @property
    def published(self) -> Path:
        """PEFT directory of the last version, on rank 0; the next publish removes it."""
        assert self._written is not None, "no publish yet, or not called on rank 0"
        return self._written.folder

    def load_past(self, update: AdapterUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load another version into a slot of its own beside the current one, and verify its checksums. On rank 0 only.

        tensors: the version's tensors, as read from its kept file. Raises RuntimeError if an engine holds other values.
        """
        assert self._engines is not None, "only rank 0 has engines"
        (receipts,) = self._engines.pool.update_adapters([update])
        by_engine = dict(zip(self._engines.pool.engines, receipts, strict=True))
        self._engines.check(self._checksums(tensors, self._engines), by_engine, update.version)

    def _checksums(self, tensors: Mapping[str, torch.Tensor], engines: CheckedEngines) -> list[dict[str, int]]:
        """Return {tensor: checksum} for each shard of an engine that holds this adapter."""
        shards = (held_by_shard(self._shape, self._adapter, tensors, self._dtype, s) for s in engines.shards_of_each)
        return [{name: checksum(tensor) for name, tensor in of_shard} for of_shard in shards]

    def _deliver(self, learner: Learner, version: int) -> Delivered | None:
        return _deliver_together({"": self}, {"": version}).get("")


class DirectSync(WeightSync):
    """Weight sync from every rank directly to engines' tensors (direct.py), by a process group (nccl) or shared memory (ipc)."""

    is_direct = True

    def __init__(
        self,
        engines: CheckedEngines | None,
        dtype: torch.dtype,
        kind: Literal["nccl", "ipc"],
        *,
        verify_every: int | None = None,
        precision: Precision | None = None,
        **options: Any,
    ) -> None:
        """Prepare to send directly. verify_every, precision: as in WeightSync. options: arguments of DirectSender.

        Raises ValueError if an engine holds its weights in a form that cannot be received.
        """
        super().__init__(engines, dtype, verify_every=verify_every, precision=precision)
        for engine, info in enumerate(engines.pool.infos() if engines is not None else ()):
            if info.why_no_receive:
                raise ValueError(f"sync.backend={kind}: engine {engine} cannot receive weights: {info.why_no_receive}")
        sender = GroupSender if kind == "nccl" else SharedSender
        ranks = Ranks(rank(), world_size(), broadcast_bytes, gather_bytes)
        self._sender: DirectSender = sender(ranks, dtype, **options)
        self._generation: int | None = None  # Generation of engines that the sender is connected to, on rank 0.

    def _deliver(self, learner: Learner, version: int) -> Delivered | None:
        """Send from all ranks while the engines receive.

        Everything is sent again, over new connections, if an engine was lost meanwhile or applied changes to the wrong base.

        Raises:
            RuntimeError: a rank failed, or the connection to live engines is broken.
            ValueError: the ranks' shards do not cover what an engine needs, or a bucket is smaller than a row.
        """
        converter = learner.held()
        if self._engines is None:
            is_again = True
            while is_again:
                self._send(converter)
                is_again = bool(broadcast_bytes(None))
            return None
        pool = self._engines.pool
        is_repeated = False  # True after a transfer that failed without a lost engine.
        while True:
            pool.stand_by()
            is_other, self._generation = pool.generation != self._generation, pool.generation
            answers, expected = self._transfer(converter, version, pool.engines, meets_anew=is_other)
            receipts = {engine: answer.value for engine, answer in answers.items() if isinstance(answer, Timed)}
            lost = {engine: answer.reason for engine, answer in answers.items() if isinstance(answer, Lost)}
            broken = [receipt.broken for receipt in receipts.values() if receipt.broken]
            if expected and not lost and not broken and self._sender.traffic.num_compared:
                wrong = [n for n, receipt in receipts.items() if list(receipt.checksums) != expected]
                broken = [f"engine {n} was sent changes, but its checksums differ" for n in wrong]
            if expected and not lost and not broken:
                break
            self._generation = None
            reason = next(iter([*lost.values(), *broken]), "a rank gave up")
            if not lost and is_repeated:
                raise RuntimeError(
                    f"weight sync: version {version} did not arrive, although no engine of policy {pool.name} is lost: {reason}; "
                    "check the network between the trainer and its engines, or raise sync.timeout_s"
                )
            is_repeated |= not lost
            _log.warning("policy %s: version %d did not arrive (%s); sending it again", pool.name, version, reason)
            pool.replace(lost)
            broadcast_bytes(b"again")
        broadcast_bytes(b"")
        pool.note_weights(version, expected)
        num_bytes = self._dtype.itemsize * sum(torch.Size(shape).numel() for shape in converter.shapes.values())
        traffic, share = self._sender.traffic, None
        if traffic.num_compared:
            share = traffic.num_changed / traffic.num_compared
            num_bytes = num_bytes * traffic.num_bytes // traffic.whole_bytes
        return Delivered(expected, receipts, num_bytes, share)

    def send_again(self, learner: Learner, version: int, engine: int | None) -> Timed | Lost | None:
        """Send the weights to one engine again, over new connections that only this transfer uses."""
        converter, self._generation = learner.held(), None
        if engine is None:
            self._send(converter)
            return None
        answer = self._transfer(converter, version, [engine], meets_anew=True)[0][engine]
        if isinstance(answer, Timed) and answer.value.broken:
            return Lost(f"its weights did not arrive: {answer.value.broken}")
        return answer

    def _send(self, held: HeldWeights) -> None:
        """Run the part of a rank other than 0 in a transfer."""
        self._sender.agree(held)
        self._sender.send(held)

    def _transfer(
        self, held: HeldWeights, version: int, engines: Sequence[int], *, meets_anew: bool
    ) -> tuple[Mapping[int, Timed | Lost], list[dict[str, int]]]:
        """Run rank 0's part; return each engine's answer, and checksums of each shard (empty if the transfer failed).

        meets_anew: open new connections, after a failed transfer or because the engines changed.
        """
        assert self._engines is not None, "only rank 0 has engines"
        pool, shards, sender = self._engines.pool, self._engines.shards_of_each, self._sender
        sender.agree(held, [*shards] * len(engines) if meets_anew else ())
        plans, num_shards = sender.plans, len(shards)
        updates = {
            engine: WeightUpdate("", version, tuple(plans[num_shards * i : num_shards * (i + 1)]))
            for i, engine in enumerate(engines)
        }
        answers: Future[Mapping[int, Timed | Lost]] = Future()

        def receive() -> None:
            try:
                answers.set_result(pool.receive_weights(updates, lambda engine, reason: sender.give_up(reason)))
            except BaseException as error:  # Raised in the caller's thread by answers.result().
                answers.set_exception(error)
                sender.give_up("an engine has failed")

        threading.Thread(target=receive, name="marsrl-sync", daemon=True).start()
        expected = sender.send(held)
        return answers.result(), expected[:num_shards]

    def close(self) -> None:
        self._sender.close()


class Standby:
    """Ranks other than 0 on standby while rank 0 uses the engines, to resend weights when a lost engine is replaced.

    Only sync.backend=nccl and ipc need it; with shm, a new engine reads the files.

        rank 0         work ... engine 3 is lost, a new one is made -> "main" -> send its part ... work -> ""
        other ranks    wait .............................................. "main" -> send their part ... wait ... "" -> go on

    Every rank has one Standby for all trained policies.

    versions: {policy: current version}, a live view.
    pools: {policy: pool of engines} on rank 0; None on other ranks.
    """

    _STOPPED = "\0"  # Sent instead of a policy's name if rank 0's work raised Stopped.

    def __init__(
        self,
        syncs: Mapping[str, WeightSync],
        learners: Mapping[str, Learner],
        versions: Mapping[str, int],
        pools: Mapping[str, EnginePool] | None,
    ) -> None:
        self._syncs, self._learners, self._versions = syncs, learners, versions
        self._pools = pools
        self._thread: int | None = None  # Rank 0's thread, while the other ranks stand by.
        for policy, pool in (self._pools or {}).items():
            pool.set_feed(functools.partial(self._feed, policy))

    def during(self, work: Callable[[], _T]) -> _T | None:
        """Run `work` on rank 0 and return its result; None on other ranks. Collective; learners hold the weights to resend.

        Raises Stopped on all ranks if rank 0's work raises it.
        """
        if self._pools is None:
            while policy := broadcast_bytes(None).decode():
                if policy == self._STOPPED:
                    raise Stopped
                self._send(policy, None)
            return None
        self._thread = threading.get_ident()
        try:
            result = work()
        except Stopped:
            broadcast_bytes(self._STOPPED.encode())
            raise
        finally:
            self._thread = None
        broadcast_bytes(b"")
        return result

    def _feed(self, policy: str, engine: int) -> Timed | Lost | None:
        """Send the policy's weights to an engine.

        Returns None if the other ranks are not on standby, or if called from another thread.
        """
        if self._thread != threading.get_ident():
            return None
        broadcast_bytes(policy.encode())
        return self._send(policy, engine)

    def _send(self, policy: str, engine: int | None) -> Timed | Lost | None:
        return self._syncs[policy].send_again(self._learners[policy], self._versions[policy], engine)


def publish(
    learners: Mapping[str, Learner],
    syncs: Mapping[str, WeightSync],
    versions: Mapping[str, int],
    engines_at_rest: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (it has no state)
    standing_by: StandingBy[dict[str, SyncReport]] | None = None,
    group: Together | None = None,
) -> dict[str, SyncReport] | None:
    """Send policies' weights to every engine and verify them: a single policy, or several adapters of one base.

    Several adapters share one message to the engines, and the passes for the comparison. Collective; returns each policy's
    report, None except on rank 0.

    syncs: WeightSync of each policy to publish. versions: current versions of these policies, and maybe of others.
    engines_at_rest: on rank 0, entered when the engines can load the weights. Engines stay idle inside the block; it exits
        once the new weights are verified.
    standing_by: runs rank 0's work while the other ranks send weights to engines that replace lost ones
        (Standby.during). None: lost engines are not replaced.
    group: group of the adapters, if there are several.

    Raises:
        RuntimeError: the weights did not arrive, an engine's weights differ from those sent (the tensors are
            named), or trainer and engine disagree on the log-probs (comparison.py).
        ValueError: tensors of the model are missing.
    """
    start, seconds_of = time.perf_counter(), dict[str, float]()
    seconds_of_each: dict[str, dict[str, float]] = {name: {} for name in syncs}
    scores: dict[str, TrainerScores] = {}
    if due := due_now(syncs, versions):
        with timed_part(seconds_of, "scores"):
            precision = syncs[due[0]]._precision
            if len(due) == 1:
                scores = {due[0]: trainer_scores(learners[due[0]], precision)}
            else:
                assert group is not None, "several policies are adapters of a group"
                scores = scores_together(group, due, precision)
    if any(learner.sleeps for learner in learners.values()):
        with timed_part(seconds_of, "sleep"):
            for learner in learners.values():
                learner.sleep()
    for name, sync in syncs.items():
        sync._prepare(learners[name], versions[name], seconds_of_each[name])
    with engines_at_rest:
        barrier()  # Rank 0 may have waited a while for the engines.
        with timed_part(seconds_of, "load"):
            delivered: dict[str, Delivered] = {}
            if len(syncs) > 1:
                delivered = _deliver_together(syncs, versions)
            else:
                ((name, sync),) = syncs.items()
                if (only := sync._deliver(learners[name], versions[name])) is not None:
                    delivered = {name: only}

        def proven() -> dict[str, SyncReport]:
            """Verify, on rank 0, the weights and log-probs of every serving engine, including replacements."""
            assert delivered, "only rank 0 verifies"
            _part_load(seconds_of, list(delivered.values()))
            asked = {}
            for name, sync in syncs.items():
                assert sync._engines is not None
                sync._engines.check(delivered[name].expected, delivered[name].receipts, versions[name])
                if name in scores:
                    asked[name] = Compared(sync._engines, scores[name], versions[name], sync._is_bare)
            compared: dict[str, ComparisonReport] = {}
            if asked:
                with timed_part(seconds_of, "probe"):
                    compared = dict(zip(asked, CheckedEngines.compare(list(asked.values())), strict=True))
            seconds = time.perf_counter() - start
            return {
                name: SyncReport(
                    versions[name], seconds, each.num_bytes, compared.get(name), seconds_of_each[name] | seconds_of,
                    syncs[name].is_direct, len(each.receipts), len(each.expected), digest(each.expected),
                    each.changed_share,
                )
                for name, each in delivered.items()
            }  # fmt: skip

        if standing_by is not None:
            reports = standing_by(proven)
        else:
            reports = proven() if rank() == 0 else None
    for sync in syncs.values():
        sync._settle()
    return reports


def due_now(syncs: Mapping[str, WeightSync], versions: Mapping[str, int]) -> list[str]:
    """Return the policies that this publish compares, and record that it compares them.

    Policies at version 0 are always compared. Of the others, sync.verify_every selects by version. Without it, the adapters that
    were compared longest ago are due, at most ADAPTERS_AT_ONCE: versions cannot give adapters their turns, because adapters of
    one base may have different versions and miss publishes.
    """
    first = [name for name in syncs if versions[name] == 0]
    later = [name for name, s in syncs.items() if versions[name] and not (versions[name] - s._turn) % (s._every or 1)]
    if all(sync._every is None for sync in syncs.values()):
        # After a resume none has been compared; its version then decides which adapters come first.
        turns = {name: (syncs[name]._turn - versions[name]) % len(syncs) for name in later}
        later = sorted(later, key=lambda name: (syncs[name]._last_compared, turns[name]))[:ADAPTERS_AT_ONCE]
    now = 1 + max(sync._last_compared for sync in syncs.values())
    for name in (*first, *later):
        syncs[name]._last_compared = now
    return [*first, *later]


def _deliver_together(syncs: Mapping[str, WeightSync], versions: Mapping[str, int]) -> dict[str, Delivered]:
    """Have the engines load all adapters; return, on rank 0, what each engine now holds of each adapter."""
    prepared = {
        name: (sync._engines, sync._written)
        for name, sync in syncs.items()
        if isinstance(sync, AdapterSync) and sync._engines is not None and sync._written is not None
    }
    if not prepared:
        return {}
    pool = next(engines.pool for engines, _ in prepared.values())
    receipts = pool.update_adapters(
        [AdapterUpdate(each.adapter, str(written.folder), versions[name]) for name, (each, written) in prepared.items()]
    )
    return {
        name: Delivered(written.expected, dict(zip(pool.engines, of_adapter, strict=True)), written.num_bytes)
        for (name, (_, written)), of_adapter in zip(prepared.items(), receipts, strict=True)
    }


def _part_load(seconds_of: dict[str, float], delivered: Sequence[Delivered]) -> None:
    """Subtract the slowest engine's checksum time from the seconds of the load, and record that time separately."""
    of_engines = Counter[int]()
    for each in delivered:
        of_engines.update({engine: receipt.checksum_seconds for engine, receipt in each.receipts.items()})
    seconds_of["engine_checksum"] = min(max(of_engines.values(), default=0.0), seconds_of["load"])
    seconds_of["load"] -= seconds_of["engine_checksum"]


def digest(expected: Sequence[Mapping[str, int]]) -> str:
    """Return a digest (16 hexadecimal digits) of every tensor's checksum in each shard of an engine."""
    text = "\n".join(
        f"{shard} {name} {value}" for shard, sums in enumerate(expected) for name, value in sorted(sums.items())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def timed_part(seconds_of: dict[str, float], part: str) -> Iterator[None]:
    """Record the duration of the body, in seconds."""
    start = time.perf_counter()
    yield
    seconds_of[part] = time.perf_counter() - start
