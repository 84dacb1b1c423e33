"""Answers as text while they come: whole characters, nothing after a stop string, the same as all at once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.serving.text import Text


def _bytes() -> Text:
    """A tokenizer whose tokens are bytes: every character beyond ASCII is cut."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Text(tokenizer, ())


TEXT = _bytes()
words = st.text(st.sampled_from("ab é日🙂\n"), max_size=12)


@example(" aa", ["a", " aa"])
@given(words, st.lists(st.text(st.sampled_from("ab é日"), min_size=1, max_size=3), max_size=2))
def test_pieces_make_the_whole_text_up_to_the_first_stop_string(whole: str, stops: list[str]) -> None:
    stream = TEXT.stream(stops)
    given_out = ""
    for token in TEXT.encode(whole):
        piece = stream.add(token)
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        given_out += piece
        # Whatever is out stays: no stop string begins in it.
        assert not any(stop in given_out for stop in stops)
        assert whole.startswith(given_out)
        if stream.stopped:
            assert stream.add(TEXT.encode("a")[0]) == ""
            break
    given_out += stream.end()
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    assert given_out == (whole[: min(ends)[1]] if ends else whole)
    assert stream.stopped == bool(ends)


@given(words)
def test_without_stop_strings_every_character_comes_with_its_last_byte(whole: str) -> None:
    stream, tokens = TEXT.stream(), TEXT.encode(whole)
    seen = "".join(stream.add(token) for token in tokens)
    assert seen == whole and stream.end() == ""


def test_half_a_character_is_never_given_out() -> None:
    stream = TEXT.stream()
    first, *_ = TEXT.encode("日")
    assert stream.add(TEXT.encode("a")[0]) == "a"
    assert stream.add(first) == "" and stream.end() == ""


def test_bytes_that_make_no_character_do_not_hold_the_rest_back() -> None:
    stream, wrong = TEXT.stream(), TEXT.encode("日")[1]
    seen = [stream.add(token) for token in [wrong] * 5 + TEXT.encode("ab")]
    assert "".join(seen).endswith("ab")


def test_stop_tokens_and_a_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Text.open(tmp_path)
    TEXT.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text.open(tmp_path).stop_tokens == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert Text.open(tmp_path).stop_tokens == (3, 4)
    assert Text.open(tmp_path).decode(Text.open(tmp_path).encode("日本")) == "日本"


def test_others_run_while_megabytes_become_tokens() -> None:
    text = _bytes()
    working = threading.Thread(target=text.encode, args=("some words and é " * 60_000,))
    turns = 0
    working.start()
    while working.is_alive():
        time.sleep(1e-4)
        turns += 1
    # Who held Python's lock all the time would leave a turn at the beginning and one at the end.
    assert turns > 10
