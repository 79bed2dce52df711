"""python -m marsrl.trainer.cli, where the command `marsrl` is not on the path."""

import sys

from marsrl.trainer.cli import main

sys.exit(main())
