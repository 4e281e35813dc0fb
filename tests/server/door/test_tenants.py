"""Keys, namespaces and rates of tenants."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.errors import ConfigError, InvalidRequest, RateLimited
from stemma.prefix.keys import Namespace
from stemma.server.door.keyfile import KeyFile, Tenant, TenantEntry, add_key, hash_of
from stemma.server.door.namespace import tenant_namespace
from stemma.server.door.rates import RateLimits
from stemma.types import Tier

SECRET = b"s" * 32
SAME = hash_of("k")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_new_key_is_known_and_the_file_holds_only_its_hash(tmp_path: Path):
    path = tmp_path / "keys.toml"
    first, second, other = add_key(path, "ada"), add_key(path, "ada"), add_key(path, "bob")
    keys = KeyFile(path)
    for key, name in ((first, "ada"), (second, "ada"), (other, "bob")):
        tenant = keys.tenant_of(key)
        assert tenant is not None
        assert tenant.name == name
    assert keys.tenant_of("sk-stemma-wrong") is None
    assert keys.tenant_of("") is None
    assert keys.tenant_of("\udcff") is None
    assert first not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_adding_a_key_keeps_limits_and_the_secret(tmp_path: Path):
    path = tmp_path / "keys.toml"
    add_key(path, "ada")
    secret = KeyFile(path).secret
    path.write_text(path.read_text() + 'tokens_per_minute = 5\ncache_bytes = { disk = "2MB", device = 7 }\n')
    add_key(path, "ada")
    keys = KeyFile(path)
    [ada] = keys.tenants
    assert len(ada.entry.keys) == 2
    assert ada.entry.tokens_per_minute == 5
    assert ada.entry.cache_bytes == {Tier.DISK: 2 * 10**6, Tier.DEVICE: 7}
    assert keys.secret == secret


def test_a_file_that_breaks_later_leaves_the_keys_as_they_were(tmp_path: Path):
    path = tmp_path / "keys.toml"
    key = add_key(path, "ada")
    keys = KeyFile(path)
    path.write_text("tenants = 3")
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.tenant_of(key) is not None
    path.write_text(f'server_secret = "{"x" * 32}"')
    keys.reload()
    assert keys.tenant_of(key) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        'server_secret = "short"',
        f'server_secret = "{"x" * 32}"\n[tenants.a]\nkeys = ["plain"]',
        f'server_secret = "{"x" * 32}"\n[tenants.a]\nwhat = 1',
        f'server_secret = "{"x" * 32}"\n[tenants.a]\nmax_concurrent = 0',
        f'server_secret = "{"x" * 32}"\n[tenants."a b"]\nkeys = []',
        f'server_secret = "{"x" * 32}"\ntenants.a.keys = ["{SAME}"]\ntenants.b.keys = ["{SAME}"]',
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path, text: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyFile(path)


def test_names_of_tenants_cant_break_out_of_the_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="no name"):
        add_key(tmp_path / "keys.toml", 'a"]\n[tenants.b')


def test_the_command_makes_and_lists_keys(tmp_path: Path):
    path = str(tmp_path / "keys.toml")
    made = CliRunner().invoke(make_app(), ["keys", "new", path, "--tenant", "ada"])
    assert made.output.startswith("sk-stemma-")
    listed = CliRunner().invoke(make_app(), ["keys", "list", path])
    assert "ada" in listed.output


@given(
    a=st.tuples(st.text(max_size=20), st.text(max_size=20)),
    b=st.tuples(st.text(max_size=20), st.text(max_size=20)),
)
def test_only_the_same_tenant_with_the_same_salt_shares_a_namespace(a, b):
    spaces = [tenant_namespace(SECRET, tenant, Namespace(salt)) for tenant, salt in (a, b)]
    assert (spaces[0] == spaces[1]) == (a == b)


def test_another_servers_secret_gives_other_namespaces():
    asked = Namespace()
    assert tenant_namespace(SECRET, "ada", asked) != tenant_namespace(b"t" * 32, "ada", asked)


def tenant(**limits: int) -> Tenant:
    return Tenant("ada", TenantEntry(**limits))  # type: ignore[arg-type]


def admit(rates: RateLimits, one: Tenant, num_prompt_tokens: int, num_sequences: int = 1) -> None:
    """Count a request in, as the ledger does."""
    rates.widen(one, 0, num_sequences)
    rates.charge(one, num_prompt_tokens, 0)


def test_requests_a_minute():
    clock = Clock()
    rates, ada = RateLimits(clock), tenant(requests_per_minute=60)
    for _ in range(60):
        admit(rates, ada, 1)
    with pytest.raises(RateLimited) as caught:
        admit(rates, ada, 1)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.now += 1.0
    admit(rates, ada, 1)
    with pytest.raises(RateLimited):
        admit(rates, ada, 1)


def test_output_is_charged_when_it_is_there():
    clock = Clock()
    rates, ada = RateLimits(clock), tenant(tokens_per_minute=600)
    admit(rates, ada, 100)
    rates.ended(ada, 1100)
    with pytest.raises(RateLimited) as caught:
        admit(rates, ada, 10)
    assert caught.value.retry_after_s == pytest.approx(61.0)


def test_a_prompt_larger_than_a_minutes_tokens_waits_for_a_full_bucket_and_then_runs():
    clock = Clock()
    rates, ada = RateLimits(clock), tenant(tokens_per_minute=60)
    admit(rates, ada, 600)
    with pytest.raises(RateLimited) as caught:
        admit(rates, ada, 600)
    clock.now += caught.value.retry_after_s
    admit(rates, ada, 600)


def test_requests_at_once():
    rates, ada = RateLimits(Clock()), tenant(max_concurrent=2)
    admit(rates, ada, 1)
    admit(rates, ada, 1)
    with pytest.raises(RateLimited):
        admit(rates, ada, 1)
    rates.ended(ada, 5)
    admit(rates, ada, 1)
    assert rates.num_running(ada) == 2


def test_a_refused_request_counts_nothing():
    rates, ada = RateLimits(Clock()), tenant(requests_per_minute=5, max_concurrent=1)
    admit(rates, ada, 1)
    for _ in range(20):
        with pytest.raises(RateLimited):
            admit(rates, ada, 1)
    rates.ended(ada, 0)
    admit(rates, ada, 1)


def test_changed_limits_count_at_once_and_running_requests_stay_counted():
    rates = RateLimits(Clock())
    admit(rates, tenant(max_concurrent=1), 1)
    admit(rates, tenant(max_concurrent=2), 1)
    with pytest.raises(RateLimited):
        admit(rates, tenant(max_concurrent=2), 1)


def test_tenants_dont_count_for_each_other():
    rates = RateLimits(Clock())
    admit(rates, tenant(max_concurrent=1), 1)
    admit(rates, Tenant("bob", TenantEntry(max_concurrent=1)), 1)


def test_a_file_without_permission_is_a_clear_error(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root reads any file")
    path = tmp_path / "keys.toml"
    add_key(path, "ada")
    path.chmod(0)
    with pytest.raises(ConfigError):
        KeyFile(path)


def test_several_prompts_count_one_by_one_and_more_than_may_ever_run_are_refused():
    limits = RateLimits(Clock())
    ada = tenant(max_concurrent=3)
    admit(limits, ada, 1, num_sequences=2)
    with pytest.raises(RateLimited):
        admit(limits, ada, 1, num_sequences=2)
    with pytest.raises(InvalidRequest):
        admit(limits, ada, 1, num_sequences=4)
    limits.ended(ada, 0, num_sequences=2)
    assert limits.num_running(ada) == 0


def test_a_changed_file_is_read_again_once_a_second_and_a_broken_one_is_not_used(tmp_path: Path):
    path, clock = tmp_path / "keys.toml", Clock()
    first = add_key(path, "ada")
    keys = KeyFile(path, clock)
    second = add_key(path, "bob")
    keys.refresh()
    assert keys.tenant_of(second) is None
    clock.now = 1.0
    keys.refresh()
    assert keys.tenant_of(second) is not None
    path.write_text("[[[")
    clock.now = 2.0
    keys.refresh()
    assert keys.tenant_of(first) is not None
