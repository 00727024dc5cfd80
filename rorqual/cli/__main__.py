"""`python -m rorqual.cli`: the command, where its script is not on the path."""

import sys

from . import main

sys.exit(main())
