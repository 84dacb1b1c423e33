import json

import pytest

from shardwise.data.tokenizer import (
    KNOWN_ENDS,
    encode_without,
    end_of_text,
    load,
    pieces,
    sample,
    train,
    vocabulary_size,
)
from shardwise.errors import UserError

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [f"def add_{i}(a, b):\n    return a + b + {i}\n" for i in range(200)]


def words(path, names):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    tokenizer.save(str(path))
    return path


def test_training_is_deterministic_and_encodes_any_text_without_loss():
    one, two = train(TEXTS, 300), train(TEXTS, 300)
    assert one.to_str() == two.to_str()
    assert vocabulary_size(one) == 300
    text = "def add(ü, 漢)\n\0\t🙂 never seen"
    assert one.decode(one.encode(text).ids) == text
    assert len(one.encode(TEXTS[0]).ids) < len(TEXTS[0]) / 2


def test_little_text_gives_fewer_tokens():
    assert 257 <= vocabulary_size(train(["ab"], 1000)) < 300


def test_a_vocabulary_below_the_bytes_is_refused():
    assert vocabulary_size(train(TEXTS, 257)) == 257
    with pytest.raises(UserError, match="at least 257"):
        train(TEXTS, 256)


def test_text_that_spells_the_end_of_text_token_does_not_encode_to_it(tmp_path):
    trained = train(TEXTS, 300)
    trained.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (trained, load(tmp_path)):
        ids = tokenizer.encode("a<|endoftext|>b", add_special_tokens=False).ids
        assert end_of_text(tokenizer) not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def ends_in_text():
    """Tokenizers that find their end-of-text token in text, though special tokens are not looked for, and its id."""
    models = tokenizers.models
    added = json.loads(train(TEXTS, 300).to_str())
    added["added_tokens"][0]["special"] = False
    letters = [(letter, -3.0) for letter in "ab<>/s \n"]
    unigram = tokenizers.Tokenizer(models.Unigram([("</s>", 0.0), *letters]))
    unigram.add_special_tokens(["</s>"])
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "[EOS]": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    yield tokenizers.Tokenizer.from_str(json.dumps(added)), "<|endoftext|>"
    yield unigram, "</s>"
    yield words, "[EOS]"


@pytest.mark.parametrize(("tokenizer", "end"), list(ends_in_text()), ids=["not special", "unigram", "words"])
def test_a_spelled_end_that_is_found_all_the_same_is_cut(tokenizer, end, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    number = end_of_text(tokenizer)
    text = f"a b {end} a{end}{end} b"
    assert number in tokenizer.encode(text, add_special_tokens=False).ids
    ids = encode_without(tokenizer, text, number)
    assert ids and number not in ids
    if end != "[EOS]":  # whose halves are unknown words
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    assert encode_without(tokenizer, "a b", number) == tokenizer.encode("a b", add_special_tokens=False).ids


def test_loading_switches_truncation_and_padding_off(tmp_path):
    tokenizer = train(TEXTS, 300)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = load(tmp_path / "t.json")
    assert len(loaded.encode("a").ids) == 1
    assert len(loaded.encode(TEXTS[0]).ids) > 4


@pytest.mark.parametrize("token", KNOWN_ENDS)
def test_known_end_of_text_tokens(tmp_path, token):
    assert end_of_text(load(words(tmp_path / "t.json", {"<unk>": 0, "a": 1, token: 9}))) == 9


def test_the_vocabulary_counts_unused_ids_and_an_unknown_end_is_refused(tmp_path):
    tokenizer = load(words(tmp_path / "t.json", {"<unk>": 0, "a": 70_000}))
    assert vocabulary_size(tokenizer) == 70_001
    with pytest.raises(UserError, match=r"t\.json has no end-of-text token"):
        end_of_text(tokenizer, "t.json")


def test_missing_and_damaged_tokenizers_are_refused(tmp_path):
    with pytest.raises(UserError, match="no tokenizer at"):
        load(tmp_path)
    for text in ("{", json.dumps({"model_type": "llama"}), ""):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
            load(tmp_path)


def test_pieces_join_to_the_text_and_end_after_lines():
    text = "ab\ncdefghijk\n\nl\n"
    for size in range(1, 20):
        parts = list(pieces(text, size))
        assert "".join(parts) == text and all(0 < len(part) <= size for part in parts)
    assert list(pieces(text, 10)) == ["ab\n", "cdefghijk\n", "\nl\n"]


def test_a_sample_takes_all_of_little_text_and_spreads_over_much():
    documents = [f"{i:07d}\n" * 8 for i in range(5000)]
    available = sum(map(len, documents))
    assert list(sample(documents, available)) == documents
    some = list(sample(documents, available // 10))
    assert some == list(sample(documents, available // 10))
    assert 0.1 * available - 64 < sum(map(len, some)) <= 0.1 * available
    numbers = [int(text[:7]) for text in some]
    assert min(numbers) < 250 and max(numbers) > 4000
    one = list(sample(["x\n" * 2_000_000], 400_000))
    assert 200_000 < sum(map(len, one)) < 600_000
