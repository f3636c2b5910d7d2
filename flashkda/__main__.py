# SPDX-License-Identifier: Apache-2.0
"""`python -m flashkda`: the command `flashkda`."""

import sys

from flashkda.cli import main

if __name__ == "__main__":
    sys.exit(main())
