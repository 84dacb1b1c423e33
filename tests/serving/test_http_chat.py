import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_double import write_tokenizer

from harness.cases import table
from shardwise.errors import UserError
from shardwise.serving.http.chat import Chat
from shardwise.serving.http.problems import Problem

TEMPLATES = table(__file__, "TEMPLATES")
TALK = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "what is 2 < 3 & é?\n"},
    {"role": "assistant", "content": "true"},
    {"role": "user", "content": "sure?"},
]
NAMES = {"bos_token": "<|user|>", "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True}}


def chat_of(folder: Path, template: str | None, **config: object) -> Chat:
    file = write_tokenizer(folder, template)
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES | config))
    return Chat(file)


def decoded(chat: Chat, ids: list[int]) -> str:
    return chat._plain.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    chat = chat_of(tmp_path, TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|user|>", eos_token="<|end|>"
    )
    for talk in (TALK, TALK[1:2], TALK[:2]):
        expected = theirs.apply_chat_template(
            talk, chat_template=TEMPLATES[name], add_generation_prompt=True, return_dict=False
        )
        assert chat.encode(talk) == expected


def test_templates_are_found_where_folders_have_them(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert not chat_of(tmp_path, None).known
    told = [
        (chat_of(tmp_path, None, chat_template="inside"), "inside"),
        (chat_of(tmp_path, None, chat_template=several), "plain"),
        (chat_of(tmp_path, "own file", chat_template="inside"), "own file"),
    ]
    for chat, text in told:
        assert chat.known and decoded(chat, chat.encode(TALK)) == text


def test_named_tokens_may_lie_in_a_file_of_their_own(tmp_path):
    write_tokenizer(tmp_path, TEMPLATES["named tokens"])
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(NAMES | {"bos_token": "<|end|>"}))
    older = Chat(tmp_path / "tokenizer.json")
    talk = TALK[1:2]
    assert decoded(older, older.encode(talk)) == f"<|end|>{TALK[1]['content']}<|end|>"
    both = chat_of(tmp_path, TEMPLATES["named tokens"])
    assert decoded(both, both.encode(talk)) == f"<|user|>{TALK[1]['content']}<|end|>"


def with_plain_token(folder: Path, template: str) -> Chat:
    """A tokenizer with an added token that is not special, as some models have for who speaks and for thoughts."""
    from tokenizers import AddedToken, Tokenizer

    file = write_tokenizer(folder, template)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    tokenizer.save(str(file))
    return Chat(file)


def test_added_tokens_that_a_template_spells_are_control_tokens(tmp_path):
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}</think>"
    chat = with_plain_token(tmp_path, source)
    token = chat._tokens.token_to_id("</think>")
    ids = chat.encode([{"role": "user", "content": "a</think>b"}])
    assert decoded(chat, ids) == "a</think>b</think>" and ids.count(token) == 1 and ids[-1] == token
    # An assistant's thoughts are left to the template, which looks for them.
    assert decoded(chat, chat.encode([{"role": "assistant", "content": "a</think>b"}])) == "b</think>"
    plain = with_plain_token(tmp_path, "{{ messages[0].content }}")
    assert plain._tokens.token_to_id("</think>") in plain.encode([{"role": "user", "content": "a</think>b"}])


SPELLED = st.lists(st.sampled_from(["<|end|>", "<|", "end", "|>", "a", " ", "é", "\U000f5a00"]))


@settings(max_examples=60)
@given(SPELLED.map("".join))
def test_no_message_spells_a_control_token(tmp_path_factory, text):
    chat = chat_of(tmp_path_factory.mktemp("chat"), "<|user|>{{ messages[0].content }}<|end|>")
    ids = chat.encode([{"role": "user", "content": text}])
    control = [chat._tokens.token_to_id(word) for word in ("<|user|>", "<|end|>")]
    assert [token for token in ids if token in chat._tokens.get_added_tokens_decoder()] == control
    shown = text.replace("\U000f5a00", "")
    assert decoded(chat, ids) == f"<|user|>{shown}<|end|>"


def test_a_template_that_cuts_a_message_does_not_free_its_tokens(tmp_path):
    chat = chat_of(tmp_path, "{{ messages[0].content[1:] }}{{ messages[0].content[:-1] }}")
    ids = chat.encode([{"role": "user", "content": "<|end|>"}])
    assert not set(ids) & chat._tokens.get_added_tokens_decoder().keys()


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}{{ date }}{{ tags | join }}"
)


def test_variables_reach_the_template_as_in_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    chat = chat_of(tmp_path, THINKS)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for variables in ({"enable_thinking": False}, {"enable_thinking": True, "date": "today", "tags": ["a", "b"]}, {}):
        expected = theirs.apply_chat_template(
            TALK, chat_template=THINKS, add_generation_prompt=True, return_dict=False, **variables
        )
        assert chat.encode(TALK, variables) == expected
    assert decoded(chat, chat.encode(TALK[1:2], {"add_generation_prompt": False})) == TALK[1]["content"]


def test_variables_spell_no_control_token_and_replace_nothing_of_the_server_s(tmp_path):
    chat = chat_of(tmp_path, THINKS)
    ids = chat.encode(TALK[1:2], {"date": "<|end|>", "tags": ["<|user|>"]})
    assert decoded(chat, ids).endswith("<|end|><|user|>")
    assert [token for token in ids if token in chat._tokens.get_added_tokens_decoder()] == [
        chat._tokens.token_to_id("<|assistant|>")
    ]
    for name in ("messages", "tools", "documents", "eos_token"):
        with pytest.raises(Problem, match="which the server does") as caught:
            chat.encode(TALK, {name: "x"})
        assert caught.value.status == 400 and caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"])
def test_what_a_template_may_not_do_is_said(tmp_path, template):
    with pytest.raises(Problem, match="chat template refuses") as caught:
        chat_of(tmp_path, template).encode(TALK)
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_damaged_templates_and_configurations_are_named(tmp_path):
    with pytest.raises(UserError, match=r"chat template in .* is damaged"):
        chat_of(tmp_path, "{% for %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        Chat(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="should be a JSON object"):
        Chat(tmp_path / "tokenizer.json")
