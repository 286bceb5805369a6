"""What the command lines of all three programs have in common."""

from __future__ import annotations

import argparse
from functools import partial

HELP_COLUMNS = 100

help_format = partial(argparse.HelpFormatter, width=HELP_COLUMNS)
"""For `formatter_class`. Without a width argparse asks shutil for the terminal's, and that imports
bz2 and lzma."""
