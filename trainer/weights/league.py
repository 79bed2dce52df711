"""Past versions of a policy's adapter, kept in the run's directory and loaded into the engines as opponents for evaluations.

    Run.publish     -> League.keep      copies the published PEFT directory to run/league/main@40, with a manifest
    Driver.evaluate -> League.load      loads each opponent into a slot of the engines, and verifies its checksums

Which versions are opponents depends on the current version alone (LeagueConfig.opponents), and a directory stays as long as the
current version or a checkpoint needs it. So a run that resumes from any of its checkpoints plays the same opponents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from marsrl.rollout.adapter import read_tensors
from marsrl.rollout.engines.protocol import AdapterUpdate
from marsrl.rollout.weights.files import PrivateFolder
from marsrl.trainer.config.sections import LeagueConfig
from marsrl.trainer.runs.directory import RunDirectory, sync_tree
from marsrl.trainer.runs.manifest import damage, write_manifest
from marsrl.trainer.weights.sync import AdapterSync


class League:
    """Kept past versions of one policy's adapter, and the engines' slots that hold some of them. On rank 0 only.

    league = League(LeagueConfig(every=20), run, sync)
    league.keep("main", 40)
    league.load(50)                       # {0: "main@slot0", 20: "main@slot1", 40: "main@slot2"}
    """

    def __init__(
        self, config: LeagueConfig, run: RunDirectory, sync: AdapterSync, directory: str | Path | None = None
    ) -> None:
        """Open the league of a run. sync: publisher of the adapter. directory: sync.directory, visible to the engines' hosts."""
        self.config, self._run, self._sync = config, run, sync
        self._files = PrivateFolder(directory)
        self._held: dict[str, int] = {}  # version that each used slot holds

    def forget_after(self, version: int) -> None:
        """Remove later versions, which the resumed run will make again, and partial directories. version -1: remove all."""
        for path in self._run.league.glob(f"{self.config.policy}@*"):
            number = path.name.rpartition("@")[2]
            if not number.isdecimal() or int(number) > version:
                shutil.rmtree(path)

    def keep(self, policy: str, version: int) -> None:
        """Keep the version that was just published if it will be an opponent; remove versions that are no longer needed."""
        folder = self._folder(version)
        if policy != self.config.policy or version not in self.config.opponents(version + 1) or folder.exists():
            return
        part = folder.with_name(f"{folder.name}.part")
        shutil.copytree(self._sync.published, part)
        write_manifest(part, {})
        sync_tree(part)
        part.rename(folder)
        needed = {self._folder(kept) for current in (version, *self._saved()) for kept in self._needed(current)}
        for path in self._run.league.glob(f"{policy}@*"):
            if path not in needed:
                shutil.rmtree(path)

    def load(self, version: int) -> dict[int, str]:
        """Load this version's opponents that no slot holds yet; return {opponent's version: its slot}.

        Raises RuntimeError if a kept file is damaged, or an engine's checksums differ from the kept adapter's.
        """
        opponents = [kept for kept in self.config.opponents(version) if self._folder(kept).exists()]
        for kept in opponents:
            if kept in self._held.values():
                continue
            slot = next(name for name in self.config.slots if self._held.get(name) not in opponents)
            self._load(kept, slot)
        return {kept: slot for slot, kept in self._held.items() if kept in opponents}

    def close(self) -> None:
        self._files.close()

    def _load(self, version: int, slot: str) -> None:
        folder = self._folder(version)
        if lines := damage(folder):
            raise RuntimeError(
                f"league: {'; '.join(lines)}; restore the file, or remove {folder} to go on without this opponent"
            )
        copy = self._files.path / folder.name  # Engines on other hosts, and replacements of lost ones, read the copy.
        shutil.copytree(folder, copy)
        self._sync.load_past(AdapterUpdate(slot, str(copy), version), read_tensors(folder))
        if slot in self._held:
            shutil.rmtree(self._files.path / self._folder(self._held[slot]).name)
        self._held[slot] = version

    def _folder(self, version: int) -> Path:
        return self._run.league / f"{self.config.policy}@{version}"

    def _needed(self, version: int) -> Sequence[int]:
        """Return the opponents of this version, and of the next one."""
        return [*self.config.opponents(version), *self.config.opponents(version + 1)]

    def _saved(self) -> list[int]:
        """Return the policy's versions in the run's checkpoints, and in one that is being written."""
        saved = []
        for path in self._run.checkpoints.glob("step_*/meta.json"):
            with suppress(ValueError, KeyError):  # A damaged checkpoint is reported when the run resumes from it.
                saved.append(int(json.loads(path.read_bytes())["versions"][self.config.policy]))
        return saved
