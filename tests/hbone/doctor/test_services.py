"""`hbone doctor SERVICE`: found in the cluster, with a token of gcloud's."""

from __future__ import annotations

import json

from shared.doctor.failures import Failure
from shared.errors import EXIT_OK
from tests.hbone.commands import running
from tests.hbone.test_destination import HOST, World, a_token
from tests.hbone.test_destination import world as world
from tests.support.http2_peer import PeerStream

ABOUT = b'{"krun": "9", "targets": ["22"]}'


async def play_krun(world: World, *, refused: int = 0) -> list[PeerStream]:
    """Answers as krun does, after so many 401; the requests."""
    asked = []
    for count in range(refused + 2):
        stream = await world.service.request()
        asked.append(stream)
        if count < refused:
            stream.respond(401, end=True)
        else:
            stream.respond(200, [(b"content-type", b"application/json")])
            await stream.send(ABOUT)
            stream.end()
    return asked


async def test_a_service_by_its_name(world: World) -> None:
    world.gcloud.prints(identity=(token := a_token()))
    asked = world.arguments("hello.demo", "--json")
    async with running("doctor", *asked, environ=world.environ) as command:
        streams = await play_krun(world)
        command.end()
        ended = await command.ended()
    told = json.loads(ended.stdout)
    assert (ended.code, told["failure"]) == (EXIT_OK, None), told
    details = {hop["name"]: hop["detail"] for hop in told["hops"]}
    assert details["destination"].startswith(f"https://{HOST}, by ")
    assert details["krun"] == "krun 9, targets 22"
    assert {stream[b"authorization"].decode() for stream in streams} == {f"Bearer {token}"}
    assert token not in ended.stdout.decode() + ended.stderr


async def test_a_kept_token_that_is_refused_is_replaced_as_for_a_tunnel(world: World) -> None:
    world.gcloud.prints(identity=a_token(n=1))
    await world.tunnel()
    world.gcloud.prints(identity=(new := a_token(n=2)))
    async with running("doctor", *world.arguments("hello.demo"), environ=world.environ) as command:
        *_, last = await play_krun(world, refused=1)
        ended = await command.ended()
    assert ended.code == EXIT_OK, ended.stdout.decode()
    assert last[b"authorization"] == f"Bearer {new}".encode()


async def test_a_service_that_nobody_knows(world: World) -> None:
    async with running("doctor", *world.arguments("nobody.demo", "--json"), environ=world.environ) as command:
        ended = await command.ended()
    assert ended.code == Failure.NO_DESTINATION.hop.exit_code
    assert json.loads(ended.stdout)["failure"]["name"] == "NO_DESTINATION"
    assert "nobody" in json.loads(ended.stdout)["failure"]["detail"]
