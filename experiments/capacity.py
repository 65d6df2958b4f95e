"""As `python -m kvbench +experiment=capacity`; copy this file to change something."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main(["+experiment=capacity", *sys.argv[1:]]))
