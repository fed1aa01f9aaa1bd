"""`python -m areal_like.cli`: the `areal-like` command where it is not on the path."""

import sys

from areal_like.cli import main

sys.exit(main())
