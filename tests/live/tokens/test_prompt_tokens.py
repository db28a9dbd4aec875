"""Exact tokens of prompts: where they are counted, beside the loop, and what is done without them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.config.model import ModelConfig
from gorgo.core.messages.kv_events import BlocksStored, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import TOKEN_BYTES, chain_hashes, chain_root, token_bytes
from gorgo.core.prompt.fingerprint import ExactPrompt, Fingerprinter, simulated_tokens
from gorgo.errors import InvalidValueError
from gorgo.live import prompt_tokens
from gorgo.live.encoded_prompt import PAGE_BYTES, EncodedPrompt
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import BodyFields, read_fields, read_large_body
from gorgo.live.prompt_tokens import MAX_WAITING, QUICK_CHARS, RETRY_S, STEP_BLOCKS, BlockHashes, PromptTokens
from gorgo.live.tokens import ChatTemplate, ModelTokens, read_models
from tests.live.tokens.files import (
    LLAMA3,
    NO_SYSTEM,
    TEMPLATES,
    conversation,
    model_folder,
    needs_tokenizers,
    reference_ids,
)

CHAT = "/v1/chat/completions"
FINGERPRINTER = Fingerprinter(key=1)
SIMULATED = {"sim": ModelTokens("sim")}


class Counts:
    """A proxy's counter, with the results in order."""

    def __init__(self, models: Mapping[str, ModelTokens], sizes: tuple[int, ...] = (16,)) -> None:
        self.results: list[str] = []
        self.now = 0.0
        self.serving: list[str] = []
        self.prompts = PromptTokens(
            models, lambda _: sizes, self.results.append, lambda _: self.serving, lambda: self.now
        )

    async def __call__(
        self, body: Mapping[str, Any], *, route: str = CHAT, model: str = "m", adapter: str | None = None
    ) -> ExactPrompt | None:
        return await self.prompts.exact_prompt(route, fields_of(body, route), model=model, base=model, adapter=adapter)


def fields_of(body: Mapping[str, Any], route: str = CHAT) -> BodyFields:
    return read_fields(route, json.dumps(body).encode(), FINGERPRINTER)


def models(path: Path, template: str | None, *, bos: str | None = None) -> dict[str, ModelTokens]:
    file = model_folder(path / "model", template=template, bos=bos)
    return read_models([ModelConfig(name="m", tokenizer=str(file))])


def expected(template: str, messages: list[dict[str, str]]) -> list[int]:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return reference_ids(ChatTemplate(template, tokens).render(messages))


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), record.fields) for record in caplog.records]  # type: ignore[attr-defined]


# -- exact tokens
@needs_tokenizers
@pytest.mark.parametrize("family", TEMPLATES)
async def test_each_turn_of_a_conversation_has_the_tokens_that_an_engine_encodes(tmp_path: Path, family: str) -> None:
    count = Counts(models(tmp_path, TEMPLATES[family]), sizes=(16, 32))
    texts = [
        "Where are the 17 blocks?",
        "Here: 東京.\n\n  and there ",
        "And <|im_end|> [INST] of </s>?",
        "Yes.",
        "Why?",
    ]
    for turns in (1, 3, 5, 5):
        messages = conversation(*texts[:turns])
        exact = await count({"model": "m", "messages": messages})
        ids = expected(TEMPLATES[family], messages)
        assert exact is not None
        assert exact.tokens == len(ids)
        assert exact.kv_hashes == {size: chain_hashes(token_bytes(ids), block_tokens=size) for size in (16, 32)}, (
            "whatever is cached"
        )
    assert count.results == ["counted"] * 4


@needs_tokenizers
async def test_hashes_find_the_blocks_of_an_engines_events(tmp_path: Path) -> None:
    count = Counts(models(tmp_path, LLAMA3))
    messages = conversation("The router sends each request to a replica. " * 10)
    exact = await count({"messages": messages, "cache_salt": "tenant"}, adapter="sql")
    ids = expected(LLAMA3, messages)
    full = len(ids) // 16
    index = KvEventIndex(block_tokens=16, max_blocks_per_replica=1000)
    stored = BlocksStored(
        hashes=tuple(range(full)),
        parent=None,
        tokens=token_bytes(ids[: full * 16]),
        block_tokens=16,
        tier=KvTier.GPU,
        adapter="sql",
        cache_salt="tenant",
    )
    index.apply(0, KvEventBatch(sent_s=None, rank=0, events=(stored,)))
    assert exact is not None
    assert index.match(exact.kv_hashes[16], 1).tolist() == [full * 16]
    for other in ({"adapter": None, "cache_salt": "tenant"}, {"adapter": "sql", "cache_salt": "other"}):
        unlike = await count({"messages": messages, "cache_salt": other["cache_salt"]}, adapter=other["adapter"])
        assert unlike is not None
        assert index.match(unlike.kv_hashes[16], 1).tolist() == [0]


@needs_tokenizers
@pytest.mark.parametrize(("route", "field"), [("/v1/completions", "prompt"), ("/generate", "text")])
async def test_a_plain_prompt_begins_as_the_engine_begins_it(tmp_path: Path, route: str, field: str) -> None:
    count = Counts(models(tmp_path, None, bos="<s>"))
    text = "The router <|im_start|> sends"
    exact = await count({field: text}, route=route)
    ids = reference_ids(text, bos="<s>", add_special_tokens=True)
    assert exact is not None
    assert (exact.tokens, ids[0]) == (len(ids), reference_ids("<s>")[0])


@pytest.mark.parametrize("size", [1, 4, 15, 16, 400])
async def test_simulated_tokens_are_four_bytes_each(size: int) -> None:
    count = Counts(SIMULATED, sizes=(2,))
    text = "x" * size
    exact = await count({"messages": [{"role": "user", "content": text}]}, model="sim")
    assert exact is not None
    assert exact.tokens == -(-size // 4)
    assert exact.kv_hashes[2] == chain_hashes(text.encode().ljust(exact.tokens * 4, b"\0"), block_tokens=2)


async def test_a_simulated_engine_knows_an_adapter_by_the_first_token_and_no_salt() -> None:
    count = Counts(SIMULATED, sizes=(2,))
    body = {"messages": conversation("a" * 16), "cache_salt": "tenant"}
    plain = await count(body, model="sim")
    other = await count(body, model="sim", adapter="sql")
    assert plain is not None
    assert other is not None
    assert plain.kv_hashes[2] == chain_hashes(b"a" * 16, block_tokens=2)
    assert other.kv_hashes[2] == chain_hashes(simulated_tokens(b"a" * 16, "sql"), block_tokens=2)


async def test_token_ids_of_a_client_need_no_tokenizer() -> None:
    count = Counts({})
    ids = list(range(100))
    exact = await count({"prompt": ids}, route="/v1/completions", model="any")
    assert exact is not None
    assert exact.kv_hashes == {16: chain_hashes(token_bytes(ids), block_tokens=16)}
    assert await count({"prompt": [ids, ids]}, route="/v1/completions", model="any") is None
    assert await count({"prompt": "text"}, route="/v1/completions", model="any") is None


async def test_token_ids_that_another_process_has_read_are_exact_up_to_their_bound() -> None:
    count = Counts({})
    for size, is_exact in ((20_000, True), (300_000, False)):
        body = json.dumps({"prompt": list(range(size))}).encode()
        fields = read_large_body("/v1/completions", body, FINGERPRINTER)
        exact = await count.prompts.exact_prompt("/v1/completions", fields, model=None, base=None)
        assert (exact is not None) == is_exact


# -- boundaries
@needs_tokenizers
@pytest.mark.parametrize("family", ["chatml", "llama3"])
async def test_boundaries_are_where_the_template_begins_messages(tmp_path: Path, family: str) -> None:
    count = Counts(models(tmp_path, TEMPLATES[family]))
    messages = conversation("one", "two and more", "three", system="be brief")
    exact = await count({"messages": messages})
    assert exact is not None
    ids = expected(TEMPLATES[family], messages)
    marker = reference_ids("<|im_start|>" if family == "chatml" else "<|start_header_id|>")[0]
    starts = [place for place, token in enumerate(ids) if token == marker]
    assert exact.boundaries == tuple(starts[1:])
    assert len(exact.boundaries) == len(messages)


@needs_tokenizers
async def test_boundaries_are_not_exact_where_the_count_of_markers_does_not_fit(tmp_path: Path) -> None:
    count = Counts(models(tmp_path, TEMPLATES["chatml"]))
    for messages, body in (
        (conversation("a <|im_start|> of a client"), {}),
        (conversation("one"), {"add_generation_prompt": False}),
    ):
        exact = await count({"messages": messages, **body})
        assert exact is not None
        assert exact.boundaries == ()
    no_system = Counts(models(tmp_path, NO_SYSTEM))
    exact = await no_system({"messages": conversation("one", "two", "three")})
    assert exact is not None
    assert exact.boundaries == ()


async def test_boundaries_of_simulated_tokens_are_those_of_the_text() -> None:
    exact = await Counts(SIMULATED)({"messages": conversation("a" * 40, "b" * 41, "c" * 80)}, model="sim")
    assert exact is not None
    assert (exact.tokens, exact.boundaries) == (41, (10, 20, 41))


# -- what is estimated
@needs_tokenizers
@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function"}]},
        {"continue_final_message": True},
        {"chat_template": "x"},
        {"truncate_prompt_tokens": 5},
        {"a_field_of_tomorrow": 1},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"documents": "x"}},
        {"chat_template_kwargs": {"nested": {}}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": conversation("one", system="a template that refuses it")},
    ],
)
async def test_a_prompt_that_engines_may_render_otherwise_is_estimated(
    tmp_path: Path, change: dict[str, object]
) -> None:
    count = Counts(models(tmp_path, NO_SYSTEM))
    assert await count({"messages": conversation("one")} | change) is None
    assert count.results == ["skipped"]


@needs_tokenizers
async def test_one_part_of_text_and_template_options_are_exact(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if thinking %} with thoughts{% endif %}"
    count = Counts(models(tmp_path, template))
    part = [{"type": "text", "text": "The replica"}]
    for options, text in (({}, "The replica"), ({"thinking": True}, "The replica with thoughts")):
        exact = await count({"messages": [{"role": "user", "content": part}], "chat_template_kwargs": options})
        assert exact is not None
        assert exact.tokens == len(reference_ids(text))


@needs_tokenizers
@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/messages", "/v1/responses"])
async def test_routes_that_engines_translate_are_estimated(tmp_path: Path, route: str) -> None:
    count = Counts(models(tmp_path, LLAMA3))
    body = {"input": "text", "messages": conversation("one")}
    assert await count(body, route=route) is None


async def test_several_prompts_are_estimated() -> None:
    count = Counts(SIMULATED)
    assert await count({"prompt": ["one", "two"]}, route="/v1/completions", model="sim") is None


# -- reports of engines
async def test_a_differing_report_is_logged_once_and_ends_the_counting(caplog: pytest.LogCaptureFixture) -> None:
    count = Counts({"sim": ModelTokens("sim"), "other": ModelTokens("other")})
    body = {"messages": conversation("a" * 40)}
    exact = await count(body, model="sim")
    assert exact is not None
    count.prompts.compare_report(exact, 10, "r0")
    assert await count(body, model="sim") == exact
    for _ in range(5):
        count.prompts.compare_report(exact, 11, "r0")
    assert await count(body, model="sim") is None
    assert await count(body, model="other") is not None
    assert count.results == ["counted", "counted", "different", "counted"]
    count.prompts.models = read_models([ModelConfig(name="sim", tokenizer="simulated")])
    assert await count(body, model="sim") == exact, "a reload ends it"
    [(event, fields)] = logged(caplog)
    assert event == "prompt_tokens_differ"
    assert (fields["model"], fields["counted"], fields["reported"]) == ("sim", 10, 11)


async def test_one_false_report_of_one_replica_ends_no_counting(caplog: pytest.LogCaptureFixture) -> None:
    """Two replicas: one that lies for ever ends nothing while the other one agrees or has not reported."""
    count = Counts({"sim": ModelTokens("sim")})
    count.serving = ["liar", "honest"]
    body = {"messages": conversation("a" * 40)}
    exact = await count(body, model="sim")
    assert exact is not None
    for _ in range(20):
        count.prompts.compare_report(exact, 6666, "liar")
    assert await count(body, model="sim") == exact
    for reported in (11, 11, exact.tokens, 11, 11):
        count.prompts.compare_report(exact, reported, "honest")
    assert await count(body, model="sim") == exact
    [(event, fields)] = logged(caplog)
    assert (event, fields["replica"]) == ("prompt_tokens_differ", "liar")
    count.prompts.compare_report(exact, 11, "honest")
    assert await count(body, model="sim") is None, "now no replica counts like this"


async def test_counting_is_tried_again_and_one_difference_of_each_replica_ends_that() -> None:
    count = Counts({"sim": ModelTokens("sim")})
    count.serving = ["a", "b"]
    body = {"messages": conversation("a" * 40)}
    exact = await count(body, model="sim")
    assert exact is not None
    for replica in ("a", "b"):
        for _ in range(3):
            count.prompts.compare_report(exact, 11, replica)
    count.now = RETRY_S - 1
    assert await count(body, model="sim") is None
    count.now = RETRY_S
    assert await count(body, model="sim") == exact
    for replica in ("a", "b"):
        assert await count(body, model="sim") == exact
        count.prompts.compare_report(exact, 11, replica)
    assert await count(body, model="sim") is None
    count.now = 2 * RETRY_S
    assert await count(body, model="sim") == exact
    count.prompts.compare_report(exact, exact.tokens, "a")
    for _ in range(3):
        count.prompts.compare_report(exact, 11, "b")
    assert await count(body, model="sim") == exact, "one replica agrees again"


@needs_tokenizers
async def test_a_failing_template_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = Counts(models(tmp_path, NO_SYSTEM))
    for _ in range(3):
        assert await count({"messages": conversation("one", system="no")}) is None
    assert [event for event, _ in logged(caplog)] == ["chat_template_failed"]


@needs_tokenizers
async def test_a_text_that_the_tokenizer_cannot_encode_is_estimated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    file = tmp_path / "tokenizer.json"
    file.write_text(Tokenizer(WordLevel({"known": 0, "a": 1}, unk_token="missing")).to_str())
    count = Counts(read_models([ModelConfig(name="m", tokenizer=str(file))]))
    for text, is_exact in (("known", True), ("secret", False), ("secret", False)):
        exact = await count({"prompt": text}, route="/v1/completions")
        assert (exact is not None) == is_exact
    [(event, fields)] = logged(caplog)
    assert event == "tokenizer_failed"
    assert "secret" not in str(fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "messages", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(["messages", "chat_template_kwargs", "add_generation_prompt", "cache_salt", "n", "tools"])


@needs_tokenizers
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=4), st.lists(st.tuples(VALUES, VALUES), max_size=3))
async def test_any_body_that_is_routed_has_exact_tokens_or_none(
    fields: dict[str, Any], messages: list[tuple[object, object]]
) -> None:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **fields}
    try:
        read = fields_of(body)
    except HttpError:
        return
    for known in (_any_model(), SIMULATED):
        count = Counts(known)
        exact = await count.prompts.exact_prompt(CHAT, read, model="m", base=next(iter(known)))
        assert count.results == ["skipped" if exact is None else "counted"]


@cache
def _any_model() -> dict[str, ModelTokens]:
    with TemporaryDirectory() as folder:
        return models(Path(folder), LLAMA3)


# -- the event loop
@needs_tokenizers
async def test_a_long_first_prompt_does_not_hold_the_loop(tmp_path: Path) -> None:
    count = Counts(models(tmp_path, LLAMA3))
    text = "".join(f" replica{number} of {os.urandom(3).hex()}" for number in range(20_000))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    exact = await count({"messages": conversation(text)})
    task.cancel()
    assert exact is not None
    assert exact.tokens > 100_000
    assert turns > 20, "other tasks ran while it was encoded and hashed"


@needs_tokenizers
async def test_the_next_turn_of_a_long_conversation_encodes_its_new_messages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = models(tmp_path, LLAMA3)
    count = Counts(known)
    texts = ["The router sends each request to a replica. " * 100] * 9
    await count({"messages": conversation(*texts)})
    encoded: list[str] = []
    files = known["m"].files
    assert files is not None
    encode = files.tokenizer.encode

    def recorded(text: str) -> bytes:
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(files.tokenizer, "encode", recorded)
    await count({"messages": conversation(*texts, "An answer.", "And a question?")})
    assert sum(map(len, encoded)) < 200
    assert any("And a question?" in text for text in encoded)


@needs_tokenizers
async def test_prompts_beyond_the_bound_on_waiting_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_tokens, "MAX_WAITING", 2)
    count = Counts(models(tmp_path, LLAMA3))
    bodies = [{"messages": conversation(f"{number} " * QUICK_CHARS)} for number in range(4)]
    found = await asyncio.gather(*map(count, bodies))
    assert [exact is not None for exact in found] == [True, True, False, False]
    assert await count(bodies[2]) is not None, "the thread is free again"
    count.prompts.close()
    assert MAX_WAITING > 2


# -- files
@needs_tokenizers
def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    file = model_folder(tmp_path / "model", template=LLAMA3)
    config = [ModelConfig(name="m", tokenizer=str(file))]
    first = read_models(config)
    second = read_models(config, first)
    assert second["m"].files is first["m"].files
    (file.parent / "chat_template.jinja").write_text(NO_SYSTEM)
    third = read_models(config, second)
    assert third["m"].files is not first["m"].files


@needs_tokenizers
def test_a_template_that_renders_no_conversation_is_refused(tmp_path: Path) -> None:
    file = model_folder(tmp_path / "model", template="{{ raise_exception('never') }}")
    with pytest.raises(InvalidValueError, match="that of 'm' fails: TemplateError"):
        read_models([ModelConfig(name="m", tokenizer=str(file))])


@needs_tokenizers
def test_a_model_without_a_tokenizer_has_no_record(tmp_path: Path) -> None:
    given = [ModelConfig(name="a"), ModelConfig(name="b", tokenizer="simulated")]
    assert read_models(given) == {"b": ModelTokens("b")}
    assert chain_root("a") != chain_root("b")


PAGE_TOKENS = PAGE_BYTES // TOKEN_BYTES


def ids(start: int, length: int) -> EncodedPrompt:
    return EncodedPrompt.of_ids(token_bytes(range(start, start + length)))


def segments(*lengths: int, origin: bytes = b"a") -> EncodedPrompt:
    """Return segments of a tokenizer, as a conversation of messages with these numbers of tokens has them."""
    parts = [token_bytes(range(length)) for length in lengths]
    return EncodedPrompt(parts, [f"{length:032}".encode() for length in lengths], origin)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2500)), min_size=1, max_size=5),
    st.sampled_from([1, 16, 48, 64, 512, 700]),
    st.integers(0, 2**64 - 1),
)
def test_hashes_of_ids_are_those_of_the_chain_whatever_is_cached(
    prompts: list[tuple[int, int]], block_tokens: int, root: int
) -> None:
    cache = BlockHashes(max_bytes=5_000)
    for start, length in prompts:
        expected = chain_hashes(token_bytes(range(start, start + length)), block_tokens=block_tokens, root=root)
        assert cache.get(ids(start, length), block_tokens=block_tokens, root=root) == expected
        cache.check()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 5, 15, 16, 17, 300]), max_size=9), min_size=1, max_size=6),
    st.sampled_from([1, 16, 48]),
)
def test_hashes_of_segments_are_those_of_the_chain_whatever_is_cached(
    conversations: list[list[int]], block_tokens: int
) -> None:
    cache = BlockHashes(max_bytes=5_000)
    for lengths in conversations:
        prompt = segments(*lengths)
        expected = chain_hashes(b"".join(prompt.parts), block_tokens=block_tokens)
        assert cache.get(prompt, block_tokens=block_tokens) == expected
        cache.check()


def test_a_longer_prompt_of_ids_hashes_only_its_new_pages() -> None:
    cache = BlockHashes()
    assert sum(cache.steps(ids(0, 48 * PAGE_TOKENS), block_tokens=16)) == 48 * PAGE_TOKENS // 16
    assert sum(cache.steps(ids(0, 49 * PAGE_TOKENS), block_tokens=16)) == PAGE_TOKENS // 16


def test_the_next_turn_of_a_conversation_hashes_only_its_new_segments() -> None:
    cache, turns = BlockHashes(), [100, 250] * 40
    assert sum(cache.steps(segments(*turns), block_tokens=16)) == sum(turns) // 16
    turns += [48, 32]
    assert sum(cache.steps(segments(*turns), block_tokens=16)) == 5
    assert sum(cache.steps(segments(*turns), block_tokens=16)) == 0


def test_a_long_segment_is_hashed_in_steps() -> None:
    steps = list(BlockHashes().steps(segments(16 * STEP_BLOCKS * 3 + 20), block_tokens=16))
    assert steps == [STEP_BLOCKS, STEP_BLOCKS, STEP_BLOCKS, 1]


@pytest.mark.parametrize(("block_tokens", "root", "origin"), [(32, 0, b"a"), (16, 1, b"a"), (16, 0, b"b")])
def test_another_block_size_root_or_tokenizer_shares_no_section(block_tokens: int, root: int, origin: bytes) -> None:
    cache = BlockHashes()
    cache.get(segments(500, 500), block_tokens=16)
    cache.get(segments(500, 500, origin=origin), block_tokens=block_tokens, root=root)
    assert len(cache) == 6
