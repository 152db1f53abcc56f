"""``python -m perfsuite.cli`` for where the command is not on the path."""

import sys

from perfsuite.cli.main import main

sys.exit(main())
