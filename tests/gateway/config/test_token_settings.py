"""`tokens:` in the gateway's file: what it sets, what it refuses, where."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.config import config
from gateway.config.config import GatewayConfig
from gateway.config.sections import file_table
from gateway.rules.routes import RouteTable, Token
from shared.credentials.kubernetes import kubernetes_names
from shared.credentials.token_sources.token_settings import TokenSettings, from_env
from shared.errors import ConfigError
from shared.tls import istio_sni
from tests.support.api_server import Asked, LocalApiServer
from tests.support.gateway_world import World, tunnel
from tests.support.google import Google
from tests.support.google_services import DATA_PLANE, WORKLOAD
from tests.support.hellos import hello

WHOLE = """\
routes: []
tokens:
  source: gke
  service_account: hgate@proj.iam.gserviceaccount.com
  credentials: key.json
  subject_token: /var/run/secrets/tokens/google
  metadata_host: 169.254.169.254:80
  metadata_timeout: 500ms
  step_timeout: 10s
  sts_audience: //iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x
  project_id: proj
  project_number: 123456789
  cluster_name: clu
  cluster_location: europe-west1
  sts_url: https://sts.example/v1/token
  iam_url: https://iam.example/
  oauth_url: http://127.0.0.1:8080/token
"""


def parse(tokens: str) -> GatewayConfig:
    return config.parse(f"routes: []\ntokens: {tokens}\n", "/etc/hgate/hgate.yaml")


def test_all_of_it() -> None:
    assert config.parse(WHOLE, "/etc/hgate/hgate.yaml").tokens == TokenSettings(
        source="gke",
        service_account="hgate@proj.iam.gserviceaccount.com",
        credentials=Path("/etc/hgate/key.json"),
        subject_token=Path("/var/run/secrets/tokens/google"),
        metadata_host="169.254.169.254:80",
        metadata_timeout_s=0.5,
        step_timeout_s=10.0,
        sts_audience="//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x",
        project_id="proj",
        project_number="123456789",
        cluster_name="clu",
        cluster_location="europe-west1",
        sts_url="https://sts.example/v1/token",
        iam_url="https://iam.example",
        oauth_url="http://127.0.0.1:8080/token",
    )
    assert all(f"  {field}: " in WHOLE for field in file_table(TokenSettings))


def test_none_of_it() -> None:
    assert config.parse("routes: []", "hgate.yaml").tokens == TokenSettings()
    assert parse("{}").tokens == TokenSettings()


def test_the_environment_goes_over_it() -> None:
    file = parse("{source: gke, project_id: of-the-file}").tokens
    assert from_env({"PROJECT_ID": "other"}, file) == TokenSettings(source="gke", project_id="other")


@pytest.mark.parametrize(
    ("tokens", "field", "reason"),
    [
        ("{sauce: gke}", "tokens.sauce", "did you mean source?"),
        ("{source: aws}", "tokens.source", "must be auto, metadata, google, gke or gcloud"),
        ("{source: }", "tokens.source", "has no value"),
        (
            "{service_account: SECRET}",
            "tokens.service_account",
            "has to be a service account's e-mail address",
        ),
        ("{step_timeout: 0}", "tokens.step_timeout", "must be between 0.1s and 60s"),
        ("{metadata_timeout: 2m}", "tokens.metadata_timeout", "must be between 0.1s and 60s"),
        ("{project_number: p1}", "tokens.project_number", "has to be a number"),
        ("{project_id: [p]}", "tokens.project_id", "must be a single value"),
        ("{sts_url: 'http://sts.example/SECRET'}", "tokens.sts_url", "has to be https"),
        (
            '{credentials: \'{"private_key": "SECRET"}\'}',
            "tokens.credentials",
            "looks like what should be in",
        ),
        (
            "{subject_token: eyJhbGciOiJub25lIn0.SECRET.x}",
            "tokens.subject_token",
            "looks like what should be",
        ),
        ("gke", "tokens", "must be a mapping of fields"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_field(tokens: str, field: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tokens)
    assert (caught.value.line, caught.value.field) == (2, field)
    assert reason in caught.value.reason
    assert "SECRET" not in str(caught.value)


# At work.

AUDIENCE = "https://hello.example"
OTHER = "other@proj.iam.gserviceaccount.com"


def exchanging(google: Google) -> dict[str, str]:
    """The environment of a pod whose Kubernetes token `google` exchanges."""
    return {
        "HBONE_TOKENS": "gke",
        "HBONE_STS_URL": f"{google.plain_url}/v1/token",
        "HBONE_IAM_URL": google.plain_url,
        "PROJECT_ID": "proj",
        "PROJECT_NUMBER": "42",
        "CLUSTER_NAME": "clu",
        "CLUSTER_LOCATION": "loc",
    }


async def test_the_gateway_exchanges_its_kubernetes_token(world: World, tmp_path: Path) -> None:
    async with Google() as google:
        google.grants |= {(WORKLOAD, DATA_PLANE), (WORKLOAD, OTHER)}
        (tmp_path / "kubernetes").write_text(google.kubernetes_token())
        environ = {
            **exchanging(google),
            "HBONE_SUBJECT_TOKEN": str(tmp_path / "kubernetes"),
        }
        token = {"audience": AUDIENCE}
        gateway = await world.start(
            tunnel(world.service.port, host="hello.**", token=token),
            tunnel(world.service.port, host="other.**", token=token | {"service_account": OTHER}),
            environ=environ,
        )
        for service, account in (("hello", DATA_PLANE), ("other", OTHER), ("other", OTHER)):
            await world.client(hello(f"outbound_.80_._.{service}.demo.svc.cluster.local"))
            stream = await world.service.request()
            sent = stream[b"authorization"].decode().removeprefix("Bearer ")
            assert google.claims(sent, AUDIENCE)["email"] == account
        assert len(google.asked("iam")) == 2, "the second token of an account is the first one"
        shown = (await gateway.get("admin", "/config")).body.decode()
        shown += (await gateway.get("metrics", "/metrics")).body.decode()
        assert google.found_in(shown + str(gateway.records.messages)) == []


async def test_the_gateway_asks_for_the_kubernetes_token_itself(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod that may, where no token is projected."""
    monkeypatch.setattr(kubernetes_names, "SERVICE_ACCOUNT_FOLDER", tmp_path)
    async with Google() as google, LocalApiServer() as cluster:
        google.grants.add((WORKLOAD, DATA_PLANE))
        own = google.kubernetes_token("https://kubernetes.default.svc")
        (tmp_path / "token").write_text(own)
        (tmp_path / "ca.crt").write_bytes(cluster.ca_pem)

        def answer(asked: Asked) -> tuple[int, bytes]:
            [audience] = asked.spec["audiences"]
            return 201, json.dumps({"status": {"token": google.kubernetes_token(audience)}}).encode()

        cluster.answer = answer
        url = urlsplit(cluster.url)
        await world.start(
            tunnel(world.service.port, token={"audience": AUDIENCE}),
            environ={
                **exchanging(google),
                "KUBERNETES_SERVICE_HOST": str(url.hostname),
                "KUBERNETES_SERVICE_PORT": str(url.port),
            },
        )
        await world.client()
        stream = await world.service.request()
        sent = stream[b"authorization"].decode().removeprefix("Bearer ")
        assert google.claims(sent, AUDIENCE)["email"] == DATA_PLANE
        [asked] = cluster.asked
        assert asked.path == "/api/v1/namespaces/demo/serviceaccounts/hgate/token"
        assert asked.headers["authorization"] == f"Bearer {own}"


async def test_the_gateway_says_why_it_has_no_token(world: World, tmp_path: Path) -> None:
    async with Google() as google:
        (tmp_path / "key.json").write_text(json.dumps(google.user_file()))
        await world.start(
            tunnel(world.service.port, token={"audience": AUDIENCE}),
            environ={"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")},
        )
        client = await world.client()
        await client.rest()
        line = await world.gateway.line()
        assert line["flags"] == "IDENTITY_ERROR"
        assert "a user's login gives one for its own client only" in line["error"]
        assert google.found_in(str(line) + str(world.gateway.records.messages)) == []


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("{audience: a, service_account: x}", "has to be a service account's e-mail address"),
        ("{audience: a, service_account: 'x@{service}'}", "has to be a service account's e-mail address"),
        ("{file: a, service_account: a@b}", "has no meaning beside file, only beside audience"),
        ("{service_account: a@b}", "routes[0].token: needs audience or file"),
    ],
)
def test_a_routes_account_that_is_none(token: str, says: str) -> None:
    route = f"routes:\n- {{host: a, tunnel: 'https://a.run.app/p', token: {token}}}"
    with pytest.raises(ConfigError) as caught:
        config.parse(route, "hgate.yaml")
    assert says in str(caught.value)


def test_what_is_told_of_a_routes_account() -> None:
    route = "{host: a, tunnel: 'https://a.run.app/p', token: {audience: a, service_account: b@c}}"
    table = RouteTable(config.parse(f"routes: [{route}]", "hgate.yaml").routes)
    assert table.match(istio_sni.parse("a")).token == Token("audience", "a", service_account="b@c")
    assert table.explain("a").splitlines()[-1] == "token      audience a, of b@c"
