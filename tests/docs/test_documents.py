"""Commands in documents are tested; files, settings, metrics and messages that they name exist; the site builds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from documented_commands import TESTS, run_by, runner
from documents import PAGES, ROOT, Found, commands, is_on_the_page, links, other_blocks, pieces, rows, spans

from marsrl.rollout.orchestrations.registry import ORCHESTRATIONS
from marsrl.rollout.tasks.registry import TASKS
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.keys import OTHER_NAMES, all_keys

PICTURES = {
    "docs/own_task.md": "Peru, Lima\n",
    "README.md": "kernels/     fused tensor",
    "CONTRIBUTING.md": "api/        import marsrl",
    "docs/prompts.md": ("answer: boxed\nverdict:", "answer: boxed\nturns:"),
    "docs/tools.md": '<tool_call>\n{"name": "convert"',
    "docs/dual_system.md": "<think>Who is the teacher",
    "docs/data.md": ('{"question": "What is 2', "right answers  "),
    "docs/credit.md": ("class Toll:", "A_ik = "),  # played by tests/docs/test_objectives.py
    "docs/external.md": "class Guess:",  # played by tests/gateway/test_sessions.py
}


def test_every_command_of_the_documents_is_run_by_a_test() -> None:
    unknown = {found.text: found.where for found in commands() if runner(found.text) is None}
    assert not unknown, "give each a pattern in tests/docs/documented_commands.py, and a test"
    tests = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    for pattern, name in TESTS:
        assert run_by(name), f"no document has a command {pattern}"
        assert any(f"def {name}(" in text and f'run_by("{name}")' in text for text in tests), name


def test_blocks_that_are_no_commands_are_known() -> None:
    found: dict[str, list[str]] = {}
    for block in other_blocks():
        found.setdefault(block.where.partition(":")[0], []).append(block.text)
    assert found.keys() == PICTURES.keys()
    assert not [page for page, texts in found.items() if not all(text.startswith(PICTURES[page]) for text in texts)]


def files_named() -> Iterator[Found]:
    """Return the paths in backticks or diagrams that have a slash and a suffix, or a final slash."""
    path = re.compile(r"[\w.-]+(/[\w.-]+)*/([\w-]+\.(py|json|txt|md|yaml|svg|sh))?")
    for page in PAGES:
        yield from (span for span in spans(page) if path.fullmatch(span.text))
    for block in other_blocks():
        yield from (Found(block.where, match[0]) for match in path.finditer(block.text))


def test_every_file_that_is_linked_or_named_exists() -> None:
    assert len(links()) > 10
    gone = [reference for reference in links() if not (ROOT / reference.text).exists()]
    made_by_a_run = {"hf/", "prompts/"}
    for reference in files_named():
        page = (ROOT / reference.where.partition(":")[0]).parent
        if (
            not any((folder / reference.text).exists() for folder in (ROOT, page))
            and reference.text not in made_by_a_run
        ):
            gone.append(reference)
    assert not gone


def test_the_list_of_pages_has_every_page() -> None:
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/index.md").read_text("utf-8"))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


def settings_named() -> Iterator[Found]:
    """Return `section.key`, with or without a value, in backticks or in a command."""
    setting = re.compile(rf"(?:{'|'.join(RunConfig.model_fields)})(?:\.[\w<>]+)+")
    pieces = [span for page in PAGES for span in spans(page)] + list(commands())
    for piece in pieces:
        for word in piece.text.split():
            key = re.split(r"=|:$", word)[0]
            if setting.fullmatch(key) and not key.endswith(".py"):
                yield Found(piece.where, key)


def test_every_setting_that_the_documents_name_exists() -> None:
    keys = set(all_keys())
    sections = {key.rpartition(".")[0] for key in keys}
    named = list(settings_named())
    assert len({found.text for found in named}) > 25
    keys |= {f"orchestration_options.{name}" for kind in ORCHESTRATIONS.values() for name in kind.Options.model_fields}
    keys |= {f"task_options.{name}" for options in TASKS.values() for name in options.model_fields}
    free = re.compile(r"^(policies|agents)\.[\w]+(?=\.|$)")
    wrong = [found for found in named if free.sub(r"\1.<name>", found.text) not in keys | sections]
    assert not wrong


def test_backticks_of_running_text_are_closed() -> None:
    """After an unclosed backtick the other tests would take text for code."""
    texts = [(page.name, line, piece.content) for page in PAGES for line, piece in pieces(page) if piece.type == "text"]
    assert not [each for each in texts if "`" in each[2]]


CODE = [path for room in ("commands", "trainer", "rollout") for path in sorted((ROOT / room).rglob("*.py"))]
FAMILIES = "actor|advantage|cost|drmas|eval|judge|latency_s|metrics|mpt|perf|policy_cost|response_length|reward|rollout"
FAMILIES += "|router|session|sft|sync|teacher|team|timing_s|tools|train_rollout|verdicts"
# strings in the code that look like metrics, but are lanes of the trace or beginnings of names
NONE = {"reward/pool", "sync/<name>", "cost/<name>", "train_rollout/prob_diff_", "rollout/staleness_", "sft/held_out"}


def test_every_metric_that_the_code_names_is_on_the_page() -> None:
    names = {
        re.sub(r"\{[^}]*\}", "<name>", name)
        for path in CODE
        for name in re.findall(rf'"((?:{FAMILIES})/[\w/{{}}.]+)"', path.read_text("utf-8"))
    }
    assert len(names) > 60
    missing = {name for name in names - NONE if not is_on_the_page(name)}
    assert not missing, "give each a row of docs/metrics.md"


def test_every_message_on_the_page_is_in_the_code() -> None:
    """Only the rows whose first cell is a single message are checked."""
    code = "".join(re.sub(r'"\s*\n\s*f?"', "", Path(path).read_text("utf-8")) for path in CODE)
    messages = [cells[0][1:-1] for cells in rows("troubleshooting.md") if re.fullmatch(r"`[^`]+`", cells[0])]
    assert len(messages) > 15
    assert not [message for message in messages if message not in code]


def test_every_extra_is_in_the_table_with_what_it_adds() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    (extras,) = (
        each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "EXTRAS"
    )
    table = {cells[0].strip("`"): cells[1] for cells in rows("install.md")}
    for extra, requirements in ast.literal_eval(extras).items():
        names = [re.split(r"[><=]", requirement)[0] for requirement in requirements]
        assert not [name for name in names if name not in table[extra]], extra


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the menu, and every link and anchor has its target."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")} | {"config"}
    assert "rollout.segments" in (tmp_path / "site" / "config.html").read_text("utf-8")
    shown = (tmp_path / "site" / "quickstart.html").read_text("utf-8")
    assert "marsrl config" in shown and 'src="http' not in shown  # nothing is loaded from other sites


def test_suggested_keys_of_other_trainers_are_in_the_tables() -> None:
    """docs/coming_from.md and the error for an unknown key name the same setting."""
    table = rows("coming_from.md")
    shown = " ".join(span.text for span in spans(ROOT / "docs" / "coming_from.md"))
    for theirs, ours in OTHER_NAMES.items():
        assert theirs in shown.split(), theirs
        found = [cells[1] for cells in table if f"`{theirs}`" in cells[0].split(", ")]
        assert all(f".{ours}`" in cell for cell in found), theirs
