"""carry.py splits wheels into small pieces for a machine without a network, and removes code for other GPUs."""

import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
from scripts import BENCHMARKS, call

PTX, ELF = 1, 2


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    """Pack triples (kind, architecture, code) as CUDA's compiler does."""
    packed = b""
    for kind, architecture, code in codes:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 1, architecture)
        packed += header.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed


def test_only_code_for_one_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import carry

    def library(zeroed: bool) -> bytes:
        def gone(code: bytes) -> bytes:
            return bytes(len(code)) if zeroed else code

        compiled = fat_binary(
            (PTX, 80, gone(b"ptx 80..")), (ELF, 80, gone(b"elf 80..")), (ELF, 90, b"elf 90.."), (ELF, 100, gone(b"elf100.."))
        )  # fmt: skip
        portable = fat_binary((PTX, 80, b"ptx 80.."), (PTX, 100, gone(b"ptx100..")), (ELF, 80, gone(b"elf 80..")))
        unknown = fat_binary((64, 80, b"unknown."))
        damaged = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 90) + b"elf 80.." * 12
        return b"\x7fELF code" + compiled + bytes(8) + portable + unknown + damaged + b"the end"

    assert carry.for_one_gpu(library(zeroed=False)) == library(zeroed=True)


def test_pieces_are_joined_once_all_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import carry

    file, out, there = tmp_path / "model.whl", tmp_path / "out", tmp_path / "there"
    out.mkdir()
    there.mkdir()
    file.write_bytes(bytes(range(256)) * 10)
    pieces = carry.cut(file, out, 1000)
    assert [piece.stat().st_size for piece in pieces] == [854, 854, 852]
    for piece in pieces[1:]:
        shutil.copy(piece, there)
    assert carry.join(there) == ["model.whl: expected 3 pieces; missing 1"]
    (there / pieces[0].name).write_bytes(bytes(854))
    with pytest.raises(ValueError, match="its 3 pieces are damaged; copy them again"):
        carry.join(there)
    shutil.copy(pieces[0], there)
    assert carry.join(there) == [] and (there / "model.whl").read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="needs a C compiler and nm")
def test_packing_leaves_out_files_and_finds_missing_symbols(tmp_path: Path) -> None:
    torch, wheels, out = tmp_path / "torch", tmp_path / "wheels", tmp_path / "out"
    for folder in (torch / "lib", wheels):
        folder.mkdir(parents=True)
    known, unknown = "aoti_torch_known", "_ZN2at7unknownEv"
    sources = {
        torch / "lib" / "libtorch.so": f"int {known}(void) {{ return 1; }}",
        tmp_path / "_C.so": f"int {known}(void), {unknown}(void), cuInit(int);"
        f"int call(void) {{ return {known}() + {unknown}() + cuInit(0); }}",
    }
    for library, source in sources.items():
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True
        )
    with zipfile.ZipFile(wheels / "vllm-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("vllm/__init__.py", "NAME = 'made up'\n")
        archive.writestr("vllm/vllm-rs", "left out")
        archive.write(tmp_path / "_C.so", "vllm/_C.abi3.so")
    model = tmp_path / "model.whl"
    model.write_bytes(b"as it is")
    words = [str(BENCHMARKS / "carry.py"), "--out", str(out), str(wheels), str(model)]
    done = call(*words, "--torch", str(torch))
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stdout.splitlines() if "missing" in line] == [
        f"missing in torch: vllm/_C.abi3.so: {unknown}"
    ]
    assert call(*words).returncode == 0
    whole, cut = sorted(out.iterdir())
    assert whole.name.startswith("model.whl.1of1.") and whole.read_bytes() == b"as it is"
    with zipfile.ZipFile(cut) as archive:
        assert archive.namelist() == ["vllm/__init__.py", "vllm/_C.abi3.so"]
        assert archive.read("vllm/_C.abi3.so") == (tmp_path / "_C.so").read_bytes()
    done = call(*words, "--torch", str(tmp_path))
    assert done.returncode == 2 and "expected an installed torch package with lib/*.so" in done.stderr
