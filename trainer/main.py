"""Train a team: `torchrun trainer/main.py [--config FILE] [key.sub=value ...]`, or `python trainer/main.py` alone.

Installed, without a checkout: `torchrun -m marsrl.trainer.main ...` or `python -m marsrl.trainer.main ...`.

Without arguments it runs configs/cpu_default.yaml: MarsRL with a tiny model on this machine's CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Running this file puts trainer/ first on sys.path, so its modules would shadow those of other packages. The path is filtered,
# not popped, because spawned children run this line again.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import signal  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback.

import argparse  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402

from marsrl.trainer.config.read import read_config  # noqa: E402
from marsrl.trainer.runs.failure import RANK_0_PRINTS_S, say_last  # noqa: E402
from marsrl.trainer.runs.stop import has_ended, interrupt, let_first_rank_end  # noqa: E402
from marsrl.trainer.torchrun import is_rank_0  # noqa: E402
from marsrl.trainer.visible import log_visibly, visible  # noqa: E402

EXAMPLES = """examples:
  torchrun trainer/main.py
  torchrun trainer/main.py task=math policies.main.model=/models/Qwen3-0.6B data.train=problems.jsonl
  torchrun --nproc-per-node 3 trainer/main.py --config configs/qwen3_8b.yaml \\
    policies.main.model=/models/Qwen3-8B data.train=problems.jsonl
  python trainer/main.py --dry-run rollout.group_size=16
installed, without a checkout: python -m marsrl.trainer.main, torchrun -m marsrl.trainer.main
"""


def main(arguments: list[str] | None = None) -> int:
    """Run and return the exit code: 0 done, 1 the run failed, 2 unusable command line or config, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="trainer/main.py",
        description="Train a team of LLM agents by reinforcement learning.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", help="YAML file or preset name; other values come from the task's preset")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything; print the batch sizes, the placement, and whether run.name is new or resumed; then exit",
    )
    parser.add_argument("--full", action="store_true", help="with --dry-run: also print every resolved setting, last")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings that override the file")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    options.settings[:0] = unknown  # read_config rejects unknown options with advice.
    if options.full and not options.dry_run:
        parser.error("--full prints the settings of a dry run: add --dry-run")
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    log_visibly()
    is_first = is_rank_0()
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _end_with_launcher()
        return _run(options, is_first)
    except KeyboardInterrupt:
        if is_first:
            say_last("marsrl: interrupted before the run began")
        return 130
    finally:
        _leave_launcher_folder()


def _run(options: argparse.Namespace, is_first: bool) -> int:
    launcher = os.getppid()
    try:
        # Read the config before the imports below, which take seconds.
        config, origin = read_config(options.config, options.settings)

        from marsrl.trainer.start import prepare

        # The run's lock is held until this function returns.
        prepared = prepare(config, origin, is_dry=options.dry_run)
    except (ValueError, OSError) as error:
        from marsrl.trainer.config.explain import refusal

        if is_first:
            say_last(f"marsrl: {refusal(error)}")
        else:
            time.sleep(RANK_0_PRINTS_S)
        return 2
    checked, directory = prepared.checked, prepared.directory
    if is_first:
        settings_lines = ["settings:", checked.settings().rstrip()] if options.full else []
        print(prepared.text, *settings_lines, sep="\n", flush=True)
    if options.dry_run:
        return 0
    from marsrl.rollout.imports import imports_for_good
    from marsrl.trainer.machine import quiet_libraries

    quiet_libraries()

    with imports_for_good():
        from torch.distributed import DistNetworkError

        from marsrl.trainer.build import open_run
        from marsrl.trainer.loop import train
    from marsrl.rollout.weights.files import parent_of
    from marsrl.trainer.runs.failure import failure_message, where_to_go_on

    try:
        try:
            with open_run(checked, directory) as opened:
                train(opened)
        except DistNetworkError as error:
            if has_ended(launcher):  # The ranks' rendezvous store ended with torchrun.
                raise KeyboardInterrupt from error
            raise
    except KeyboardInterrupt:
        if is_first:
            # torchrun sends SIGTERM once any rank has ended. This rank is already ending, so it ignores the signal.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            assert directory is not None
            say_last(f"marsrl: interrupted; {where_to_go_on(directory)}")
        else:
            let_first_rank_end(launcher)
        return 130
    except Exception as error:
        print(visible(traceback.format_exc()), file=sys.stderr)
        if directory is not None:
            say_last(failure_message(error, directory, parent_of(checked.config.sync.directory)))
        else:  # Rank 0 fails with the same error, or misses this rank's heartbeat.
            let_first_rank_end(launcher)
        return 1
    return 0


def _end_with_launcher() -> None:
    """Request SIGTERM when torchrun dies, even by kill -9; otherwise the trainer would continue alone."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG of <linux/prctl.h>.
    if os.getppid() != launcher:
        raise KeyboardInterrupt  # torchrun died before prctl was called.


def _leave_launcher_folder() -> None:
    """Remove the temporary folders that torchrun made for this rank and never removes, if they are empty."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folders = list(Path(file).parents) if file else []
    made_at = [i for i, folder in enumerate(folders) if folder.name.startswith("torchelastic_")]
    with contextlib.suppress(OSError):  # A folder may hold other ranks' folders, or an error that torchrun will read.
        for folder in folders[: made_at[0] + 1] if made_at else ():
            folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
