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


def _with_special() -> Text:
    text = _bytes()
    text.tokenizer.add_special_tokens(["<e>", "<u>"])
    return Text(text.tokenizer, ())


SPECIAL = _with_special()
pieces = st.lists(st.sampled_from(["a", "b", "<e>", "<u>", "日"]), max_size=8)


@example(["a", "<e>", "b"], ["ab"])
@example(["a", "<e>", "b"], ["a<e>"])
@example(["a", "b", "<e>"], ["<e>", "b<e>a"])
@given(pieces, st.lists(st.lists(st.sampled_from(["a", "b", "<e>", "<u>"]), min_size=1, max_size=3).map("".join)))
def test_stop_strings_see_special_tokens_and_what_is_shown(parts: list[str], stops: list[str]) -> None:
    stream = SPECIAL.stream(stops)
    given_out = "".join(stream.add(token) for part in parts for token in SPECIAL.encode(part)) + stream.end()
    expected, stopped = "".join(part for part in parts if part[0] != "<"), False
    for made in range(1, len(parts) + 1):
        letters = [(letter, part[0] != "<") for part in parts[:made] for letter in part]
        whole = "".join(letter for letter, _ in letters)
        shown = [place for place, (_, seen) in enumerate(letters) if seen]
        visible = "".join(whole[place] for place in shown)
        found = [(whole.find(word) + len(word), whole.find(word)) for word in stops if word in whole]
        found += [
            (shown[visible.find(word) + len(word) - 1] + 1, shown[visible.find(word)])
            for word in stops
            if word in visible
        ]
        if found:
            expected, stopped = "".join(whole[place] for place in shown if place < min(found)[1]), True
            break
    assert (given_out, stream.stopped) == (expected, stopped) and stream.given == len(expected)


def test_the_token_that_ends_an_answer_may_complete_a_stop_string() -> None:
    letters, end = SPECIAL.encode("ab"), SPECIAL.encode("<e>")[0]
    for stop, expected in (("<e>", "ab"), ("b<e>", "a"), ("<e>u", "ab")):
        stream = SPECIAL.stream([stop])
        shown = "".join(stream.add(token) for token in letters)
        assert shown + stream.add(end, shown=False) + stream.end() == expected
        assert stream.stopped == (stop != "<e>u")
    stream = SPECIAL.stream(["b"])  # a stop token that is a letter
    assert stream.add(letters[0]) + stream.add(letters[1], shown=False) == "a" and stream.stopped


@pytest.mark.parametrize(("least", "expected"), [(0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (6, "ababab")])
def test_no_stop_string_begins_within_the_least_tokens(least: int, expected: str) -> None:
    stream = TEXT.stream(["ab"], least=least)
    assert "".join(stream.add(token) for token in TEXT.encode("ababab")) + stream.end() == expected


@given(st.lists(st.sampled_from(["a", "é", "日", "🙂", "<e>"]), max_size=8))
def test_every_token_begins_where_its_character_does(parts: list[str]) -> None:
    stream, places, expected, at = SPECIAL.stream(["zz"]), [], [], 0
    for part in parts:
        for token in SPECIAL.encode(part):
            places.append(stream.place)
            expected.append(at)
            stream.add(token)
        at += part != "<e>"
    assert places == expected


def test_a_prompt_is_given_back_with_the_place_of_each_token() -> None:
    text = "é<e>a🙂"
    tokens = SPECIAL.encode(text)
    places = [0, 0, 1, 4, 5, 5, 5, 5]
    assert SPECIAL.echo(tokens, text) == SPECIAL.echo(tokens) == (text, places)
    half = tokens[:1]
    assert SPECIAL.echo(half) == ("\N{REPLACEMENT CHARACTER}", [0])
    pieces = _sentencepiece()
    pieces.tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 5)])
    assert pieces.echo(pieces.encode("a b"), "a b") == ("a b", [0, 0, 1])


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    for text, whole in ((SPECIAL, "日"), (_fallback(), "日")):
        found = [text.spelled_in_bytes(token) for token in text.encode(whole)]
        assert [spelled for spelled, _ in found] == ["\N{REPLACEMENT CHARACTER}"] * 3
        assert b"".join(known for _, known in found) == whole.encode()
    assert SPECIAL.spelled_in_bytes(SPECIAL.encode("<e>")[0]) == ("<e>", b"<e>")
    pieces = _sentencepiece()
    assert pieces.spelled_in_bytes(pieces.encode("a")[0]) == (" a", b" a")


def test_half_a_character_is_never_given_out() -> None:
    stream = TEXT.stream()
    first, *_ = TEXT.encode("日")
    assert stream.add(TEXT.encode("a")[0]) == "a"
    assert stream.add(first) == "" and stream.end() == ""


def _fallback() -> Text:
    """A tokenizer that spells what it does not know in bytes, as SentencePiece's do."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "<unk>": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    return Text(tokenizer, ())


@pytest.mark.parametrize("text", [TEXT, _fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("whole", ["\ufffd", "a\ufffd", "a\ufffd\ufffd", "\ufffda"])
def test_a_replacement_character_that_the_text_has_is_given_out(text: Text, whole: str) -> None:
    stream = text.stream()
    seen = "".join(stream.add(token) for token in text.encode(whole))
    assert (seen, stream.end()) == (whole, "")


@pytest.mark.parametrize("text", [TEXT, _fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("count", [1, 2])
def test_half_a_character_after_a_replacement_character_is_left_out(text: Text, count: int) -> None:
    stream = text.stream()
    tokens = [*text.encode("\ufffd"), *text.encode("日")[:count]]
    assert "".join([*(stream.add(token) for token in tokens), stream.end()]) == "\ufffd"


@pytest.mark.parametrize("text", [TEXT, _fallback()], ids=["byte-level", "byte-fallback"])
def test_an_answer_that_ends_a_character_of_its_prompt_has_what_follows(text: Text) -> None:
    first, *rest = text.encode("🙂")
    stream = text.stream((), [*text.encode("a"), first])
    assert "".join([*(stream.add(token) for token in [*rest, *text.encode("aa")]), stream.end()]) == "aa"


def test_added_tokens_are_text_and_special_ones_nothing() -> None:
    text = _bytes()
    text.tokenizer.add_tokens(["é\ufffd"])
    text.tokenizer.add_special_tokens(["<é>"])
    text = Text(text.tokenizer, ())
    half, added, special = text.encode("日")[0], text.encode("é\ufffd")[0], text.encode("<é>")[0]
    sequences = [half], [half, added], [half, special], [added]
    assert [text.bytes.half(tokens)[1] for tokens in sequences] == [1, 0, 1, 0]


def test_bytes_that_make_no_character_do_not_hold_the_rest_back() -> None:
    stream, wrong = TEXT.stream(), TEXT.encode("日")[1]
    seen = [stream.add(token) for token in [wrong] * 5 + TEXT.encode("ab")]
    assert "".join(seen).endswith("ab")


@given(st.binary(max_size=12), words)
def test_what_is_no_character_costs_no_other_one(noise: bytes, whole: str) -> None:
    """The text is that of all tokens at once, but for half a character at its end."""
    alphabet = TEXT.encode("".join(map(chr, range(128)))), TEXT.encode("日🙂é\u0fff\U00090000")
    known = sorted({token for tokens in alphabet for token in tokens})
    tokens = [known[byte % len(known)] for byte in noise] + TEXT.encode(whole)
    stream = TEXT.stream()
    seen = "".join([*(stream.add(token) for token in tokens), stream.end()])
    expected = TEXT.decode(tokens)
    assert seen.rstrip("\N{REPLACEMENT CHARACTER}") == expected.rstrip("\N{REPLACEMENT CHARACTER}")
    assert expected.startswith(seen)


def _sentencepiece() -> Text:
    """A tokenizer in the form of Llama 2's: a blank begins every text, and is dropped where a text begins."""
    model = tokenizers.models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4, "<s>": 5}, [("▁", "a"), ("▁", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return Text(tokenizer, ())


def test_an_answer_that_continues_a_text_keeps_the_blank_between_them() -> None:
    text = _sentencepiece()
    prompt, answer = text.encode("a b a"), text.encode("b a")
    for before, expected in ((prompt, " b a"), ((), "b a"), ([5], "b a")):
        stream = text.stream((), before)
        assert "".join([*(stream.add(token) for token in answer), stream.end()]) == expected
    assert [text.spelled(token) for token in answer] == [" b", " a"]
    half = TEXT.encode("日")
    stream = TEXT.stream((), half[:2])
    assert "".join([stream.add(half[2]), stream.end(), TEXT.stream((), half[:1]).end()]) == ""


def test_special_tokens_that_a_prompt_spells_are_tokens() -> None:
    text = _sentencepiece()
    assert text.encode("<s>a")[0] == 5


def test_a_prompt_that_is_no_text_is_said() -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        TEXT.encode("a\udcff")


def test_stop_tokens_and_a_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Text.open(tmp_path)
    TEXT.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text.open(tmp_path).stop_tokens == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert Text.open(tmp_path).stop_tokens == (3, 4, 7)
    for name, value, ends in (
        ("tokenizer_config.json", {"eos_token": {"content": "b"}}, (3, 4, 7, TEXT.encode("b")[0])),
        ("special_tokens_map.json", {"eos_token": "c"}, (3, 4, 7, TEXT.encode("b")[0], TEXT.encode("c")[0])),
        ("tokenizer_config.json", {"eos_token": "unheard of"}, (3, 4, 7, TEXT.encode("c")[0])),
        ("generation_config.json", {"eos_token_id": None}, (7, TEXT.encode("c")[0])),
        ("config.json", {"eos_token_id": True}, (TEXT.encode("c")[0],)),
        ("special_tokens_map.json", [], ()),
    ):
        (tmp_path / name).write_text(json.dumps(value))
        assert Text.open(tmp_path).stop_tokens == ends, name
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
