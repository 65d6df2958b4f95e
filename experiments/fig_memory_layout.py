"""The same as ``python -m kvbench +experiment=fig_memory_layout``; copy it to change something. Overrides may follow its name."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main(["+experiment=fig_memory_layout", *sys.argv[1:]]))
