"""The site of docs/ builds without a warning: every page has a place in the menu, every link and anchor its target."""

import subprocess
import sys
from pathlib import Path

from documents import ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")} | {"config"}
    assert "rollout.segments" in (tmp_path / "site" / "config.html").read_text("utf-8")
    shown = (tmp_path / "site" / "quickstart.html").read_text("utf-8")
    assert "marsrl config" in shown and 'src="http' not in shown  # nothing is loaded from elsewhere
