"""The page of hgate's admin port in a real browser, while real tunnels run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gateway.ops.overview import ROWS
from tests.path.app import App, echo
from tests.path.programs import run
from tests.path.tls_client import connected, says_back
from tests.support.chromium import Browser, chromium
from tests.support.tls_client import read_to_the_end
from tests.support.world import World, find_program, running

MARKUP = "<img/src=x/onerror=alert(1)>"
"""A server name that hgate reads, and that would be an element."""

CELLS = "(row) => [...row.cells].map((cell) => cell.textContent)"
SHOWN = f"[...document.querySelectorAll('#tunnels tbody tr')].map({CELLS})"
SENT, TO_ORIGIN = 7, 9

COLOURS = {
    "text": "getComputedStyle(document.body).color",
    "link": "getComputedStyle(document.querySelector('nav a')).color",
    "faint": "getComputedStyle(document.querySelector('th')).color",
    "good": "getComputedStyle(document.querySelector('.good')).color",
    "picture": "getComputedStyle(document.querySelector('svg text')).fill",
}
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    find_program("chromium")
    folder = tmp_path_factory.mktemp("page")
    with App(echo) as app, running(folder, inbound="builtin", app=app.address) as world:
        yield world


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, world: World) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, world: World) -> Browser:
    """The page, loaded anew and shown."""
    browser.prefer("light")
    browser.faults.clear()
    browser.requested.clear()
    browser.go(f"http://{world.admin}/")
    browser.until("document.getElementById('state').textContent === 'running'")
    return browser


def refused_client(world: World) -> None:
    """Asks for a name that no route could take."""
    command = [find_program("openssl"), "s_client", "-connect", str(world.gateway), "-servername", MARKUP]
    assert run(*command).returncode != 0


def brightness(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((brightness(one), brightness(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_rows_come_change_and_go_by_themselves(page: Browser, world: World) -> None:
    page.value("window.sameDocument = true")
    page.until("document.querySelectorAll('#tunnels tbody tr').length === 0")
    with connected(world) as connection:
        page.until("document.querySelectorAll('#tunnels tbody tr').length === 1")
        (row,) = page.value(SHOWN)
        assert row[0].startswith("127.0.0.1:")
        assert "hello.demo.svc.cluster.local" in row[1]
        page.until(f"({SHOWN})[0][{TO_ORIGIN}] === '0 B/s'")
        says_back(connection, b"x" * 90)
        page.until(f"/^[1-9]/.test(({SHOWN})[0][{TO_ORIGIN}])")
        assert page.value(SHOWN)[0][SENT] != row[SENT]
        assert page.value("document.getElementById('hgate-1').textContent").startswith("1 tunnel open")
        assert page.value("document.querySelector('#origins tbody').textContent").startswith("https://hello")
        assert re.search(r"in 5\d min", page.value("document.querySelector('#tokens tbody').textContent"))
        connection.shutdown()
        assert read_to_the_end(connection) == b""
    page.until("document.querySelectorAll('#tunnels tbody tr').length === 0")
    assert page.faults == []
    assert page.value("window.sameDocument") is True, "it was not loaded again"


def test_of_many_tunnels_the_page_shows_the_first_and_says_of_how_many(page: Browser, world: World) -> None:
    with ExitStack() as block:
        connections = [block.enter_context(connected(world)) for _ in range(ROWS + 5)]
        page.until(f"document.querySelectorAll('#tunnels tbody tr').length === {ROWS}")
        count = "document.querySelector('#tunnels .count').textContent"
        page.until(f"{count} === 'the first {ROWS} of {ROWS + 5}; all are in the JSON'")
        hgate = page.value("document.getElementById('hgate-1').textContent")
        assert hgate.startswith(f"{ROWS + 5} tunnels open")
        for connection in connections:
            connection.shutdown()
            assert read_to_the_end(connection) == b""
    page.until("document.querySelectorAll('#tunnels tbody tr').length === 0")
    assert page.faults == []


def test_what_is_typed_is_looked_for(page: Browser, world: World) -> None:
    page.tab_to("INPUT")
    page.command("Input.insertText", text="no such thing")
    page.until("document.querySelectorAll('#routes tbody tr').length === 0")
    assert page.value("document.querySelector('#routes .none').hidden") is False
    page.value("document.getElementById('find').select()")
    page.command("Input.insertText", text="HELLO.demo")
    page.until("document.querySelectorAll('#routes tbody tr').length === 1")
    assert page.faults == []


def test_nothing_leaves_the_port(page: Browser, world: World) -> None:
    page.until(
        "performance.getEntriesByType('resource').filter((it) => it.name.endsWith('overview')).length >= 2"
    )
    origin = f"http://{world.admin}/"
    assert {url.removeprefix(origin) for url in page.requested} - {"data:,"} == {
        "",
        "page.css",
        "page.js",
        "overview",
    }
    assert page.faults == []
    elsewhere = f"http://{world.gateway}/"
    assert page.value(f"fetch('{elsewhere}').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in fault for fault in page.faults)
    unsafe = "try { document.body.innerHTML = '<i></i>'; 'made' } catch (error) { error.name }"
    assert page.value(unsafe) == "TypeError", "Trusted Types"


def test_a_stranger_s_name_is_text_with_cause_and_cure(page: Browser, world: World) -> None:
    refused_client(world)
    page.until("document.querySelector('.flag')")
    flag = page.value("document.querySelector('.flag').textContent")
    assert "Cause: the server name has no form that hgate knows." in flag
    assert "Cure: Correct tls.sni in the client's DestinationRule." in flag
    assert page.value("document.querySelector('.flag td').textContent") == MARKUP
    assert page.value("document.querySelectorAll('img, .flag script').length") == 0
    count = re.match(r"BAD_SNI: (\d+) time", flag)
    assert count
    refused_client(world)
    page.until(
        f"document.querySelector('.flag').textContent.startsWith('BAD_SNI: {int(count[1]) + 1} times')"
    )
    assert page.faults == []


def test_all_of_it_works_by_keyboard(page: Browser, world: World) -> None:
    refused_client(world)
    page.until("document.querySelector('.flag summary')")
    page.press("Tab")
    assert page.focused() == "A Skip to the content"
    page.press("Tab")
    assert page.focused().startswith("INPUT")
    page.press("Tab")
    assert page.focused() == "BUTTON Pause updates"
    page.press(" ")
    assert page.value("document.getElementById('pause').ariaPressed") == "true"
    page.press(" ")
    assert page.value("document.getElementById('pause').ariaPressed") == "false"
    page.tab_to("SELECT")
    page.press("ArrowDown")
    page.until("document.getElementById('goes').textContent.includes('leads to https://hello.a.run.app/')")
    assert page.value("document.getElementById('goes').textContent").endswith(
        f"({world.folder}/hgate.yaml:8)"
    )
    page.tab_to("A Read on about BAD_SNI")
    page.press("Tab")
    assert page.focused().startswith("SUMMARY")
    page.press("Enter")
    assert page.value("document.querySelector('.flag details').open") is True
    before = page.value("document.getElementById('updated').textContent")
    page.until(f"document.getElementById('updated').textContent !== '{before}'")
    assert page.value("document.querySelector('.flag details').open") is True, "an update closes nothing"
    assert page.focused().startswith("SUMMARY"), "nor does it take the focus"
    page.press("Tab")
    assert page.focused() == "DIV Cases of BAD_SNI", "a wide table is scrolled by keys"


def test_a_paused_page_asks_nothing(page: Browser) -> None:
    page.tab_to("BUTTON Pause updates")
    page.press("Enter")
    shown = page.value("document.getElementById('updated').textContent")
    page.until("performance.now() > 5000")  # two updates would have been due
    assert page.value("document.getElementById('updated').textContent") == shown
    page.press("Enter")
    page.until(f"document.getElementById('updated').textContent !== '{shown}'")


def test_the_cure_s_link_leads_to_its_section(page: Browser, world: World) -> None:
    refused_client(world)
    page.until("document.querySelector('.flag a')")
    page.tab_to("A Read on about BAD_SNI")
    page.press("Enter")
    page.until("location.pathname === '/docs/troubleshoot.md' && document.querySelector(':target')")
    assert page.value("document.querySelector(':target').textContent") == "hgate refuses a connection"
    assert page.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_day_and_in_the_dark(page: Browser, scheme: str) -> None:
    page.prefer(scheme)
    ground = page.value(GROUND)
    assert (brightness(ground) < 0.1) is (scheme == "dark")
    for name, colour in COLOURS.items():
        assert contrast(ground, page.value(colour)) >= 4.5, f"{name} (WCAG 2.2, 1.4.3)"


def test_it_says_when_hgate_does_not_answer(page: Browser) -> None:
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.command("Network.emulateNetworkConditions", offline=True, **conditions)
    page.until("document.getElementById('state').textContent.startsWith('hgate does not answer')")
    assert page.value("document.getElementById('state').className") == "bad"
    page.command("Network.emulateNetworkConditions", offline=False, **conditions)
    page.until("document.getElementById('state').textContent === 'running'")
