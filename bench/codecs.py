"""Bytes, error and speed of each codec: `python bench/codecs.py`. Writes bench/results/codecs-<device>.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from reporting import Page, device_name, options_of, timed, versions
from torch import Tensor

from lowtide.store import CODECS


def seconds(call: Callable[[], Any], device: str, rounds: int = 7) -> float:
    """Median of several runs, after two to warm up."""
    return statistics.median([timed(call, device) for _ in range(rounds + 2)][2:])


def inputs(device: str, numel: int) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    normal = torch.randn(numel, device=device, generator=generator)
    return {
        "normal float32": normal,
        "normal bfloat16": normal.bfloat16(),
        "ReLU output, float32": normal.relu(),
        "dropout mask, bool": torch.rand(numel, device=device, generator=generator) < 0.1,
        "token ids, int64": torch.randint(0, 50_000, (numel,), device=device, generator=generator),
    }


def main() -> None:
    options = options_of(__doc__, CODECS).parse_args()
    device, numel = options.device, (1 << 26 if options.device == "cuda" else 1 << 22)
    page = Page(
        options.out,
        f"codecs-{device}.md",
        f"# Codecs on {device_name(device)}",
        "",
        f"{versions()}; {numel} values in rows of 1024; medians of 7. Error: the "
        "root mean square and the largest, as a share of the largest magnitude. GB/s of the uncompressed bytes; "
        "*copy* is a plain copy on the device.",
        "",
        "| input | codec | bytes | rms error | largest error | write GB/s | read GB/s |",
        "|---|---|---|---|---|---|---|",
    )
    for kind, flat in inputs(device, numel).items():
        copy_s = seconds(flat.clone, device)
        page.add(f"| {kind} | *copy* | 100 % | 0 | 0 | {flat.nbytes / copy_s / 1e9:.1f} | |")
        for codec in map(CODECS.__getitem__, options.cases):
            encoded = codec.encode(flat, 1024)
            if encoded is None:
                continue
            write_s = seconds(lambda codec=codec, flat=flat: codec.encode(flat, 1024), device)
            read_s = seconds(lambda codec=codec, encoded=encoded: codec.decode(encoded, encoded.parts), device)
            error = (codec.decode(encoded, encoded.parts).double() - flat.double()).abs()
            scale = flat.double().abs().max()
            rms, largest = (error.square().mean().sqrt() / scale).item(), (error.max() / scale).item()
            page.add(
                f"| {kind} | `{codec.name}` | {encoded.nbytes / flat.nbytes:.1%} | {rms:.1e} | {largest:.1e} "
                f"| {flat.nbytes / write_s / 1e9:.1f} | {flat.nbytes / read_s / 1e9:.1f} |"
            )


if __name__ == "__main__":
    main()
