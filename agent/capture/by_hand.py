"""`krun capture print|apply|remove`: the rules in a person's hand. Each may be done again and again."""

from __future__ import annotations

from agent.capture.iptables import Iptables, printed, quoted
from agent.config.pilot_settings import find_program
from agent.config.settings import Settings
from shared.errors import UnavailableError


async def act(word: str, settings: Settings, search_path: str | None) -> str:
    """Does it, and returns what is to be printed. Raises UnavailableError."""
    iptables = Iptables(search_path)
    pilot_agent = find_program(settings.pilot.program, search_path)
    own = iptables.own_rules(settings.capture)
    if word == "print":
        if pilot_agent is None:
            return printed(own)
        command = quoted(iptables.istio_command(pilot_agent, settings.capture))
        return f"{command}\n\n# or, where that cannot be:\n{printed(own)}"
    if lacking := iptables.lacking():
        raise UnavailableError(f"krun capture {word}: {lacking}")
    if word == "remove":
        count = await iptables.remove()
        return f"removed {count} chains\n" if count else "there were none\n"
    by = await iptables.apply(pilot_agent, settings.capture)
    chains = ", ".join(await iptables.found())
    return f"applied by {by}: {chains}\n" if chains else "nothing is captured\n"
