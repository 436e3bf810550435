"""`python -m perfledger`."""

import sys

from perfledger.cli import main

if __name__ == "__main__":
    sys.exit(main())
