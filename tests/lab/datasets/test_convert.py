"""Published traces of other forms: what becomes of their rows, and what is said of a file of another form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import TraceError
from gorgo.lab.datasets.published import FORMS, Conversion, Timing, convert
from gorgo.lab.traces import TraceRequest, load_trace, next_turns

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.5,110,27\n"
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a,1.2,ChatGPT,472,18,490,Conversation log\n"
    "45.5,a,1.2,ChatGPT,1087,230,1317,Conversation log\n"
    "118,,0,GPT-4,417,0,417,API log\n"
)
BURSTGPT_OF_2023 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
)
OWN = """\
time,session_id,input_tokens,output_tokens,shared_tokens
0,a,1000,50,
4,b,1000,50,
9.5,a,1600,50,960
12,a,1700,50,9999
13,,700,5,700
"""
LONG = "What is the weather like in the city of Berlin today, and what will it be tomorrow? " * 3


def chat(name: str, *texts: str) -> dict[str, Any]:
    roles = ["human", "gpt"] * len(texts)
    return {"id": name, "conversations": [{"from": r, "value": t} for r, t in zip(roles, texts, strict=False)]}


def lmsys(name: str, *texts: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"conversation_id": name, "conversation": messages, "model": "vicuna-13b", "turn": 1}


def bailian(chat_id: int, parent: int, at_s: float, tokens: int, ids: list[int]) -> str:
    fields = {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": at_s, "input_length": tokens}
    return json.dumps({**fields, "output_length": 28, "type": "text", "turn": 1, "hash_ids": ids})


def converted(tmp_path: Path, form: str, text: str, **more: Any) -> tuple[Conversion, list[TraceRequest]]:
    source, out = tmp_path / "source", tmp_path / "out.jsonl"
    source.write_text(text)
    done = convert(source, out, form=form, **more)
    return done, load_trace(out)


def test_azure_s_dates_are_times_from_the_first_and_no_block_is_shared(tmp_path: Path) -> None:
    done, (one, two) = converted(tmp_path, "azure", AZURE)
    assert done == Conversion(2, 0)
    assert (one.input_tokens, one.output_tokens, two.input_tokens, two.output_tokens) == (4808, 10, 110, 27)
    assert two.timestamp_s == pytest.approx(1.52)
    assert not set(one.hash_ids) & set(two.hash_ids)


def test_burstgpt_s_failures_are_left_out_and_its_sessions_are_sessions(tmp_path: Path) -> None:
    done, (one, two) = converted(tmp_path, "burstgpt", BURSTGPT)
    assert done == Conversion(2, 1)
    assert (one.session, two.session, two.timestamp_s) == ("a", "a", 40.5)
    assert converted(tmp_path, "burstgpt", BURSTGPT_OF_2023)[1][0].session is None


def test_a_table_of_one_s_own_says_how_much_of_a_prompt_its_session_had_before(tmp_path: Path) -> None:
    done, rows = converted(tmp_path, "csv", OWN)
    assert done == Conversion(5, 0)
    assert [(row.timestamp_s, row.session, row.block_tokens) for row in rows[:3]] == [
        (0.0, "a", 64), (4.0, "b", 64), (9.5, "a", 64),
    ]  # fmt: skip
    one, other, two, three, alone = (row.hash_ids for row in rows)
    assert two[:15] == one[:15], "960 tokens are 15 blocks"
    assert three[:25] == two[:25], "no more than the full blocks of the prompt before it"
    assert len(set(one) | set(other)) == len(one) + len(other)
    assert not set(two[15:]) & set(one)
    assert not set(alone) & {*one, *other, *two, *three}, "what has no session has nothing before it"
    dated, (first, second) = converted(
        tmp_path, "csv", "time,input_tokens,output_tokens\n2026-01-01,9,9\n2026-01-02,9,9"
    )
    assert (dated.written, first.session, second.timestamp_s) == (2, None, 86_400.0)


def test_bailian_s_turns_share_blocks_of_sixteen_tokens_and_a_session(tmp_path: Path) -> None:
    lines = [
        bailian(7, -1, 61.0, 40, [1, 2, 3]),
        bailian(8, 7, 71.0, 90, [1, 2, 4, 5, 6, 9]),
        bailian(9, -1, 72.0, 90, [1]),
    ]
    done, (one, two) = converted(tmp_path, "bailian", "\n".join(lines))
    assert done == Conversion(2, 1)
    assert (one.block_tokens, one.hash_ids[:2], two.timestamp_s) == (16, two.hash_ids[:2], 10.0)
    assert (one.session, two.session) == ("7", "7")


@pytest.mark.parametrize("form", ["sharegpt", "lmsys"])
@pytest.mark.parametrize("lines", [False, True])
def test_a_conversation_becomes_its_turns_which_share_what_was_said_before(
    form: str, lines: bool, tmp_path: Path
) -> None:
    make = chat if form == "sharegpt" else lmsys
    chats = [make("x", LONG, "Sunny.", "And then?", "Rain."), make("y", LONG, "Clouds."), make("z", "no answer")]
    text = "\n".join(map(json.dumps, chats)) if lines else json.dumps(chats)
    done, found = converted(tmp_path, form, text, timing=Timing(think_s=1e-3))
    assert done == Conversion(3, 0)
    first, second = (one for one in found if one.session == "x")
    (other,) = (one for one in found if one.session == "y")
    assert (first.turns, second.turns) == (1, 2)
    full = first.input_tokens // 16
    assert first.hash_ids[:full] == second.hash_ids[:full] == other.hash_ids[:full]
    assert first.hash_ids == other.hash_ids  # the same question, to its last block
    assert second.boundaries[0] == first.input_tokens
    assert next_turns(found)[first.index][1] == second.think_s is not None
    assert "weather" not in (tmp_path / "out.jsonl").read_text()


def test_a_conversion_repeats_by_its_seed_and_is_compressed_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "s").write_text(json.dumps([chat(f"{n}", LONG, "Sunny.", "Then?", "Rain.") for n in range(5)]))
    made = {}
    for name, seed in (("a.gz", 1), ("b.gz", 1), ("c.gz", 2)):
        convert(tmp_path / "s", tmp_path / name, form="sharegpt", timing=Timing(seed=seed))
        made[name] = gzip.decompress((tmp_path / name).read_bytes())
    assert made["a.gz"] == made["b.gz"] != made["c.gz"]


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("azure", BURSTGPT, "line 1: no column 'TIMESTAMP' among Timestamp"),
        ("azure", "", "line 1: no column 'TIMESTAMP' among nothing"),
        ("azure", AZURE.replace("4808", "many"), "line 2: TIMESTAMP '2023"),
        ("azure", AZURE.replace("2023-11-16 18:17:05.5", "yesterday"), "line 3: .*expected a time and numbers"),
        ("burstgpt", AZURE, "no column 'Timestamp'"),
        ("csv", AZURE, "line 1: no column 'time' among TIMESTAMP"),
        (
            "csv",
            OWN.replace(",960", ",most"),
            "line 4: time '9.5', .* shared_tokens 'most'; expected a time and numbers",
        ),
        ("csv", OWN.replace("9.5", "inf"), "line 4: time 'inf'"),
        ("bailian", "{}", "line 1: 'timestamp'; expected timestamp, input_length"),
        ("bailian", "[]", "line 1: expected a JSON object"),
        ("sharegpt", "[1]", "conversation 1: expected an object"),
        ("sharegpt", "[{}]", "conversation 1: no list `conversations`"),
        ("lmsys", "[{", "expected a list of conversations"),
        ("lmsys", json.dumps([lmsys("x", "no answer")]), "no row of the form lmsys"),
        ("mooncake", "", "no form 'mooncake'; there are: azure, burstgpt, csv, bailian, sharegpt, lmsys"),
    ],
)
def test_a_file_of_another_form_is_named_with_what_was_expected(
    form: str, text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=said):
        converted(tmp_path, form, text)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_converts_and_says_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(BURSTGPT)
    out = tmp_path / "b.jsonl"
    result = CliRunner().invoke(app, ["datasets", "convert", "burstgpt", str(tmp_path / "b.csv"), "--out", str(out)])
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert "1 requests failed, are empty or lack blocks" in result.stderr
    assert len(FORMS) == 6
