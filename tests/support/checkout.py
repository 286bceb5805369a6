"""The checkout that the tests are in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def copy_to(folder: Path) -> None:
    """Copies the files that git knows, or would if they were added: a checkout may have leftovers of other
    builds. Raises subprocess.CalledProcessError where git fails."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # else it has been removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
