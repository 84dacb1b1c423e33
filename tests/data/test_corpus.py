import json
import os
from pathlib import Path

import numpy as np
import pytest

from harness.cases import from_table
from harness.texts import FORMS, write
from shardwise.data import corpus as corpus_module
from shardwise.data.corpus import Corpus, prepare
from shardwise.data.tokenizer import load
from shardwise.errors import UserError

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(f"document {i} of a small corpus\n" * (1 + i % 5))
    return folder


def make(source, out, **options):
    return prepare(str(source), out, **{"tokenizer": None, "vocab": 300, **options})


def documents(corpus, split):
    ids = corpus.tokens(split).tolist()
    assert ids[-1] == corpus.eos
    ends = [i for i, token in enumerate(ids) if token == corpus.eos]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [
        load(corpus.path / "tokenizer.json").decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)
    ]


def lines_of(source, out, **options):
    lines = []
    corpus = make(source, out, progress=lines.append, **options)
    return corpus, lines


def test_the_splits_hold_every_document_once_and_whole(texts, tmp_path):
    corpus = make(texts, tmp_path / "out", validation_fraction=0.25)
    train, validation = documents(corpus, "train"), documents(corpus, "validation")
    assert sorted(train + validation) == sorted(path.read_text() for path in texts.iterdir())
    assert corpus.document_counts == {"train": len(train), "validation": len(validation)}
    assert 2 <= len(validation) <= 20
    assert corpus.token_counts == {split: len(corpus.tokens(split)) for split in ("train", "validation")}
    assert corpus.text_bytes == sum(path.stat().st_size for path in texts.iterdir())
    assert corpus.dtype == "<u2" and corpus.tokens("train").dtype == np.uint16
    assert isinstance(corpus.tokens("train"), np.memmap) and not corpus.tokens("train").flags.writeable


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_empty(texts, tmp_path, fraction):
    corpus = make(texts, tmp_path / "out", validation_fraction=fraction)
    assert sorted(corpus.document_counts.values()) == [1, 39]
    assert sorted(documents(corpus, "train") + documents(corpus, "validation")) == sorted(
        path.read_text() for path in texts.iterdir()
    )


@pytest.mark.parametrize("fraction", [1e-9, 0.25, 1 - 1e-9])
def test_a_single_document_gives_its_last_tokens(tmp_path, fraction):
    file = tmp_path / "a.txt"
    file.write_text("one long text of many words\n" * 200)
    corpus = make(file, tmp_path / "out", validation_fraction=fraction)
    train, validation = corpus.tokens("train").tolist(), corpus.tokens("validation").tolist()
    assert len(validation) == min(max(round(fraction * len(train + validation)), 1), len(train + validation) - 1)
    assert (train + validation)[-1] == corpus.eos and (train + validation).count(corpus.eos) == 1
    assert load(corpus.path / "tokenizer.json").decode((train + validation)[:-1]) == file.read_text()


def test_only_ends_of_documents_are_the_end_of_text(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[EOS]": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "t.json"))
    text = tmp_path / "t.jsonl"
    text.write_text("".join(json.dumps({"text": "a [EOS] a"}) + "\n" for _ in range(8)))
    corpus = make(text, tmp_path / "out", tokenizer=tmp_path / "t.json")
    for split in ("train", "validation"):
        assert np.count_nonzero(corpus.tokens(split) == corpus.eos) == corpus.document_counts[split]


def test_long_documents_are_encoded_in_pieces_without_loss(texts, tmp_path, monkeypatch):
    whole = make(texts, tmp_path / "whole")
    monkeypatch.setattr(corpus_module, "_PIECE", 40)
    monkeypatch.setattr(corpus_module, "_BATCH", 100)
    pieces = make(texts, tmp_path / "pieces")
    for split in ("train", "validation"):
        assert documents(pieces, split) == documents(whole, split)


def test_the_same_text_is_prepared_once(texts, tmp_path):
    first = make(texts, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    again, lines = lines_of(texts, tmp_path / "out")
    assert again == first and lines == [f"the text is prepared already: {first.path}"]
    assert before == {path: path.stat().st_mtime_ns for path in first.path.iterdir()}


def test_every_format_gives_the_same_tokens(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 1000)
    (texts / "05.txt").write_text('"one", two;\r\nthree ü\n')
    documents = [path.read_bytes().decode() for path in sorted(texts.iterdir())]
    made = [make(write(tmp_path, form, documents), tmp_path / "out") for form in FORMS]
    assert len({corpus.path for corpus in made}) == len(FORMS)
    for name in ("train.bin", "validation.bin", "tokenizer.json"):
        assert len({(corpus.path / name).read_bytes() for corpus in made}) == 1


def test_the_amount_of_compressed_text_is_not_made_up(texts, tmp_path):
    _, lines = lines_of(write(tmp_path, "csv.gz", ["number " * 2000] * 100), tmp_path / "out")
    assert lines[0].endswith(" on 0.0 MB compressed, a sample of at most 16 MB")
    assert all(line.endswith(" MB of 0.0 MB compressed") for line in lines if line.startswith("encoded"))


def test_preparing_twice_gives_the_same_bytes(texts, tmp_path):
    one, two = make(texts, tmp_path / "one"), make(texts, tmp_path / "two")
    for name in ("train.bin", "validation.bin", "tokenizer.json", "corpus.json"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()


def test_changed_text_or_settings_go_to_another_folder(texts, tmp_path):
    out = tmp_path / "out"
    folders = [make(texts, out).path]
    mapped = Corpus.open(folders[0]).tokens("train")
    copy = np.array(mapped)
    folders.append(make(texts, out, vocab=301).path)
    folders.append(make(texts, out, validation_fraction=0.3).path)
    folders.append(make(texts, out, max_bytes=500).path)
    folders.append(make(texts, out, tokenizer=folders[0] / "tokenizer.json").path)
    os.utime(texts / "00.txt", ns=(1, 1))
    assert make(texts, out).path == folders[0], "the text is the same"
    (texts / "00.txt").write_text("changed")
    folders.append(make(texts, out).path)
    assert len(set(folders)) == len(folders) == len(list(out.iterdir()))
    assert (mapped == copy).all()


def test_equal_names_sizes_and_times_do_not_make_texts_equal(tmp_path):
    made = []
    for name, word in (("one", "red"), ("two", "sea")):
        file = tmp_path / name / "text.txt"
        file.parent.mkdir()
        file.write_text(f"a {word} and more words to learn from\n" * 50)
        os.utime(file, ns=(1, 1))
        made.append(make(file, tmp_path / "out"))
    assert len({corpus.path for corpus in made}) == 2
    for corpus, word in zip(made, ("red", "sea"), strict=True):
        ids = corpus.tokens("train").tolist()
        assert word in load(corpus.path / "tokenizer.json").decode(ids)
    copied = tmp_path / "elsewhere.txt"
    copied.write_bytes((tmp_path / "two" / "text.txt").read_bytes())
    assert make(copied, tmp_path / "out").path == made[1].path


def test_large_text_says_that_it_is_read(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_TELL", 2000)
    _, lines = lines_of(texts, tmp_path / "out")
    assert lines[0] == "read 0 GB of 0 to check whether the text is prepared"


def test_another_corpus_than_the_one_that_is_wanted_is_not_prepared(texts, tmp_path):
    wanted = make(texts, tmp_path / "out").fingerprint
    assert make(texts, tmp_path / "again", only=wanted).fingerprint == wanted
    (texts / "00.txt").write_text("changed")
    with pytest.raises(UserError, match="the text or its settings have changed"):
        make(texts, tmp_path / "other", only=wanted)
    assert not (tmp_path / "other").exists()


def test_other_text_of_a_run_that_goes_on_has_its_tokenizer(texts, tmp_path):
    before = make(texts, tmp_path / "out")
    kept = before.path / "tokenizer.json"
    assert make(texts, tmp_path / "out", kept=kept).path == before.path
    for number in range(20):
        (texts / f"more-{number}.txt").write_text("quite another text, of other words entirely\n" * 3)
    after = make(texts, tmp_path / "out", kept=kept)
    assert (
        after.path != before.path
        and load(after.path / "tokenizer.json").to_str() == load(before.path / "tokenizer.json").to_str()
    )
    assert make(texts, tmp_path / "out", kept=kept).path == after.path
    (texts / "last.txt").write_text("the last one\n")
    other, lines = lines_of(texts, tmp_path / "out", kept=tmp_path / "gone.json")
    assert load(other.path / "tokenizer.json").to_str() != load(before.path / "tokenizer.json").to_str()
    assert any("warning" in line and "gone.json" in line and "--tokenizer" in line for line in lines)


def test_an_interrupted_preparation_leaves_nothing(texts, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpus_module.SplitFiles, "finish", interrupt)
        make(texts, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert make(texts, tmp_path / "out").document_counts["train"] > 0


def test_an_unfinished_or_damaged_corpus_is_refused_and_made_anew_beside_it(texts, tmp_path):
    corpus = make(texts, tmp_path / "out")
    content = (corpus.path / "train.bin").read_bytes()
    (corpus.path / "train.bin").write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"train.bin has {len(content) - 1} bytes instead of {len(content)}"):
        Corpus.open(corpus.path)
    second = make(texts, tmp_path / "out")
    assert second.path != corpus.path and (second.path / "train.bin").read_bytes() == content
    assert (corpus.path / "train.bin").read_bytes() == content[:-1]
    (second.path / "corpus.json").unlink()
    with pytest.raises(UserError, match="it has no"):
        Corpus.open(second.path)
    assert make(texts, tmp_path / "out").path not in (corpus.path, second.path)


@pytest.mark.parametrize("change", [{"format": 0}, {"dtype": "words"}, {"token_counts": {}}, {"extra": 1}])
def test_a_wrong_description_is_refused(texts, tmp_path, change):
    path = make(texts, tmp_path / "out").path / "corpus.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match="prepare the text again"):
        Corpus.open(path.parent)
    path.write_text("[")
    with pytest.raises(UserError, match="is damaged"):
        Corpus.open(path.parent)


def test_a_limit_cuts_the_text_between_characters(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("äöü" * 100)
    corpus = make(file, tmp_path / "out", max_bytes=33)
    ids = np.concatenate([corpus.tokens("train"), corpus.tokens("validation")]).tolist()
    assert load(corpus.path / "tokenizer.json").decode(ids[:-1]) == ("äöü" * 6)[:16]
    assert corpus.text_bytes == 32


def test_a_limit_reads_no_more_than_it_needs(tmp_path, monkeypatch):
    texts = []
    for number, beyond in enumerate(("more", "else", "\0")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.txt").write_text("\ufeff" + "äöü" * 100 + beyond * 10_000)
        (folder / "b.txt").write_text(beyond)
        read = []
        opened = Path.open

        def counted(path, *args, opened=opened, read=read, **kwargs):
            read.append(path.name)
            return opened(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", counted)
            patch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"all of {path} was read"))
            texts.append(make(folder, tmp_path / "out", max_bytes=33))
        assert "b.txt" not in read
    assert texts[0] == texts[1] == texts[2] and texts[0].text_bytes == 32
    (folder / "a.txt").write_text("\ufeff" + "äö." * 100)
    assert make(folder, tmp_path / "out", max_bytes=33).path != texts[0].path
    whole = [make(tmp_path / str(number), tmp_path / "out").path for number in (0, 1)]
    assert len({*whole, texts[0].path}) == 3


def test_a_limit_does_not_confuse_documents(tmp_path):
    made = set()
    for number, parts in enumerate((["ab", "cd", "ef"], ["abc", "d", "ef"], ["ab", "cd", "eg"], ["ab", "cd", "ef"])):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps({"text": part * 20}) + "\n" for part in parts))
        made.add(make(file, tmp_path / "out", max_bytes=110).path)
    assert len(made) == 3


def test_large_ids_take_four_bytes(tmp_path):
    vocabulary = {"<unk>": 0, "a": 65_535, "b": 65_536, "</s>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("a b c a")
    corpus = make(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "t.json")
    assert corpus.tokens("train").tolist() == [65_535, 65_536, 0, 65_535] and corpus.tokens("train").dtype == np.uint32
    assert corpus.tokens("validation").tolist() == [2] == [corpus.eos]
    assert corpus.vocab_size == 65_537


def test_unigram_entropy_is_that_of_the_split_itself(tmp_path):
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "</s>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("a " * 8 + "a a a a b b c")
    corpus = make(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "t.json", validation_fraction=0.5)
    assert corpus.tokens("validation").tolist() == [1, 1, 1, 1, 2, 2, 0, 3]
    expected = 0.5 * np.log(2) + 0.25 * np.log(4) + 2 * 0.125 * np.log(8)
    assert corpus.unigram_entropy() == pytest.approx(expected, abs=1e-12)
    assert corpus.unigram_entropy("train") == pytest.approx(0, abs=1e-12)


def test_a_folder_that_holds_its_own_corpus_is_prepared_once(texts):
    first, (second, lines) = make(texts, texts / "out"), lines_of(texts, texts / "out")
    assert second == first and lines == [f"the text is prepared already: {first.path}"]


def test_progress_and_what_was_skipped(texts, tmp_path):
    (texts / "x.bin").write_bytes(b"\0")
    _, lines = lines_of(texts, tmp_path / "out", vocab=5000)
    assert "training a tokenizer of 5000 tokens" in lines[0]
    assert any("the text is too little for 5000 tokens" in line for line in lines)
    skipped = f"skipped 1 of {len([*texts.iterdir()])} files, such as x.bin: is binary (NUL at byte 0)"
    assert f"{skipped}; give files of UTF-8 text" in lines
    assert lines[-1].endswith("in 40 documents")
    _, again = lines_of(texts, tmp_path / "out", vocab=5000)
    assert again[1:] == [f"{skipped}; give files of UTF-8 text"]


def test_a_bad_record_is_reported_while_the_tokenizer_trains(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UserError, match=r"r\.jsonl, line 2 is not JSON"):
        make(tmp_path / "r.jsonl", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@from_table
def test_impossible_settings_are_refused(texts, tmp_path, options, reason):
    with pytest.raises(UserError, match=reason):
        make(texts, tmp_path / "out", **options)


def test_unusable_folders_and_tokenizers_are_refused(texts, tmp_path):
    with pytest.raises(UserError, match="cannot write the corpus to"):
        make(texts, texts / "00.txt")
    with pytest.raises(UserError, match="no tokenizer at"):
        make(texts, tmp_path / "out", tokenizer=tmp_path / "none.json")
    (tmp_path / "a.txt").write_text("ä")
    with pytest.raises(UserError, match="no tokens"):
        make(tmp_path / "a.txt", tmp_path / "out", max_bytes=1)
