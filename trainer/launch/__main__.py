"""`python -m trainer.launch`; see `command.py`."""

import sys

from trainer.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
