"""`python -m lkv`: the command line."""

import sys

from lkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
