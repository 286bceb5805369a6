"""Which of krun's environment variables the app gets.

Owned here: the rule. Not owned: reading the settings that change it (`settings.py`), and PORT, which the app
gets in any case (`launcher.py`).

1. What begins with HBONE_ is krun's own and stays with krun, but for what tells the app where something for
   it is (`FOR_THE_APP`).
2. KUBECONFIG stays with krun where krun uses it: it leads to a credential that makes tokens, and the app has
   the tokens themselves in files.
3. What HBONE_HIDE_FROM_APP names stays with krun, too.
4. What HBONE_PASS_TO_APP names the app gets all the same.

All else is the app's: what the platform says of itself (K_SERVICE, PROJECT_ID, KUBERNETES_SERVICE_HOST), and
the secrets that the platform mounts as variables for the app.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from agent.config.settings import Settings

OWN_PREFIX = "HBONE_"

FOR_THE_APP = frozenset({"HBONE_CERTS", "HBONE_STS_LISTEN"})
"""Where its certificate is, and where it can exchange its token."""


def app_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Of `environ`, krun's own, what the app gets."""

    def is_hidden(name: str) -> bool:
        if _names(settings.passed_to_app, name):
            return False
        if name == "KUBECONFIG" and settings.kubernetes is not None:
            return True
        own = name.startswith(OWN_PREFIX) and name not in FOR_THE_APP
        return own or _names(settings.hidden_from_app, name)

    return {name: value for name, value in environ.items() if not is_hidden(name)}


def _names(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
