"""`python -m marsrl.commands.cli`, for when the `marsrl` command is not on the PATH."""

import sys

from marsrl.commands.cli import main

sys.exit(main())
