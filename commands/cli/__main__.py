"""python -m marsrl.commands.cli, where the command `marsrl` is not on the path."""

import sys

from marsrl.commands.cli import main

sys.exit(main())
