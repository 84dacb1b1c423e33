"""Dialogues as tokens and rows: masks equal transformers', packed rows keep dialogues apart."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.dialogues import END, IGNORED, START, chats, pairs, turn, write_records, write_tokenizer
from shardwise.data import Corpus, open_source, prepare
from shardwise.data.dialogues import DialogueRows, stored
from shardwise.errors import UserError


def corpus_of(folder: Path, records: list, *, said: list | None = None, generation: bool = True, **options) -> Corpus:
    write_tokenizer(folder / "tok", chats(8), generation)
    file = write_records(folder / "records.jsonl", records)
    tell = (said if said is not None else []).append
    return prepare(str(file), folder / "corpora", tokenizer=folder / "tok", vocab=300, progress=tell, **options)


def sequences(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    """(tokens, whether each counts) of every stored dialogue of both splits."""
    made = []
    for split in ("train", "validation"):
        tokens = corpus.tokens(split).astype(np.int64)
        parts = [tokens[start : start + length] for start, length in stored(tokens)]
        made += [((part // 2).tolist(), (part & 1).tolist()) for part in parts]
    return sorted(made)


def test_tokens_and_masks_are_those_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    records = [*chats(8), {"messages": [turn("system", "ü\u2028 🙂"), turn("user", ""), turn("assistant", "🙂🙂 é\n")]}]
    corpus = corpus_of(tmp_path, records)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tok")
    made = [
        tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        for record in records
    ]
    assert sequences(corpus) == sorted((one["input_ids"], one["assistant_masks"]) for one in made)
    assert corpus.document_counts["train"] + corpus.document_counts["validation"] == 9


def test_answers_without_marks_are_what_a_longer_dialogue_adds(tmp_path):
    """The end of the answer counts, and the line end that the template writes after it."""
    marked, said = corpus_of(tmp_path / "a", chats(6)), list[str]()
    plain = corpus_of(tmp_path / "b", chats(6), said=said, generation=False)
    for (ids, counts), (same, more) in zip(sequences(marked), sequences(plain), strict=True):
        assert ids == same
        added = [i for i, (a, b) in enumerate(zip(counts, more, strict=True)) if a != b]
        assert len(added) == sum(a > b for a, b in zip(counts, [*counts[1:], 0], strict=True))
        assert all(counts[i - 1] and more[i] for i in added)
    assert any("whose loss counts" in line for line in said)


def test_answers_that_a_template_shows_otherwise_later_do_not_count(tmp_path):
    """As templates that leave out the thoughts of earlier answers: the last answer alone counts, and that is said."""
    write_tokenizer(tmp_path / "tok", chats(8))
    template = (
        "{% for m in messages %}" + START + "{{ m.role }}:{% if m.role == 'assistant' and not loop.last %}-"
        "{% else %}{{ m.content }}{% endif %}" + END + "{% endfor %}"
        "{% if add_generation_prompt %}" + START + "assistant:{% endif %}"
    )  # fmt: skip
    (tmp_path / "tok" / "chat_template.jinja").write_text(template)
    records, said = [record for record in chats(9) if len(record["messages"]) == 6], list[str]()
    file = write_records(tmp_path / "records.jsonl", records)
    corpus = prepare(str(file), tmp_path / "corpora", tokenizer=tmp_path / "tok", vocab=300, progress=said.append)
    for _, counts in sequences(corpus):
        assert counts == sorted(counts) and any(counts)
    assert any("6 answers do not count" in line for line in said)


def test_pairs_with_and_without_a_prompt_are_equal(tmp_path):
    records = pairs(8)
    whole = [{name: [*r["prompt"], *r[name]] for name in ("chosen", "rejected")} for r in records]
    given, implicit = (corpus_of(tmp_path / str(i), made) for i, made in enumerate((records, whole)))
    assert given.shape == implicit.shape == "pairs" and sequences(given) == sequences(implicit)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30),
    seq=st.integers(2, 24), packed=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_rows_have_every_dialogue_once_and_keep_them_apart(lengths, seq, packed, seed):
    """Dialogue k is k's tokens alone, so that a target of another dialogue is seen."""
    numbers, answers = [], {}
    for k, (prompt, answer) in enumerate(lengths, 1):
        numbers += [prompt + answer, *[2 * k] * prompt, *[2 * k + 1] * answer]
        answers[k] = max(0, min(prompt + answer, seq + 1) - prompt)
    if not any(answers.values()):
        with pytest.raises(UserError, match="no answer begins"):
            DialogueRows(np.array(numbers), "chat", seq, seed, packed)
        return
    rows = DialogueRows(np.array(numbers), "chat", seq, seed, packed)
    batch = rows.batch(np.arange(rows.windows))
    inputs, targets = batch["inputs"], batch["targets"]
    counts = targets != IGNORED
    assert (inputs[counts] == targets[counts]).all()
    assert {k: int((targets == k).sum()) for k in answers} == answers
    assert rows.cut == sum(a + b > seq + 1 for k, (a, b) in enumerate(lengths, 1) if answers[k])
    assert rows.left_out == sum(not count for count in answers.values())
    if not packed:
        assert rows.windows == sum(count > 0 for count in answers.values())
        return
    starts = batch["positions"] == 0
    assert (np.diff(batch["documents"], axis=1) == starts[:, 1:]).all() and starts[:, 0].all()
    assert (np.diff(batch["positions"], axis=1)[~starts[:, 1:]] == 1).all()
    assert (np.diff(inputs, axis=1)[~starts[:, 1:]] == 0).all()
    used = [int((row > 0).sum()) for row in inputs]
    assert sum(sorted(used)[:2]) > seq or len(used) == 1  # two rows that fit into one would be one


def test_other_shapes_and_files_of_records(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    write_tokenizer(tmp_path / "tok", chats(8))
    parquet.write_table(arrow.Table.from_pylist(chats(8)), tmp_path / "chat.parquet")
    made = prepare(str(tmp_path / "chat.parquet"), tmp_path / "c", tokenizer=tmp_path / "tok", vocab=300)
    assert sequences(made) == sequences(corpus_of(tmp_path / "b", chats(8)))
    plain = write_records(tmp_path / "plain.jsonl", [{"prompt": "a", "completion": " b"}] * 4)
    for ids, counts in sequences(prepare(str(plain), tmp_path / "c", tokenizer=tmp_path / "tok", vocab=300)):
        assert len(ids) == 4 and counts == [0, 1, 1, 1]
    both = write_records(tmp_path / "both.jsonl", [{"text": "a", "messages": []}])
    assert open_source(str(both)).shape == "text" and open_source(str(both), "other").shape == "chat"


def test_a_folder_of_dialogues_says_what_it_skips_and_rejects_records_of_another_shape(tmp_path):
    """Its shape is that of the first record, whichever file has one."""
    write_tokenizer(tmp_path / "tok", chats(8))
    folder, said = tmp_path / "both", []
    folder.mkdir()
    write_records(folder / "a.jsonl", [])
    write_records(folder / "chat.jsonl", chats(8))
    (folder / "notes.txt").write_text("text " * 100)
    options = {"tokenizer": tmp_path / "tok", "vocab": 300, "progress": said.append}
    assert prepare(str(folder), tmp_path / "c", **options).shape == "chat"
    assert "skipped 1 of 3 files, such as notes.txt: has no records of dialogues; give .jsonl or .parquet files" in said
    write_records(folder / "text.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=r"record 9 of .* all records one shape"):
        prepare(str(folder), tmp_path / "c", **options)


def test_a_limit_keeps_whole_records(tmp_path):
    size = sum(len(json.dumps(record)) for record in chats(5))
    counts = [corpus_of(tmp_path / str(k), chats(9), max_bytes=size + k).document_counts for k in (0, 3)]
    assert [sum(count.values()) for count in counts] == [5, 5]


@from_table
def test_what_is_no_dialogue_is_named_by_its_record(tmp_path, records, message):
    with pytest.raises(UserError, match=message):
        corpus_of(tmp_path, [*records])


def test_records_of_the_forms_that_are_around(tmp_path):
    """A text before lists of messages, equal answers, a dialogue that the assistant begins, and an empty one."""
    lists = [[turn("user", "a"), turn("assistant", answer)] for answer in ("b", "c")]
    forms = [
        {"prompt": "a", "chosen": lists[0], "rejected": lists[1]},
        {"chosen": lists[0], "rejected": lists[1]},
        {"chosen": lists[0], "rejected": lists[0]},
    ]
    first, second, equal = (sequences(corpus_of(tmp_path / str(n), [form] * 8)) for n, form in enumerate(forms))
    assert first == second and all(any(counts) for _, counts in (*first, *equal))
    begun = {"messages": [turn("assistant", "hi"), turn("user", "a"), turn("assistant", "b")]}
    made = sequences(corpus_of(tmp_path / "begun", [begun, {"messages": []}] * 8, generation=False))
    assert len(made) == 8 and all(any(counts) for _, counts in made)
    with pytest.raises(UserError, match=r"is no dialogue .*prompt"):
        corpus_of(tmp_path / "none", [{"prompt": None, "completion": "x"}] * 8)
