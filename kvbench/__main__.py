"""``python -m kvbench``."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main())
