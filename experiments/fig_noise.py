"""As `python -m kvbench +experiment=fig_noise`; copy this file to change something."""

import sys

from kvbench.app import main

if __name__ == "__main__":
    sys.exit(main(["+experiment=fig_noise", *sys.argv[1:]]))
