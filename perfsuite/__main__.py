"""``python -m perfsuite``: the command line where its script is not on the PATH."""

import sys

from perfsuite.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
