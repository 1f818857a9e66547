"""Command line `python -m trainer COMMAND`: plans, checks and inspects trainings; see `tools/command_line`."""

import sys

from trainer.tools.command_line.commands import main

if __name__ == "__main__":
    sys.exit(main())
