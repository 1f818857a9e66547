"""Command line `python -m trainer COMMAND`: plans, checks and inspects trainings; see `tools/command_line`."""

import sys

from trainer.tools.command_line.commands import main
from trainer.tools.command_line.printed_errors import print_errors_with

if __name__ == "__main__":
    sys.excepthook = print_errors_with(sys.excepthook)
    sys.exit(main())
