"""`marsrl plan`: output of a plan as tables or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.engines import SyncTime, publish_bytes, slot_bytes
from marsrl.commands.plan.plan import Plan, PolicyPlan
from marsrl.commands.plan.ranking import Option, best_of_each_layout
from marsrl.rollout.adapter import AdapterConfig

_ROWS = 8  # maximum number of layouts in the table
_UNFIT = 4  # maximum number of layouts in the table that do not fit


_OF_A_POLICY = (
    "name", "model", "parameters", "active_parameters", "longest_sequence", "micro_batch_tokens", "work", "configured",
    "why_not_configured", "options", "engines", "engine", "rollout", "sync", "fits", "host_bytes", "splits",
)  # fmt: skip


def as_json(plan: Plan) -> str:
    """Return everything that `show` prints, and every option, as JSON; bytes and seconds are plain numbers."""
    of_plan = {"policies": [], "fits": plan.fits, "step_s": plan.step_s, "seconds": plan.seconds}
    content: dict[str, Any] = {**vars(plan), **of_plan}
    for policy in plan.policies:
        written = {name: getattr(policy, name) for name in _OF_A_POLICY}
        written["options"] = [
            dataclasses.asdict(option)
            | {"seconds": option.time.total, "peak_bytes": option.memory.peak, "layout_words": option.layout.words}
            for option in policy.options
        ]
        written["sync"] = dataclasses.asdict(policy.sync) | {"total": policy.sync.total}
        content["policies"].append(written)
    return json.dumps(content, indent=1, allow_nan=False, default=_as_plain)


def show(plan: Plan, console: Console) -> None:
    """Print every policy's tables, the reasons that prevent a start, the notes and the constants."""
    split = f"{plan.num_trainers} train" + (
        f", {plan.num_engine_gpus} decode" if plan.num_engine_gpus else " and decode"
    )
    console.print(Text(f"{plan.num_gpus} x {plan.gpu}: {split}", style="bold"))
    for policy in plan.policies:
        _show_policy(plan, policy, console)
    if plan.step_s is not None:
        order = (
            "rollout and updates in parallel, then publishing" if plan.overlap else "rollout, updates, then publishing"
        )
        console.print(Text(f"a step: {_duration(plan.step_s)} ({order})", style="bold"))
    for sentence in plan.refused:
        console.print(Text(f"- refused: {sentence}", style="bold red"))
    for note in plan.notes:
        console.print(Text(f"- {note}", style="yellow"))
    console.print(_constants(plan))


def _as_plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, AdapterConfig) else dataclasses.asdict(value)


def _show_policy(plan: Plan, policy: PolicyPlan, console: Console) -> None:
    console.print(
        Text(
            f"\npolicy {policy.name}: {policy.model}, {policy.parameters:,} parameters, {policy.active_parameters:,} active "
            f"per token{_adapters_words(policy)}\nper step at most {policy.work.sequences:,} samples with "
            f"{policy.work.tokens / 1e6:.1f} M tokens; longest sequence {policy.longest_sequence:,} tokens, micro-batches of "
            f"{policy.micro_batch_tokens:,} tokens"
        )
    )
    console.print(_layouts(plan, policy))
    if policy.chosen is not None:
        console.print(_recompute_modes(policy, policy.chosen))
        console.print(_where_time_goes(policy.chosen))
    console.print(_engines(policy))
    if policy.splits:
        console.print(_splits(policy))


def _adapters_words(policy: PolicyPlan) -> str:
    """Return text about the adapters that are trained on the policy; "" if the policy itself is trained."""
    setup = policy.engines
    if not setup.adapters:
        return ""
    sizes = ", ".join(f"{publish_bytes(setup, adapter) / 1e6:,.1f}" for adapter in setup.adapters)
    return (
        f"\nfrozen, with {len(setup.adapters)} adapter(s); a publish sends {sizes} MB, and their slots take "
        f"{_gib(slot_bytes(setup))} GiB of each engine GPU"
    )


def _layouts(plan: Plan, policy: PolicyPlan) -> Table:
    title = "layouts that fit, fastest first; GiB of the fullest GPU"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    has_reference = any(option.memory.reference for option in policy.options)
    reference = ("reference",) if has_reference else ()
    table.add_column("layout", min_width=12)  # keeps the table within 80 columns
    table.add_column("recompute", min_width=9)
    for heading in ("weights", *reference, "grads", "optim", "kept", "work", "needs"):
        table.add_column(heading, justify="right", min_width=len(heading))
    table.add_column("update", justify="right", min_width=8)
    fitting = best_of_each_layout([o for o in policy.options if o.fits])
    fitted = {o.layout for o in fitting}
    unfit = [o for o in best_of_each_layout([o for o in policy.options if not o.fits]) if o.layout not in fitted]
    rows = fitting[:_ROWS]
    configured = policy.configured
    if configured is not None and all(
        (o.layout, o.recompute) != (configured.layout, configured.recompute) for o in rows
    ):
        rows.append(configured)
    for option in rows:
        is_configured = configured is not None and (option.layout, option.recompute) == (
            configured.layout,
            configured.recompute,
        )
        table.add_row(*_cells(option, is_configured, has_reference), style="bold" if is_configured else "")
    table.add_section()
    for option in unfit[:_UNFIT]:
        table.add_row(*_cells(option, False, has_reference), style="dim")
    table.caption = f"{len(fitting)} layouts fit, {len(unfit)} do not" + (
        "; the config's layout is bold" if configured else ""
    )
    return table


def _cells(option: Option, is_configured: bool, has_reference: bool) -> list[Text]:
    memory = option.memory
    reference = (memory.reference,) if has_reference else ()
    held = (memory.weights, *reference, memory.gradients, memory.optimizer)
    sizes = (*held, memory.activations + memory.replay, memory.working, option.needed)
    last = _duration(option.time.total) if option.fits else f"no: {option.why_not.split(':')[0]}"
    words = option.layout.words + (" (config)" if is_configured else "")
    return [Text(cell) for cell in (words, option.recompute, *map(_gib, sizes), last)]


def _recompute_modes(policy: PolicyPlan, chosen: Option) -> Table:
    """Return the table of memory by recompute mode for one layout: saved activations, the output head, and the peak."""
    headings = ("recompute", ">kept", ">head (logits chunk, gradients)", ">fullest moment", ">needs", ">update")
    rows = []
    for option in policy.options:
        if option.layout == chosen.layout:
            memory = option.memory
            moment = f"{memory.moment}: {_gib(memory.working)}"
            update = _duration(option.time.total) if option.fits else "does not fit"
            rows.append(
                (option.recompute, _gib(memory.activations), _gib(memory.head), moment, _gib(option.needed), update)
            )
    return _table(f"{chosen.layout.words}: activations by recompute mode, GiB", headings, rows)


def _where_time_goes(option: Option) -> Table:
    title = f"an update with {option.layout.words}, recompute {option.recompute}"
    rows = [(name.replace("_", " "), _duration(seconds)) for name, seconds in vars(option.time).items() if seconds > 0]
    return _table(title, ("", ">"), rows, show_header=False)


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], **looks: Any) -> Table:
    """Return a table. headings: a leading `>` aligns the column to the right."""
    table = Table(title=title, title_justify="left", **looks)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _engines(policy: PolicyPlan) -> Table:
    engine, rollout, setup, rows = policy.engine, policy.rollout, policy.engines, list[tuple[str, str]]()
    num_gpus, num_experts = setup.tensor_parallel, setup.shape.num_experts
    if setup.experts_of_gpu and num_gpus > 1:
        words = (
            f"expert-parallel, {setup.experts_of_gpu} of {num_experts} on each GPU; the busiest of {num_gpus} GPUs has "
            f"{hw.IMBALANCE.value:g} times the mean load"
        )
        rows.append(("experts", words))
    elif num_experts and num_gpus > 1:
        rows.append(("experts", f"tensor-parallel, each of the {num_experts} split over {num_gpus} GPUs"))
    rows += [
        ("per engine GPU", f"weights {_gib(engine.weights)} GiB, KV cache {_gib(engine.kv_cache)} GiB"),
        (
            "KV cache",
            f"{engine.kv_bytes_per_token / 1024:.0f} KiB per token, {engine.kv_tokens:,} tokens per engine: "
            f"{engine.longest_sequences:.1f} sequences of maximum length",
        ),
        (
            "decoding",
            f"{rollout.tokens_per_s_per_engine:,.0f} tokens/s per engine at {rollout.concurrency:.0f} requests; "
            f"{_duration(rollout.seconds)} for a step's completions",
        ),
        (
            "prompts",
            f"{rollout.prefilled / 1e6:.1f} M tokens, {_duration(rollout.prefill)} of that time; a group shares its prompt's "
            "prefill, and samples continued in another stage or with new weights are prefilled again",
        ),
    ]
    if setup.transfer_bytes:
        words = (
            f"{policy.job.training.world_size * setup.num_gpus} communicators of two GPUs take "
            f"{_gib(policy.rank_transfer_bytes)} GiB on each rank's GPU and {_gib(setup.transfer_bytes)} GiB on each engine GPU"
        )
        rows.append(("NCCL", words))
    rows.append(("weight sync", _sync_words(policy.sync)))
    return _table("engines and weight sync", ("", ""), rows, show_header=False)


def _sync_words(sync: SyncTime) -> str:
    """Return text with the seconds of each part of a sync, without parts that take no time."""
    parts = {"gather": sync.gather, "files": sync.write, "load": sync.load, "between GPUs": sync.send}
    parts |= {"buckets": sync.copy, "checksums": sync.checksum, "rounding to FP8": sync.quantise}
    listed = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in parts.items() if seconds)
    words = f"{_duration(sync.total)} by {sync.backend}: {listed}; transfer alone {_duration(sync.links_alone)}"
    if sync.with_delta:
        changed = f"{hw.CHANGED_SHARE.value:.0%} of the parameters have changed"
        words += f"; with sync.delta, if {changed}, {_duration(sync.with_delta)}"
    return words


def _splits(policy: PolicyPlan) -> Table:
    """Return the table of alternative engine setups, each with its best split of the GPUs."""
    headings = (">train", "engines x GPUs", ">requests", ">rollout", ">update", ">step", "layout of the update")
    rows = []
    for split in policy.splits:
        seconds = (_duration(value) for value in (split.rollout_s, split.update.time.total, split.step_s))
        layout = f"{split.update.layout.words}, recompute {split.update.recompute}"
        rows.append((str(split.num_trainers), split.engines.words, f"{split.concurrency:.0f}", *seconds, layout))
    return _table("other splits of the GPUs, shortest step first", headings, rows)


def _constants(plan: Plan) -> Table:
    rows = [
        (constant.name, f"{constant.value:.4g} {constant.unit}".strip(), constant.source) for constant in plan.constants
    ]
    return _table("constants and assumptions", ("constant", "value", "source"), rows)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
