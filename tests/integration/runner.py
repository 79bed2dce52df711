"""Starts runs as a user does, settings as small as can be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from small_run import ARITHMETIC, MAIN, SMALL, TEAM

LIMIT_S = 1200  # only a run that hangs takes so long


@dataclass(frozen=True)
class Runner:
    """Starts runs in one folder with one cache of warm starts."""

    folder: Path
    cache: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "MARSRL_CACHE": str(self.cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def command(self, name: str, *words: str, ranks: int = 0) -> list[str]:
        """ranks: of torchrun; 0: a process by itself, without it."""
        launcher = [sys.executable, *(("-m", "torch.distributed.run", "--nproc-per-node", str(ranks)) if ranks else ())]
        return [*launcher, str(MAIN), *self.words(name, *words)]

    def words(self, name: str, *words: str) -> list[str]:
        """Words for trainer/main.py."""
        has_preset = any(word.startswith("preset=") for word in words)
        default = () if has_preset else (*ARITHMETIC, TEAM)
        return [f"run.dir={self.folder}", f"run.name={name}", *default, *SMALL, *words]

    def start(self, name: str, *words: str, ranks: int = 0) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(name, *words, ranks=ranks),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
            start_new_session=True,
        )

    def run(self, name: str, *words: str, ranks: int = 0) -> Path:
        """A run to its end; its directory."""
        process = self.start(name, *words, ranks=ranks)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == 0, output[-6000:]
        assert "uthentication" not in output, output[-6000:]  # Ray's words about its token are not for this user
        return self.folder / name
