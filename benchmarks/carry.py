"""Pack wheels for a machine without a network, in pieces below the limit of one transfer.

    python benchmarks/carry.py --out build/carried [--piece-mib 48] [--torch DIR] FOLDER ... FILE.whl ...

A FOLDER of wheels becomes one archive, FOLDER.zip, compressed with LZMA. It leaves out files that training on this GPU never
reads (LEFT_OUT), and machine code for GPUs other than sm_90 (H100, H200). A FILE.whl is not changed. Archives and wheels are cut
into pieces NAME.1of3.DIGEST. `gpu_suite.py --wheels DIR` joins and unpacks an archive once all its pieces are in DIR.

--torch DIR is an installed torch package of the version on the other machine. Every torch symbol that the packed libraries expect
is looked up in it with `nm`, and a missing symbol is an error.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

GPU = 90
LEFT_OUT = (
    "vllm/vllm-rs",  # vLLM's server in Rust
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # Hopper uses FlashAttention 3
    "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*",
    "vllm/_deepselect_C*", "vllm/_flashkda_C*", "vllm/_flashmla_*", "vllm/_qutlass_C*",  # attention of models that we lack
    "pyarrow/include/*", "pyarrow/tests/*", "pyarrow/*flight*",
    "*/entrypoints/serve/instrumentator/static/*", "*.jpg",
)  # fmt: skip
FATBIN = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of this header, bytes of the code, ..., architecture
MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
OF_TORCH = re.compile(r"(aoti_)?torch_|_Z\w*?(2at|3c10|5torch)\d")
PIECE = re.compile(r"(?P<name>.+)\.(?P<number>\d+)of(?P<count>\d+)\.(?P<digest>[0-9a-f]{16})")


def entries(library: bytes) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield (kind, architecture, offset of the code, size of the code in bytes) for each entry of a library's fat binaries.

    A fat binary holds code for several GPUs, in the layout of CUDA's fatbinary.h, as public decompressors read it. It is skipped
    unless its entries fill it exactly.
    """
    start = FATBIN.pack(MAGIC, 1, FATBIN.size, 0)[:8]
    at = library.find(start)
    while at >= 0:
        _, _, header_bytes, num_bytes = FATBIN.unpack_from(library, at)
        position, end = at + header_bytes, at + header_bytes + num_bytes
        code_entries = []
        while end <= len(library) and position + ENTRY.size <= end:
            kind, _, entry_header, code_bytes, _, _, _, _, architecture = ENTRY.unpack_from(library, position)
            code_entries.append((kind, architecture, position + entry_header, code_bytes))
            position += max(entry_header, ENTRY.size) + code_bytes
        is_whole = position == end
        if is_whole:
            yield code_entries
        at = library.find(start, end if is_whole else at + 1)


def for_one_gpu(library: bytes, gpu: int = GPU) -> bytes:
    """Return the library with zeros in place of code that this GPU does not run; all offsets stay.

    Machine code for this architecture stays. If a fat binary has none, PTX for this or an earlier architecture stays.
    """
    kept = bytearray(library)
    for fat_binary in entries(library):
        has_machine_code = any(kind == ELF and architecture == gpu for kind, architecture, _, _ in fat_binary)
        for kind, architecture, offset, num_bytes in fat_binary:
            is_compiled_there = kind == PTX and architecture <= gpu and not has_machine_code
            if kind in (PTX, ELF) and not is_compiled_there and (kind, architecture) != (ELF, gpu):
                kept[offset : offset + num_bytes] = bytes(num_bytes)
    return bytes(kept)


def symbols(library: Path, which: str) -> set[str]:
    """Return the dynamic symbols that `nm` lists, without versions. which: --defined-only or --undefined-only."""
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in listed.splitlines()]
    return {line[-1].split("@")[0] for line in words if line and line[-2] not in ("w", "v")}


def missing_symbols(library: bytes, of_torch: set[str]) -> list[str]:
    """Return the torch symbols that a library expects and that torch does not define."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        wanted = {name for name in symbols(Path(file.name), "--undefined-only") if OF_TORCH.match(name)}
    return sorted(wanted - of_torch)


def bundle(wheels: list[Path], archive: Path, of_torch: set[str]) -> list[str]:
    """Write the wheels' files as one archive; return `library: symbol` for each expected symbol that torch lacks.

    of_torch: symbols that torch defines; empty: symbols are not checked.
    """
    missing = []
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as packed:
        for wheel in wheels:
            before = packed.fp.tell() if packed.fp else 0
            with zipfile.ZipFile(wheel) as source:
                for member in source.infolist():
                    if member.is_dir() or any(fnmatch.fnmatch(member.filename, pattern) for pattern in LEFT_OUT):
                        continue
                    content = source.read(member)
                    if re.search(r"\.so(\.|$)", member.filename):
                        if of_torch:
                            missing += [f"{member.filename}: {name}" for name in missing_symbols(content, of_torch)]
                        content = for_one_gpu(content)
                    packed.writestr(zipfile.ZipInfo(member.filename), content, zipfile.ZIP_LZMA)
            size = (packed.fp.tell() if packed.fp else 0) - before
            print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} -> {size / 1e6:.1f} MB", flush=True)
    return missing


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def cut(file: Path, out: Path, piece_bytes: int) -> list[Path]:
    """Write a file's pieces, in place of earlier pieces, and return their paths."""
    for path in out.iterdir():
        if (match := PIECE.fullmatch(path.name)) and match["name"] == file.name:
            path.unlink()
    content = file.read_bytes()
    digest = digest_of(content)
    count = max(1, -(-len(content) // piece_bytes))
    size = -(-len(content) // count)
    pieces = [out / f"{file.name}.{number + 1}of{count}.{digest}" for number in range(count)]
    for number, piece in enumerate(pieces):
        piece.write_bytes(content[number * size : (number + 1) * size])
    return pieces


def join(folder: Path) -> list[str]:
    """Join the pieces of each complete file in a folder, next to the pieces; return a line for each file that lacks pieces.

    Raises:
        ValueError: the joined file differs from the file that was cut.
    """
    parts: dict[tuple[str, int, str], dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := PIECE.fullmatch(path.name):
            parts.setdefault((match["name"], int(match["count"]), match["digest"]), {})[int(match["number"])] = path
    incomplete = []
    for (name, count, digest), pieces in sorted(parts.items()):
        missing = [str(number) for number in range(1, count + 1) if number not in pieces]
        file = folder / name
        if missing:
            incomplete.append(f"{name}: expected {count} pieces; missing {', '.join(missing)}")
        elif not file.exists() or digest_of(file.read_bytes()) != digest:
            content = b"".join(pieces[number].read_bytes() for number in range(1, count + 1))
            if digest_of(content) != digest:
                raise ValueError(f"{file}: its {count} pieces are damaged; copy them again")
            unfinished = folder / f"{name}.unfinished"
            unfinished.write_bytes(content)
            os.replace(unfinished, file)
    return incomplete


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sources", type=Path, nargs="+", metavar="FOLDER|FILE.whl", help="what to pack, in the order of transfer"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the pieces")
    parser.add_argument("--piece-mib", type=int, default=48, help="maximum size of a piece, MiB")
    parser.add_argument(
        "--torch", type=Path, help="folder of an installed torch package, of the version on the other machine"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    of_torch: set[str] = set()
    for library in sorted(options.torch.glob("lib/*.so*")) if options.torch else []:
        of_torch |= symbols(library, "--defined-only")
    if options.torch and not of_torch:
        parser.error(f"--torch {options.torch}: expected an installed torch package with lib/*.so")
    missing: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.out) as temporary:
        for source in options.sources:
            file = source
            if source.is_dir():
                wheels = sorted(source.glob("*.whl"))
                if not wheels:
                    parser.error(f"{source}: expected a folder with *.whl files")
                file = Path(temporary) / f"{source.name}.zip"
                print(f"{source}:")
                missing += bundle(wheels, file, of_torch)
            for piece in cut(file, options.out, options.piece_mib << 20):
                print(f"{piece}: {piece.stat().st_size / 2**20:.1f} MiB", flush=True)
    for line in missing:
        print(f"missing in torch: {line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
