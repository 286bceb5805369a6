"""A `gcloud` in a folder of its own, as far as hbone asks one: it prints what a test has put there, and notes
how it was started. The real one takes a login at Google's."""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = """\
#!/bin/sh
# A terminal to ask somebody on, or an input to read, would be a fault.
tty_free=yes
if (: </dev/tty) 2>/dev/null || read -r _; then tty_free=no; fi
echo "$* prompts=$CLOUDSDK_CORE_DISABLE_PROMPTS alone=$tty_free" >>"$0.asked"
[ -f "$0.hang" ] && sleep 60
[ -f "$0.fail" ] && { echo "ERROR: no login, secret eyJ" >&2; exit 1; }
case "$2" in
    print-identity-token) cat "$0.identity" ;;
    print-access-token) cat "$0.access" ;;
    *) exit 2 ;;
esac
"""


class GcloudCommand:
    """`folder/bin/gcloud`, and its configuration in `folder/config`."""

    def __init__(self, folder: Path, *, account: str = "me@example.com", project: str = "proj") -> None:
        self._program = folder / "bin" / "gcloud"
        self._program.parent.mkdir(parents=True)
        self._program.write_text(SCRIPT)
        self._program.chmod(0o755)
        self.config = folder / "config"
        self.configure(account=account, project=project)

    def configure(self, **core: str) -> None:
        """What the active configuration says."""
        (self.config / "configurations").mkdir(parents=True, exist_ok=True)
        (self.config / "active_config").write_text("work")
        lines = "".join(f"{name} = {value}\n" for name, value in core.items())
        (self.config / "configurations" / "config_work").write_text(f"[core]\n{lines}")

    @property
    def program(self) -> str:
        """Its path."""
        return str(self._program)

    @property
    def environ(self) -> dict[str, str]:
        """What a command needs to find it, and nothing else of the kind."""
        return {
            "PATH": f"{self._program.parent}:{os.environ['PATH']}",
            "CLOUDSDK_CONFIG": str(self.config),
        }

    def prints(self, *, identity: str = "", access: str = "") -> None:
        """The tokens that it has."""
        Path(f"{self._program}.identity").write_text(f"{identity}\n")
        Path(f"{self._program}.access").write_text(f"{access}\n")

    def does(self, what: str) -> None:
        """`hang` or `fail`."""
        Path(f"{self._program}.{what}").touch()

    @property
    def asked(self) -> list[str]:
        """Each of its starts."""
        noted = Path(f"{self._program}.asked")
        return noted.read_text().splitlines() if noted.exists() else []
