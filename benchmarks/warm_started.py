"""Prints the directory of the warm-started policy of these settings (the first one), made where it is not in the cache.

python benchmarks/warm_started.py preset=cpu_default run.seed=1
"""

from __future__ import annotations

import sys

from namespace import map_marsrl


def main() -> int:
    map_marsrl()
    from marsrl.trainer.config.read import read_config
    from marsrl.trainer.report.console import RunConsole
    from marsrl.trainer.schools.warm_start import warm_starts

    config, _ = read_config(None, sys.argv[1:])
    print(next(iter(warm_starts(config, RunConsole()).values())).model_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
