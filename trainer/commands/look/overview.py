"""The first page: results and hardware of a run, from summary.json, config.yaml and the metrics."""

from __future__ import annotations

from typing import Any

from marsrl.trainer.commands.look.catalog import Catalog
from marsrl.trainer.commands.look.comparison import numbers_of
from marsrl.trainer.commands.look.palette import engine_name
from marsrl.trainer.report.summary import Estimate, Summary, compared, load_summary, of_other_inputs


def overview(catalog: Catalog) -> dict[str, Any]:
    """rows: of the table; confusions: of agents that give verdicts; facts: (label, text); config: config.yaml;
    num_non_finite: number of non-finite metric values. Without summary.json rows and facts are empty.
    """
    run = catalog.run
    found: dict[str, Any] = {
        "summary": None,
        "why_not": None,
        "rows": [],
        "confusions": [],
        "facts": [],
        "config": run.config.read_text("utf-8", "replace") if run.config.exists() else None,
        "last_step": catalog.counts["last_metrics"],
        "num_non_finite": sum(value is None for curve in catalog.curves.values() for _, value in curve),
    }
    try:
        summary = load_summary(run.summary)
    except FileNotFoundError:
        return found
    except ValueError as error:
        return found | {"why_not": str(error)}
    evaluated = compared(summary.before, summary.after) if summary.before or summary.after else []
    breaks = [
        (f"{name} breaks a right one", getattr(before, "breaks", None), getattr(after, "breaks", None))
        for name, before, after in evaluated
    ]
    rows = [*evaluated, *(row for row in breaks if row[1] or row[2])]
    return found | {
        "summary": f"{summary.task} · {summary.steps} steps · {engine_name(summary.engine)} · {summary.device}",
        "rows": [_row(*row, is_bar=row in evaluated) for row in rows],
        "confusions": [
            {"title": f"{name} {title}", "before": _counts(before, field), "after": _counts(after, field)}
            for name, before, after in evaluated
            for title, field in (("on fixed solutions", "confusion"), ("in the loop", "loop_confusion"))
            if _counts(before, field) or _counts(after, field)
        ],
        "facts": _facts(summary),
    }


def _row(name: str, before: Estimate | None, after: Estimate | None, *, is_bar: bool) -> dict[str, Any]:
    return {
        "name": name,
        "before": numbers_of(before),
        "after": numbers_of(after),
        "is_of_other_inputs": of_other_inputs(before, after),
        "is_bar": is_bar,
    }


def _counts(of: Estimate | None, field: str) -> dict[str, int] | None:
    found = getattr(of, field, None)
    return None if found is None else found.model_dump()


def _facts(summary: Summary) -> list[tuple[str, str]]:
    engine, warm = summary.engine, summary.warm_start
    sampler = f"; {engine.sampler}" if engine.sampler else ""
    facts = [
        ("Engine", f"{engine_name(engine)} on {engine.device}, {engine.dtype}{sampler}"),
        ("Tokens per engine", " · ".join(f"{num:,}" for num in summary.tokens_per_engine)),
        ("Verified weight syncs", f"{summary.verified_syncs}"),
        ("Model", summary.model),
        ("Device", summary.device),
        ("Seeds", ", ".join(f"{key} {value}" for key, value in summary.seeds.items())),
    ]
    if warm is not None:
        means = ", ".join(f"{name} {'–' if mean is None else f'{mean:.3f}'}" for name, mean in warm.measured.items())
        made = "from the cache" if warm.cached else f"{warm.seconds:.0f} s"
        facts.append(("Warm start", f"{made}, the team {'as' if warm.as_wanted else 'not as'} wanted ({means})"))
    facts += [
        ("Timings", ", ".join(f"{key} {value:.1f} s" for key, value in summary.timings.items())),
        ("Versions", ", ".join(f"{key} {value}" for key, value in summary.versions.items())),
        ("Commit", summary.commit or "not from a git checkout"),
    ]
    return facts
