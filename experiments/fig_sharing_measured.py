"""As `python -m kvbench +experiment=fig_sharing_measured`; copy this file to change something."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main(["+experiment=fig_sharing_measured", *sys.argv[1:]]))
