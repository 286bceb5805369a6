"""Builds the package as pyproject.toml says, with manual pages and completions made from the code.

With HBONE_COMPILE=1 the modules in COMPILED are compiled by mypyc, which takes a C compiler, Python's headers
and minutes. The same source runs either way; the figures of both are in docs/decisions/0054.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from setuptools import Command, setup
from setuptools.command.build import build

if TYPE_CHECKING:
    from setuptools import Extension

ROOT = Path(__file__).parent

COMPILED = [
    "agent/egress/gateway_upstream.py",
    "agent/tunnels/app_proxy.py",
    "agent/tunnels/request_bounds.py",
    "agent/tunnels/requests.py",
    "agent/tunnels/reverse.py",
    "agent/tunnels/tunnel_port.py",
    "gateway/hbone/hbone_tunnel.py",
    "gateway/ports/admission.py",
    "gateway/ports/hello.py",
    "gateway/ports/member_connection.py",
    "gateway/reverse/workload_connection.py",
    "gateway/reverse/workload_upstream.py",
    "gateway/sni/tunnel.py",
    "gateway/sni/upstream.py",
    "hbone/cloudrun/front_end.py",
    "hbone/stdio_tunnel.py",
    "shared/http2/*.py",
    "shared/net/http2/*.py",
    "shared/net/legs/*.py",
    "shared/net/pool/*.py",
    "shared/net/relay/*.py",
    "shared/ops/access_log.py",
    "shared/tasks.py",
    "shared/tls/client_hello.py",
    "shared/tunnel/deadlines.py",
    "shared/tunnel/opening.py",
    "shared/tunnel/pooled_upstream.py",
    "shared/tunnel/tunnel_request.py",
    "shared/tunnel/tunnel_server.py",
]
"""What a tunnel's bytes, its opening and its end go through, and whoever derives from a class of those: one
that is not compiled cannot. tests/test_compiled.py holds the rules for a module that is listed here."""

NOT_COMPILED = [
    "shared/http2/grpc_message.py",
    "shared/http2/session_limits.py",
    "shared/net/http2/answers.py",
    "shared/net/pool/pool_limits.py",
]
"""Of those: nothing that a tunnel runs."""

MYPYC = "mypy>=2.4,<2.5"
"""Newer ones compile differently: what is shipped has been tested."""

DOCUMENTS = ["docs/troubleshoot.md"]
"""What a running hgate shows: the page of its admin port links to it."""

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
        subprocess.run([sys.executable, "-m", "shared.command_pages", PAGES], cwd=ROOT, check=True)


class Build(build):
    """As setuptools builds, and the pages."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_pages", None)]


def compiled_files() -> list[str]:
    """The sources of COMPILED, as paths below ROOT."""
    found = (str(path.relative_to(ROOT)) for pattern in COMPILED for path in ROOT.glob(pattern))
    return sorted(name for name in found if name not in NOT_COMPILED and not name.endswith("__init__.py"))


def extensions() -> list[Extension]:
    """The compiled modules, and hbone__mypyc, which has the code of all of them. mypy looks at them first,
    and at what they import as far as that is there."""
    from mypyc.build import mypycify

    # No settings of pyproject.toml: they are for the types of all that is here, and want all that it imports.
    # What is not there has no types: the builds of pip have none of what we depend on.
    options = ["--config-file=", "--ignore-missing-imports", "--disable-error-code=valid-type"]
    return mypycify(
        [*options, *compiled_files()],
        opt_level="3",
        debug_level="0",
        multi_file=True,
        group_name="hbone",
    )


compiles = os.environ.get("HBONE_COMPILE") == "1"
asked = bool({"egg_info", "dist_info"} & set(sys.argv))
"""Only metadata is asked for: pip learns from it what a build needs, and mypy may not be there yet."""

setup(
    setup_requires=[MYPYC] if compiles and asked else [],
    ext_modules=extensions() if compiles and not asked else [],
    cmdclass={"build": Build, "build_pages": BuildPages},
    data_files=[
        ("share/doc/hbone", DOCUMENTS),
        *(
            (folder, [f"{PAGES}/{folder}/{name.format(command)}" for command in ("hgate", "krun", "hbone")])
            for folder, name in FILES.items()
        ),
    ],
)
