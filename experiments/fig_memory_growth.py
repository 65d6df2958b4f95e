"""The same as ``python -m kvbench +experiment=fig_memory_growth``; copy it to change something. Overrides may follow its name."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main(["+experiment=fig_memory_growth", *sys.argv[1:]]))
