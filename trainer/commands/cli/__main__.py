"""python -m marsrl.trainer.commands.cli, where the command `marsrl` is not on the path."""

import sys

from marsrl.trainer.commands.cli import main

sys.exit(main())
