"""Keys of objects as variables: what can be none."""

from __future__ import annotations

import pytest

from agent.config.mount_settings import EnvFrom, ObjectName
from agent.mounts.cluster_objects import ClusterObjects, Values
from agent.mounts.env_from import MAX_VARIABLE_BYTES, variables
from shared.credentials.kubernetes.kubernetes_access import Access
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.errors import ConfigError

APP = ObjectName("configmap", "app")


class Objects(ClusterObjects):
    """Has one object, whatever is asked for."""

    def __init__(self, **texts: bytes) -> None:
        super().__init__(Access("https://127.0.0.1:1", GivenToken("x"), "demo"))
        self._texts = texts

    async def read(self, name: ObjectName) -> Values:
        return Values(self._texts)


async def test_a_prefix_stands_before_each_name() -> None:
    found = await variables([EnvFrom(APP, "APP_", False)], Objects(a=b"1", b=b"2"))
    assert found == {"APP_a": "1", "APP_b": "2"}


@pytest.mark.parametrize(
    ("value", "why"), [(b"a\0b", "NUL byte"), (b"x" * MAX_VARIABLE_BYTES, "too long for a variable")]
)
async def test_what_can_be_no_variable_is_named_without_its_value(value: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        await variables([EnvFrom(APP, "", False)], Objects(key=value))
    assert str(caught.value).startswith("configmap/app of namespace demo: 'key': ")
    assert len(str(caught.value)) < 200
