"""``python -m orchestrator``: the same as ``planaria``."""

import sys

from orchestrator.cli import main

sys.exit(main())
