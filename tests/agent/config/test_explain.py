from __future__ import annotations

from agent.config.explain import Explained, explained, table
from agent.config.layers import Layers
from agent.config.settings import ENVIRONMENT


def told(environ: dict[str, str], flags: dict[str, str] | None = None) -> dict[str, Explained]:
    return {row.variable: row for row in explained(Layers.of(environ, flags))}


def test_each_setting_is_there_with_its_default() -> None:
    rows = told({})
    assert set(rows) == set(ENVIRONMENT) - {name for name in ENVIRONMENT if "*" in name}
    assert {row.origin for row in rows.values()} == {"default"}
    assert rows["HBONE_INBOUND"].value == "auto"


def test_a_setting_says_where_it_comes_from() -> None:
    rows = told(
        {"HBONE_LOG_LEVEL": "error", "HBONE_APP": " 127.0.0.1:1 ", "TRUST_DOMAIN": ""},
        {"HBONE_LOG_LEVEL": "info"},
    )
    assert (rows["HBONE_LOG_LEVEL"].value, rows["HBONE_LOG_LEVEL"].origin) == ("info", "flag")
    assert (rows["HBONE_APP"].value, rows["HBONE_APP"].origin) == ("127.0.0.1:1", "environment")
    assert rows["TRUST_DOMAIN"].origin == "default", "empty counts as not set"


def test_variables_of_a_pattern_are_named_one_by_one() -> None:
    rows = told({"PORT_DB": "10.0.0.1:5432", "PORT_METRICS": "9090", "CAROOT_ISTIOD": "-----BEGIN\nX" * 30})
    assert rows["PORT_DB"].value == "10.0.0.1:5432"
    assert "PORT_METRICS" not in rows, "the app's own"
    assert rows["CAROOT_ISTIOD"].value.endswith("...")
    assert "\n" not in rows["CAROOT_ISTIOD"].value


def test_the_table_is_by_group() -> None:
    text = table(explained(Layers.of({})))
    assert text.splitlines()[0] == "krun"
    assert "\n\nReverse connections\n" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_references_are_named_without_their_text() -> None:
    rows = told(
        {"DB": "sm://proj/hunter2", "KEY": "berglas://bucket/k?destination=tempfile", "BAD": "sm://p"}
    )
    assert (rows["DB"].group, rows["DB"].value) == ("The app's variables", "reference to Secret Manager")
    assert rows["KEY"].value == "reference to Cloud Storage, into a file"
    assert rows["BAD"].value.startswith("malformed reference: it has to be sm://PROJECT/NAME")
    assert "hunter2" not in table(list(rows.values()))
    assert "DB" not in told({"DB": "sm://proj/hunter2", "HBONE_REFERENCES": "0"}), "left to the app"
