"""What stays on the device, and for whom: alike for plain KV, windows and recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import hybrids
from tests.checkpoints import build
from tests.engine.harness import Harness, greedy, prompt

from stemma.config.settings import TierSettings
from stemma.engine.build import assemble_engine
from stemma.engine.llm import engine_settings
from stemma.engine.output.output import OutputProcessor
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.eviction.sessions import Sessions
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace, session_number
from stemma.supervision import LoggingSupervisor
from stemma.types import Retention, RetentionHint, Tier

FAMILIES = {
    "plain": ("qwen2", "800KB"),
    "windowed": ("gemma3_text", "3MB"),
    "recurrent": ("qwen3_next", "1MB"),
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, memory = FAMILIES[request.param]
    path = tmp_path_factory.mktemp(family)
    fields: dict[str, Any] = {"sliding_window": 128} if request.param == "windowed" else {}  # 8 blocks
    plain = request.param == "plain"
    path = build(family, path) if plain else hybrids.build(family, path / "model", **fields)
    return path, memory, load_model(engine_settings(path).model), Tokenizer(path)


Make = Callable[..., tuple[Harness, Clock]]


@pytest.fixture
def make(loaded: tuple[Path, str, CausalLM, Tokenizer]) -> Make:
    path, memory, model, tokenizer = loaded

    def made(*, tiers: TierSettings | None = None, **fields: Any) -> tuple[Harness, Clock]:
        chosen = {
            "kv_cache_memory": memory,
            "block_size": 16,
            "max_batch_tokens": 64,
            "eviction": "retention",
        }
        settings = engine_settings(
            path, **(chosen | {"speculation": "off", "overlap_schedule": "off"} | fields)
        )
        settings = settings.model_copy(update={"tiers": tiers or settings.tiers})
        clock = Clock()
        parts = assemble_engine(settings, model, tokenizer, LoggingSupervisor(), clock=clock)
        return Harness(parts.engine, OutputProcessor(tokenizer), parts.key_space, parts.tiers), clock

    return made


def serve(
    harness: Harness,
    tokens: np.ndarray,
    *,
    hint: RetentionHint | None = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    renews: bool = False,
    session: str = "",
) -> int:
    """Return how many tokens of a prompt were cached."""
    retention = Retention(hint or RetentionHint(), renews=renews)
    name = harness.add(tokens, greedy(2), namespace=namespace, retention=retention, session=session)
    harness.run()
    report = harness.answers[name].cache
    assert report is not None
    return report.num_cached_tokens


def longer(tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([tokens, prompt(9999, 5)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("eviction", ["retention", "hazard"])
def test_what_has_priority_stays(make: Make, eviction: str) -> None:
    harness, _ = make(eviction=eviction)
    first = prompt(1, 200)
    serve(harness, first, hint=RetentionHint(100))
    for number in range(40):
        serve(harness, prompt(10 + number, 200), hint=RetentionHint(10))
    assert serve(harness, longer(first)) >= 192


@pytest.mark.one_in(3)
def test_without_hints_the_oldest_goes(make: Make) -> None:
    harness, _ = make()
    for number in range(40):
        serve(harness, prompt(10 + number, 200))
    assert serve(harness, longer(prompt(10, 200))) == 0
    assert serve(harness, longer(prompt(49, 200))) >= 192


@pytest.mark.one_in(3)
def test_hints_can_be_renewed(make: Make) -> None:
    harness, _ = make()
    first = prompt(1, 200)
    serve(harness, first)
    serve(harness, longer(first), hint=RetentionHint(100), renews=True)
    for number in range(40):
        serve(harness, prompt(10 + number, 200), hint=RetentionHint(10))
    assert serve(harness, longer(first)) >= 192


def test_what_outlived_its_time_goes_first(make: Make) -> None:
    harness, clock = make()
    lasting, mortal = prompt(1, 200), prompt(2, 200)
    serve(harness, prompt(3, 200))
    serve(harness, lasting)
    serve(harness, mortal, hint=RetentionHint(100, ttl_s=5.0))
    clock.now += 10.0
    number = 0
    while harness.cache.match(DEFAULT_NAMESPACE, longer(mortal)) >= 192:
        serve(harness, prompt(10 + number, 200))
        number += 1
        assert number < 40
    assert serve(harness, longer(lasting)) >= 192


@pytest.mark.one_in(3)
def test_who_holds_too_much_takes_nobody_elses(make: Make) -> None:
    harness, _ = make()
    ada, bob = Namespace("a", owner="ada"), Namespace("b", owner="bob")
    harness.cache.set_quotas({"bob": harness.cache.num_blocks // 8})
    first = prompt(1, 200)
    serve(harness, first, namespace=ada)
    for number in range(40):
        serve(harness, prompt(10 + number, 260), namespace=bob)
    assert serve(harness, longer(first), namespace=ada) >= 192


def held_blocks(harness: Harness, owner: str) -> float:
    """Return for how many blocks there would be room instead of an owner's KV and checkpoints."""
    index, states = harness.cache.index, harness.cache.states
    assert index is not None
    chains = [chain for namespace, _, chain in index.walk() if namespace.owner == owner]
    held = float(len({block for chain in chains for block in chain.tolist()}))
    if states is not None:
        places = states.places
        counts = map(len, states.holdings_of(owner))
        for count, per_slab in zip(counts, (places.states_per_slab, places.pages_per_slab), strict=True):
            held += count * places.slabs.slab / per_slab if per_slab else 0
    return held


@pytest.mark.one_in(3)
def test_a_quota_counts_checkpoints_with_kv(make: Make) -> None:
    """Nobody holds more than that together, and what others hold within theirs stays."""
    harness, _ = make()
    num_blocks, random = harness.cache.num_blocks, np.random.default_rng(3)
    namespaces = {owner: Namespace(owner, owner=owner) for owner in ("ada", "bob", "eve")}
    quotas = {"ada": num_blocks // 2, "bob": num_blocks // 6, "eve": num_blocks // 12}
    harness.cache.set_quotas(quotas)
    first, fullest = prompt(1, 200), dict.fromkeys(quotas, 0.0)
    for number in range(60):
        owner = str(random.choice(["bob", "bob", "eve"]))
        tokens = prompt(10 + int(random.integers(12)), 20 + 20 * int(random.integers(12)))
        serve(harness, longer(tokens), namespace=namespaces[owner])
        if number % 10 == 0:
            assert serve(harness, longer(first), namespace=namespaces["ada"]) >= (192 if number else 0)
        for each, quota in quotas.items():
            fullest[each] = max(fullest[each], held_blocks(harness, each))
            assert held_blocks(harness, each) <= quota
        harness.cache.check()
    assert fullest["bob"] > 0.7 * quotas["bob"]


@pytest.mark.one_in(3)
def test_nothing_stands_behind_kv_that_has_left(make: Make) -> None:
    harness, _ = make()
    prompts = [prompt(number, 40 + 37 * number % 300) for number in range(60)]
    for tokens in prompts:
        serve(harness, tokens)
        harness.cache.check()
    states, index = harness.cache.states, harness.cache.index
    assert index is not None
    for tokens in prompts if states is not None else ():
        assert states is not None
        keys = harness.key_space.roots(DEFAULT_NAMESPACE).chain(tokens)
        deepest = max((number for number, key in enumerate(keys, 1) if states.has(key)), default=0)
        assert index.match(DEFAULT_NAMESPACE, tokens).num_tokens >= 16 * deepest


def restarted(make: Make, path: Path, tokens: np.ndarray, **fields: Any) -> Harness:
    """Serve a prompt, and start again with an empty device over the disk that it is on."""
    disk = {"disk_cache": path, "disk_cache_size": "40MB", "load_when": "faster"}
    tiers = TierSettings.model_validate(disk | fields)
    before, _ = make(tiers=tiers)
    serve(before, tokens)
    assert before.cache.below.drain(10.0)
    before.engine.close()
    return make(tiers=tiers)[0]


def test_a_load_that_takes_longer_than_computing_is_passed_over(make: Make, tmp_path: Path) -> None:
    """Blocks of KV load somewhat faster than they are computed; those of a checkpoint come on top."""
    tokens = prompt(1, 200)
    harness = restarted(make, tmp_path, tokens)
    assert harness.tiers is not None
    estimator = harness.tiers.estimator
    estimator.observe_prefill(1600, 1.0)  # 10 ms a block
    for count in (1, 10):
        estimator.observe_load(Tier.DISK, count, 0.0085 * count)
    name = harness.add(longer(tokens), greedy(2))
    harness.run()
    report = harness.answers[name].cache
    assert report is not None
    if harness.cache.is_plain:
        assert report.num_cached_tokens == 192
    else:
        assert report.num_cached_tokens == 0
    harness.engine.close()


def test_a_load_that_is_faster_is_taken(make: Make, tmp_path: Path) -> None:
    tokens = prompt(1, 200)
    harness = restarted(make, tmp_path, tokens)
    assert harness.tiers is not None
    harness.tiers.estimator.observe_prefill(1600, 1.0)
    for count in (1, 10):
        harness.tiers.estimator.observe_load(Tier.DISK, count, 0.003 * count)
    assert serve(harness, longer(tokens)) == 192
    harness.engine.close()


@pytest.mark.one_in(3)
def test_hints_go_down_and_come_back_with_the_bytes(make: Make, tmp_path: Path) -> None:
    """Down a host tier that writes back, over a restart, and up: the prompt still has its priority.

    So has its session's number."""
    tokens, hint = prompt(1, 200), RetentionHint(60, ttl_s=5000.0)
    fields = {"host_cache": "1MB", "host_write": "write_back", "load_when": "always"}
    disk_fields = {"disk_cache": tmp_path, "disk_cache_size": "40MB", "disk_write": "write_back"}
    below = TierSettings.model_validate(fields | disk_fields)
    before, _ = make(tiers=below)
    serve(before, tokens, hint=hint, session="mine")
    for number in range(60):
        serve(before, prompt(10 + number, 200), hint=RetentionHint(80))
        assert before.cache.below.drain(10.0)
    before.engine.close()
    harness, _ = make(tiers=below)
    keys = harness.key_space.roots(DEFAULT_NAMESPACE).chain(tokens)
    pieces = harness.cache.checkpoint_keys(keys)
    disk = next(store for store in harness.cache.below.stores if store.tier is Tier.DISK)
    there = [key for key in (*keys, *pieces) if disk.exists_many([key])[0]]
    assert len(there) >= len(keys)
    assert set(disk.notes_many(there)) == {BlockNotes(hint, session_number(DEFAULT_NAMESPACE, "mine"))}
    assert serve(harness, longer(tokens)) == 192
    for number in range(40):
        serve(harness, prompt(100 + number, 200), hint=RetentionHint(10))
    assert harness.cache.match(DEFAULT_NAMESPACE, longer(tokens)) >= 192
    harness.engine.close()


def left_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies know already what hundreds of prompts teach them: what sessions left isn't used again."""
    made = Sessions.__init__

    def taught(sessions: Sessions, *arguments: Any) -> None:
        made(sessions, *arguments)
        sessions.factor = 0.01

    monkeypatch.setattr(Sessions, "__init__", taught)


@pytest.mark.one_in(3)
def test_a_session_leaves_its_branch_after_a_restart_too(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody without a name had it loaded; what the session then leaves goes before what is older."""
    base, branch, witness = prompt(1, 100), prompt(2, 100), prompt(3, 200)
    disk = {"disk_cache": tmp_path, "disk_cache_size": "40MB", "load_when": "always"}
    tiers = TierSettings.model_validate(disk)
    before, _ = make(tiers=tiers, eviction="hazard")
    left = np.concatenate([base, branch])
    serve(before, left, session="mine")
    assert before.cache.below.drain(10.0)
    before.engine.close()
    left_goes_first(monkeypatch)
    harness, _ = make(tiers=tiers, eviction="hazard")
    serve(harness, witness)
    assert serve(harness, longer(left)) == 192
    serve(harness, np.concatenate([base, prompt(4, 60)]), session="mine")
    number = 100
    while harness.cache.match(DEFAULT_NAMESPACE, longer(left)) >= 192:
        assert harness.cache.match(DEFAULT_NAMESPACE, longer(witness)) >= 192
        serve(harness, prompt(number := number + 1, 60))
    harness.engine.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_renewed_hints_hold_below_the_device_too(make: Make, tmp_path: Path, write: str) -> None:
    """For copies that were made before, for what goes down later, and over a restart."""
    tokens, old, new = prompt(1, 200), RetentionHint(20), RetentionHint(90, ttl_s=5000.0)
    fields = {"host_cache": "1MB", "host_write": write, "load_when": "always"}
    disk_fields = {"disk_cache": tmp_path, "disk_cache_size": "40MB", "disk_write": write}
    below = TierSettings.model_validate(fields | disk_fields)
    before, _ = make(tiers=below)
    serve(before, tokens, hint=old)
    assert before.cache.below.drain(10.0)
    serve(before, longer(tokens), hint=new, renews=True)
    assert before.cache.below.drain(10.0)
    keys = before.key_space.roots(DEFAULT_NAMESPACE).chain(tokens)
    keys += before.cache.checkpoint_keys(keys)
    if write == "write_through":
        for store in before.cache.below.stores:
            assert {note.hint for note in store.notes_many(keys) if note != NO_NOTES} == {new}
    else:
        for number in range(60):
            serve(before, prompt(10 + number, 200), hint=RetentionHint(100))
            assert before.cache.below.drain(10.0)
    before.engine.close()
    harness, _ = make(tiers=below)
    disk = next(store for store in harness.cache.below.stores if store.tier is Tier.DISK)
    there = [key for key in keys if disk.exists_many([key])[0]]
    assert len(there) >= 12
    assert {note.hint for note in disk.notes_many(there)} == {new}
    assert serve(harness, longer(tokens)) == 192
    for number in range(40):
        serve(harness, prompt(100 + number, 200), hint=RetentionHint(50))
    assert harness.cache.match(DEFAULT_NAMESPACE, longer(tokens)) >= 192
    harness.engine.close()


def test_what_is_released_goes_below_the_device_too(make: Make, tmp_path: Path) -> None:
    tokens, release = prompt(1, 200), RetentionHint(0, 0.0)
    fields = {"host_cache": "1MB", "host_write": "write_through"}
    disk_fields = {"disk_cache": tmp_path, "disk_cache_size": "40MB", "disk_write": "write_through"}
    harness, clock = make(tiers=TierSettings.model_validate(fields | disk_fields))
    serve(harness, tokens, hint=RetentionHint(90))
    assert harness.cache.below.drain(10.0)
    keys = harness.key_space.roots(DEFAULT_NAMESPACE).chain(tokens)
    stores = harness.cache.below.stores
    assert all(all(store.exists_many(keys)) for store in stores)
    serve(harness, longer(tokens), hint=release, renews=True)
    assert harness.cache.below.drain(10.0)
    clock.now += 1.0
    assert not any(any(store.exists_many(keys)) for store in stores)
    harness.engine.close()


@pytest.mark.one_in(3)
def test_sessions_in_turn_keep_what_fits(make: Make) -> None:
    """32 sessions come back one after the other, each with something new behind its prompt, to memory for 50:
    all that they come back to is kept, whatever share of it is KV, states or windows."""
    probe, _ = make()
    before = probe.cache.stats().num_free_blocks
    serve(probe, prompt(0, 170))
    each = (before - probe.cache.stats().num_free_blocks) * probe.engine.runner.kv.layout.block_bytes
    probe.engine.close()
    harness, _ = make(kv_cache_memory=f"{50 * each}B")
    sessions = [prompt(100 + number, 150) for number in range(32)]
    reused = total = 0
    for turn in range(6):
        for number, tokens in enumerate(sessions):
            asked = np.concatenate([tokens, prompt(1000 * turn + number, 20)])
            cached = serve(harness, asked)
            if turn > 1:
                reused, total = reused + min(cached, 128), total + 128
    assert reused >= 0.9 * total
    harness.cache.check()
