"""Prompts and ends by tokenizers and chat templates that are made as Llama 3's and Mistral's are: small ones, of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import Message

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{% set system = messages[0]["content"] %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" and loop.last and system is defined %}
        {{- "[INST] " + system + "\n\n" + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
SPECIAL = {
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
}
TEXT = [
    "what is the sum of 3 and 4 ? let me see , the answer is 7 and no more",
    "System: be brief, answer with a number",
]
SYSTEM, ASK, SAID, MORE = (
    Message("system", "be brief"),
    Message("user", "3 and 4?"),
    Message("assistant", "the sum is 7"),
    Message("user", "and 5?"),
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    folder = saved("llama", tokenizer, trainer, tmp_path, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    ends = [ChatRenderer(folder).encode_trusted(word).item() for word in ("<|eot_id|>", "<|eom_id|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(params=["spaces by Metaspace", "spaces by a normaliser"])
def mistral(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """As SentencePiece's are converted: now and formerly."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if request.param == "spaces by Metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [*(chr(i) for i in range(33, 127)), "▁", "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=250, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False, max_token_length=8
    )
    return saved("mistral", tokenizer, trainer, tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def saved(kind: str, tokenizer: Tokenizer, trainer: trainers.Trainer, folder: Path, **named: str) -> Path:
    tokenizer.train_from_iterator(TEXT, trainer)
    if kind == "mistral":  # a token for each byte that no other token has
        whole = json.loads(tokenizer.to_str())
        for byte in range(256):
            whole["model"]["vocab"].setdefault(f"<0x{byte:02X}>", len(whole["model"]["vocab"]))
        tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL[kind]])
    first = SPECIAL[kind][0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    wrapped.chat_template = {"llama": LLAMA, "mistral": MISTRAL}[kind]
    wrapped.save_pretrained(str(folder))
    return folder


def as_one_string(folder: Path, text: str) -> list[int]:
    ids = PreTrainedTokenizerFast.from_pretrained(str(folder)).encode(text, add_special_tokens=False)
    return [int(each) for each in ids]


CHATS = [[ASK], [SYSTEM, ASK], [ASK, SAID, MORE], [SYSTEM, ASK, SAID, MORE]]


@pytest.mark.parametrize("chat", CHATS)
def test_llamas_prompts_have_the_tokens_of_the_whole_string(llama: Path, chat: list[Message]) -> None:
    ids, text = ChatRenderer(llama).render(chat)
    assert ids.tolist() == as_one_string(llama, text) and text.startswith("<|begin_of_text|><|start_header_id|>system")
    assert text.count("<|begin_of_text|>") == 1 and "Today: 26 Jul 2024" in text


def test_each_of_llamas_ends_ends_a_completion(llama: Path) -> None:
    renderer = ChatRenderer(llama)
    for end in ("<|eot_id|>", "<|eom_id|>"):
        assert renderer.decode(renderer.encode_trusted(f"it is 7{end}")) == "it is 7"


def test_ends_are_those_of_config_json_where_there_is_no_generation_config(llama: Path) -> None:
    expected = ChatRenderer(llama).stop_ids
    (llama / "generation_config.json").rename(llama / "config.json")
    assert ChatRenderer(llama).stop_ids == expected and len(expected) == 2


@pytest.mark.parametrize("chat", CHATS)
def test_mistrals_prompts_have_the_tokens_of_the_whole_string(mistral: Path, chat: list[Message]) -> None:
    """A system message comes where the template has it: in the last turn."""
    ids, text = ChatRenderer(mistral).render(chat)
    assert ids.tolist() == as_one_string(mistral, text)
    last = "be brief\n\n" if SYSTEM in chat else ""
    assert text.endswith(f"[INST] {last}{chat[-1].content}[/INST]")


@pytest.mark.parametrize("named", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_published_mistral_has_the_tokenizer_of_its_tokenizer_json(mistral: Path, named: str) -> None:
    """With the class that published ones name, the model's type, and mistral_common's tekken.json beside it."""
    expected, text = ChatRenderer(mistral).render([SYSTEM, ASK])
    config = json.loads((mistral / "tokenizer_config.json").read_text())
    (mistral / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    (mistral / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (mistral / "tekken.json").write_text("{}")
    ids, again = ChatRenderer(mistral).render([SYSTEM, ASK])
    assert ids.tolist() == expected.tolist() and again == text


def test_mistrals_prompts_are_cut_within_the_right_message(mistral: Path) -> None:
    renderer, chat = ChatRenderer(mistral), [SYSTEM, ASK, SAID, Message("user", "and 5 ? " * 20)]
    rendered = renderer.render_cut(chat, len(renderer.render(chat)[0]) - 10, "left")
    assert rendered is not None
    assert rendered[1].startswith("<s>[INST] 3 and 4?[/INST] the sum is 7</s>[INST] be brief\n\n")


def test_mistrals_next_turn_is_what_the_whole_chat_has_between_two_completions(mistral: Path) -> None:
    renderer = ChatRenderer(mistral)
    prompt, _ = renderer.render([ASK])
    whole, _ = renderer.render([ASK, SAID, MORE])
    completion = [*renderer.completion_ids(SAID.content).tolist(), renderer.eos_id]
    if "Prepend" not in (mistral / "tokenizer.json").read_text():  # which makes two spaces of the template's one
        assert [*prompt.tolist(), *completion, *renderer.next_turn([MORE]).tolist()] == whole.tolist()
    assert renderer.next_turn([MORE]).tolist() == as_one_string(mistral, "[INST] and 5?[/INST]")


@pytest.mark.parametrize("text", ["the sum is 7  and no more", "☃ is 7", "7"])
def test_the_pieces_of_mistrals_tokens_are_together_the_text(mistral: Path, text: str) -> None:
    renderer = ChatRenderer(mistral)
    ids = renderer.completion_ids(text)
    pieces = renderer.pieces(ids)
    assert "".join(pieces) == renderer.decode(ids) == text and len(pieces) == len(ids)


def test_turns_that_the_template_refuses_are_an_error_in_its_words(mistral: Path) -> None:
    with pytest.raises(
        ValueError, match=r"refuses these turns \(user, user\): roles must alternate user and assistant"
    ):
        ChatRenderer(mistral).render([ASK, MORE])
