"""As `python -m kvbench +experiment=memory_map`; copy this file to change something."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main(["+experiment=memory_map", *sys.argv[1:]]))
