"""Builds the package as pyproject.toml says, with manual pages and completions made from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build

PAGES = "build/pages"

FILES = {
    "share/man/man1": "{}.1",
    "share/bash-completion/completions": "{}",
    "share/zsh/site-functions": "_{}",
    "share/fish/vendor_completions.d": "{}.fish",
}
"""As `shared.command_pages` writes them, and as they are installed below the environment's folder."""


class BuildPages(Command):
    """Writes the manual pages and completions."""

    user_options: ClassVar = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        # By -m in the checkout, whose modules need nothing that is not Python's own but shtab.
        subprocess.run(
            [sys.executable, "-m", "shared.command_pages", PAGES], cwd=Path(__file__).parent, check=True
        )


class Build(build):
    """As setuptools builds, and the pages."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_pages", None)]


setup(
    cmdclass={"build": Build, "build_pages": BuildPages},
    data_files=[
        (folder, [f"{PAGES}/{folder}/{name.format(command)}" for command in ("hgate", "krun", "hbone")])
        for folder, name in FILES.items()
    ],
)
