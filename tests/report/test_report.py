"""The page, also in a real Chromium, which `make test` finds or installs."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import zstandard
from made_up_run import AGENTS, make_evaluation, make_group, make_run, make_sample, make_summary

from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.metrics import MetricsLog
from marsrl.trainer.report.palette import number_text, series_colors
from marsrl.trainer.report.report import PLANS, write_report
from marsrl.trainer.report.samples_log import sample_files, write_samples
from marsrl.trainer.report.summary import AgentEstimate, estimate, save_summary
from marsrl.trainer.report.trees import trajectories_around
from marsrl.trainer.runs.directory import RunDirectory

CHROMIUM = Path(__file__).with_name("chromium.sh")

ATTACK = (
    "</pre></script></title></style><script>document.title='PWNED'</script>"
    "<img src=x onerror=\"document.title='PWNED'\"><svg onload=document.title='PWNED'>"
    "' onmouseover='x \" onload=\"y {{ 7*191 }} {% raw %} \x00\x1b\u2028\u202e\ud800 -->"
)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("src", "href", "action", "srcset"):
                self.loads.append(value or "")


def test_what_models_wrote_stays_text(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path, text=ATTACK).path).read_text("utf-8")
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "object", "form", "base"}
    assert not [name for name in page.attributes if name.startswith("on")]
    assert page.loads == ["data:,"]
    assert "{{ 7*191 }}" in text and "1337" not in text
    assert not set(text) & set("\x00\x1b\u2028\u202e") and "⟨U+202E⟩" in text and "⟨U+D800⟩" in text


def test_the_timeline_shows_every_lane_and_where_steps_and_stages_begin(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path).path).read_text("utf-8")
    picture = text[text.index('aria-label="timeline"') :]
    picture = picture[: picture.index("</svg>")]
    for lane in ("engine/0", "rank/0", "sync/main", "reward/0"):
        assert f">{lane}</text>" in picture
    assert "mark/" not in picture
    assert picture.count('class="mark step"') == picture.count('class="mark stage"') == 6
    assert "<title>step 3: 13.500 s</title>" in picture


def test_a_page_shows_every_part(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path).path).read_text("utf-8")
    parts = (
        "vLLM 0.0-test on cpu",
        "0123abc",
        "412,345",
        "verifier1 in the loop",
        "<polyline",
        "engine/0",
        "0.880",
        "config.yaml",
    )
    for shown in parts:
        assert shown in text, shown
    assert "No samples" not in text and 'class="note"' in text  # one gradient norm is not finite: said


def test_gradient_norms_of_agents_and_policies_are_on_one_chart(tmp_path: Path) -> None:
    (norms,) = [plan for plan in PLANS if plan.title == "Gradient norm"]
    names = ("actor/grad_norm", "actor/solver/grad_norm", "small/actor/grad_norm", "small/actor/solver/grad_norm")
    assert [norms.label(name) for name in names] == ["grad_norm", "solver", "small", "small/solver"]
    assert [norms.label(name) for name in ("actor/loss", "actor/grad_spikes", "small/other/grad_norm")] == [None] * 3
    (rewards,) = [plan for plan in PLANS if plan.title == "Reward"]
    assert rewards.label("reward/solver/mean") == "solver" and rewards.label("small/reward/solver/mean") is None
    run = RunDirectory.create(tmp_path, "a", "p")
    with MetricsLog(run, tensorboard=False) as log:
        log.log(1, {name: 1.0 + i for i, name in enumerate(names)} | {"small/actor/grad_spikes": 1.0})
    page = write_report(run.path).read_text("utf-8")
    assert all(f"<title>{label}, step 1: {i + 1}</title>" in page for i, label in enumerate(map(norms.label, names)))
    assert "<title>small, step 1: 1</title>" in page


def test_an_agent_and_an_activity_have_one_colour_in_every_chart(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path).path).read_text("utf-8")
    told = re.findall(r'<span><i class="(c\d)"></i>([^<]+)</span>', text)
    assert {(name, color) for color, name in told if name in AGENTS} == {
        (name, f"c{place}") for place, name in enumerate(AGENTS)
    }
    assert sum(name == "solver" for _, name in told) > 2
    activities = [(name, color) for color, name in told if name in ("rollout", "step", "credit", "publish")]
    assert len(activities) == 8 and len(set(activities)) == len({color for _, color in activities}) == 4
    colors = series_colors(["main/solver", "all", "mean", "small/judge"], ["judge", "solver"])
    assert colors == {"main/solver": "c1", "all": "c7", "mean": "c2", "small/judge": "c0"}


def test_charts_that_stay_at_zero_are_folded_and_labels_are_whole(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    with MetricsLog(run, tensorboard=False) as log:
        for step in range(1, 4):
            log.log(
                step, {"actor/grad_spikes": 0.0, "actor/entropy": 1e-4 * step, "perf/tokens_per_s": 15_000.0 * step}
            )
    shown, _, folded = write_report(run.path).read_text("utf-8").partition('<details class="card zeros">')
    assert "Zero in every step: gradient spikes" in folded and ">Gradient spikes" not in shown
    assert ">Entropy" in shown and ">Tokens" in shown
    assert {"0.0001", "0.0002", "0.0003", "20,000", "40,000", "1", "2", "3"} <= set(
        re.findall(r'<text class="tick[^>]*>([^<]+)</text>', shown)
    )
    assert [number_text(value) for value in (0, 0.25, 1e-5, 123456, 2.5e7)] == [
        "0",
        "0.25",
        "1e-05",
        "123,456",
        "2.5e+07",
    ]


def test_numbers_of_other_inputs_are_told_from_those_of_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before, after = make_evaluation(0.55), make_evaluation(0.88)
    fewer = AgentEstimate(**dict(estimate(9, 36)))
    other = after.model_copy(update={"agents": {**after.agents, "corrector1": fewer}})
    for found, num in ((after, 0), (other, 1)):
        save_summary(run.summary, make_summary(before=before, after=found))
        assert write_report(run.path).read_text("utf-8").count(">other inputs than before<") == num
        RunConsole(0, shown := io.StringIO()).results(make_summary(before=before, after=found))
        starred = [line for line in shown.getvalue().splitlines() if "*" in line]
        assert len(starred) == 2 * num and ("* on other inputs than before" in shown.getvalue()) == bool(num)
        assert all("corrector1" in line for line in starred[:-1])


def test_evaluations_on_the_way_are_one_chart_with_their_intervals(tmp_path: Path) -> None:
    values = {"eval/system": 0.5, "eval/system/low": 0.4, "eval/system/high": 0.6, "eval/tokens": 900.0}
    (plan,) = [plan for plan in PLANS if plan.title == "Evaluation"]
    assert [plan.label(name) for name in values] == ["system", None, None, None]
    assert plan.label("eval/spent") is None and plan.label("eval/aime25/system") is None
    run = RunDirectory.create(tmp_path, "a", "p")
    with MetricsLog(run, tensorboard=False) as log:
        for step in (1, 2):
            log.log(step, values)
    page = write_report(run.path).read_text("utf-8")
    assert page.count('<polygon class="band') == 1 and "<title>system, step 2: 0.5</title>" in page


def test_a_run_that_has_not_finished_has_a_page_that_says_so(tmp_path: Path) -> None:
    empty = write_report(RunDirectory.create(tmp_path, "empty", "p").path).read_text("utf-8")
    for note in ("No summary.json", "No step has been logged", "No trace.json", "No samples"):
        assert note in empty
    unfinished = write_report(make_run(tmp_path, finished=False, num_steps=1).path).read_text("utf-8")
    assert "last step logged: 0" in unfinished and "First step (0)" in unfinished
    run = RunDirectory.create(tmp_path, "blind", "p")
    save_summary(run.summary, make_summary(before=None, after=None))
    assert "was not evaluated" in write_report(run.path).read_text("utf-8")
    with pytest.raises(ValueError, match="not there"):
        write_report(tmp_path / "nowhere")


def test_a_damaged_samples_file_is_named_and_the_rest_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    whole = write_report(run.path).read_text("utf-8")
    path = sample_files(run)[1]
    lines = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).readall().splitlines(keepends=True)
    path.write_bytes(zstandard.compress(lines[0] + lines[1][:40] + b"\n" + b"".join(lines[2:])))
    page = write_report(run.path).read_text("utf-8")
    assert f"{path}, line 2: is no sample" in page and f"{path}, line 2: is no sample" in caplog.text
    assert page.count('class="sample"') in range(1, whole.count('class="sample"'))
    path.write_bytes(b"garbage")
    assert f"{path}, line 0: is no sample" in write_report(run.path).read_text("utf-8")


def test_a_trajectory_over_several_steps_is_one_tree(tmp_path: Path) -> None:
    files = sample_files(make_run(tmp_path))
    agents = []
    groups = trajectories_around(files, last=True)[0].groups
    while groups:
        agents.append((groups[0].agent, groups[0].nodes[0].step))
        groups = groups[0].nodes[0].groups
    assert agents == [("solver", 1), ("verifier1", 2), ("corrector1", 3), ("verifier2", 4), ("corrector2", 5)]


def test_a_parent_that_is_not_there_hides_no_sample(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    write_samples(run, 0, [make_group(make_sample("child", "verifier1", parent_uid="gone"))])
    assert trajectories_around(sample_files(run), last=True)[0].groups[0].nodes[0].sample.uid == "child"


@pytest.fixture(scope="module")
def chromium() -> str:
    found = subprocess.run([CHROMIUM, "find"], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(found.stdout.strip())
    return found.stdout.strip()


@pytest.mark.parametrize(
    ("apt", "reason"),
    [
        (None, "no apt-get here; put chromium on PATH"),
        (
            "echo 'E: Failed to fetch, no route' >&2; exit 100",
            "apt-get could not install it: E: Failed to fetch, no route",
        ),
    ],
)
def test_where_no_chromium_can_be_had_installing_says_why_and_fails_nothing(
    apt: str | None, reason: str, tmp_path: Path
) -> None:
    for tool in ("bash", "ls", "tail", "mktemp", "timeout", "grep", "head", "rm"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    for tool, script in {"id": "echo 0", "apt-get": apt}.items():  # as root
        if script is not None:
            (tmp_path / tool).write_text(f"#!{tmp_path / 'bash'}\n{script}\n")
            (tmp_path / tool).chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([tmp_path / "bash", CHROMIUM, "install"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == f"chromium: none, so the test that opens a report in it is skipped: {reason}"


def browse(chromium: str, profile: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--no-first-run", f"--user-data-dir={profile}", "--enable-logging=stderr", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)


def test_a_browser_runs_no_script_of_a_hostile_run_and_complains_of_nothing(chromium: str, tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path, text=ATTACK).path)
    done = browse(chromium, tmp_path / "profile", page, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title and title[1] == "made-up – marsrl run"
    assert not Page(done.stdout).tags & {"script", "img"}
    assert "CONSOLE" not in done.stderr, done.stderr
    # the check itself: the same browser does run and report a script where the page lets it
    bait = tmp_path / "bait.html"
    attack = ATTACK.encode("utf-8", "replace").decode()
    bait.write_text(f"<title>x</title><script>console.error('seen')</script>{attack}")
    bitten = browse(chromium, tmp_path / "profile_bait", bait, "--dump-dom")
    assert "CONSOLE" in bitten.stderr and "PWNED" in bitten.stdout.split("</head>")[0]
